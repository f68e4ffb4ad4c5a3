"""The ways in: the module, the name, make_backend, the installed pass."""

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import flash_fx
from flash_fx.fingerprint import uuid
from flash_fx.options import Options


def attention(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.125).softmax(-1) @ v


def plain(x):
    return x.relu() + 1


def qkv(length=16):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, 4, length, 32, generator=generator) for _ in range(3)]


def compiled(backend, fn=attention, **kwargs):
    """Result and reports of compiling and calling once."""
    with flash_fx.recording() as reports:
        out = torch.compile(fn, backend=backend, **kwargs)(*(qkv() if fn is attention else [torch.ones(4)]))
    return out, reports


def fused(reports):
    return sum(r.fused for r in reports)


# *** backends ***


@pytest.mark.parametrize("backend", [flash_fx, *(flash_fx.make_backend(i) for i in ("inductor", "aot_eager", "eager"))])
def test_backends(backend):
    out, reports = compiled(backend)
    assert fused(reports) == 1
    torch.testing.assert_close(out, attention(*qkv()))


def test_backend_by_name():
    if "flash_fx" not in torch._dynamo.list_backends():
        pytest.skip("flash_fx is not installed, so it has no entry point")
    assert fused(compiled("flash_fx")[1]) == 1


def test_gradients():
    ours, eager = ([t.requires_grad_() for t in qkv()] for _ in range(2))
    torch.compile(attention, backend=flash_fx)(*ours).square().sum().backward()
    attention(*eager).square().sum().backward()
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a.grad, b.grad)


def test_fullgraph_and_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, q, k, v):
            return self.proj(attention(q, k, v))

    net = Net()
    with flash_fx.recording() as reports:
        out = torch.compile(net, backend=flash_fx, fullgraph=True)(*qkv())
    assert fused(reports) == 1
    torch.testing.assert_close(out, net(*qkv()))


def test_left_sites_still_run():
    def weights_too(q, k, v):
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v, weights

    with flash_fx.recording() as reports:
        out = torch.compile(weights_too, backend=flash_fx)(*qkv())
    assert [s.status for r in reports for s in r.sites] == ["left"]
    torch.testing.assert_close(out, weights_too(*qkv()))


# *** options ***


def test_unknown_inner():
    with pytest.raises(flash_fx.OptionError, match=r"inner must be one of 'inductor', 'aot_eager', 'eager', got 'tvm'"):
        flash_fx.make_backend("tvm")


def test_unknown_option():
    with pytest.raises(
        flash_fx.OptionError, match=r"unknown option 'fast'; known options are deterministic, inductor_patterns, strict"
    ):
        flash_fx.make_backend(fast=True)
    with pytest.raises(flash_fx.OptionError, match=r"'strict' must be True or False, got 'yes'"):
        flash_fx.make_backend(strict="yes")
    with pytest.raises(flash_fx.OptionError, match="unknown option 'fast'"):
        flash_fx.install(fast=True)


def test_strict():
    backend = flash_fx.make_backend("eager", strict=True)
    assert fused(compiled(backend)[1]) == 1
    with pytest.raises(
        Exception, match=r"strict=True, but no attention was fused.*No softmax between two matrix products"
    ):
        compiled(backend, plain)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gradients_that_need_not_repeat(inner):
    """Elsewhere than on Hopper they do all the same."""
    ours, eager = ([t.requires_grad_() for t in qkv()] for _ in range(2))
    backend = flash_fx.make_backend(inner, deterministic=False)
    torch.compile(attention, backend=backend)(*ours).square().sum().backward()
    attention(*eager).square().sum().backward()
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a.grad, b.grad)


def test_equal_backends_share_compiled_code():
    assert flash_fx.make_backend("eager") == flash_fx.make_backend("eager")
    assert hash(flash_fx.make_backend("eager")) == hash(flash_fx.make_backend("eager"))
    assert flash_fx.make_backend("eager") != flash_fx.make_backend("eager", strict=True)


def seen_by_inductor(monkeypatch, **kwargs):
    """The configuration that reaches Inductor."""
    from torch._inductor import compile_fx as module

    seen = {}

    def spy(gm, inputs, config_patches=None, **_):
        seen.update(config_patches)
        return gm.forward

    monkeypatch.setattr(module, "compile_fx", spy)
    compiled(flash_fx, **kwargs)
    return seen


def test_options_reach_inductor(monkeypatch):
    assert seen_by_inductor(monkeypatch, options={"epilogue_fusion": False})["epilogue_fusion"] is False


def test_mode_reaches_inductor(monkeypatch):
    seen = seen_by_inductor(monkeypatch, mode="max-autotune-no-cudagraphs")
    assert seen["max_autotune"] is True


def test_bad_mode_and_option():
    with pytest.raises(Exception, match="no_such_mode"):
        compiled(flash_fx, mode="no_such_mode")
    with pytest.raises(Exception, match="no_such_option"):
        compiled(flash_fx, options={"no_such_option": 1})


def test_mode_needs_inductor():
    with pytest.raises(Exception, match=r"mode= and options= are Inductor's; the inner backend is 'eager'"):
        compiled(flash_fx.make_backend("eager"), options={"epilogue_fusion": False})


# *** shapes ***


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_one_graph_over_lengths(inner):
    fn = torch.compile(attention, backend=flash_fx.make_backend(inner), dynamic=True, fullgraph=True)
    with flash_fx.recording() as reports, torch._dynamo.config.patch(error_on_recompile=True):
        for length in (16, 17, 40, 128):
            torch.testing.assert_close(fn(*qkv(length)), attention(*qkv(length)))
    assert [r.fused for r in reports] == [1]


@pytest.mark.slow
def test_one_graph_over_lengths_with_inductor():
    fn = torch.compile(attention, backend=flash_fx, dynamic=True)
    with flash_fx.recording() as reports, torch._dynamo.config.patch(error_on_recompile=True):
        for length in (16, 17, 40):
            torch.testing.assert_close(fn(*qkv(length)), attention(*qkv(length)))
    assert [r.fused for r in reports] == [1]


# *** recording ***


def test_recording_with_a_warm_cache():
    assert fused(compiled(flash_fx)[1]) == 1
    torch._dynamo.reset()  # Inductor's cache on disk stays
    assert fused(compiled(flash_fx)[1]) == 1


def test_recordings_nest():
    with flash_fx.recording() as outer:
        inner = compiled(flash_fx.make_backend("eager"))[1]
    assert fused(inner) == fused(outer) == 1
    assert fused(compiled(flash_fx.make_backend("eager"), plain)[1]) == 0


# *** the pass ***


@pytest.fixture
def clean_pass():
    before = inductor_config.pre_grad_custom_pass
    yield
    inductor_config.pre_grad_custom_pass = before


def test_install_accelerates_stock_compile(clean_pass):
    before = inductor_config.pre_grad_custom_pass
    with flash_fx.install() as installed:
        assert inductor_config.pre_grad_custom_pass is installed
        out, reports = compiled("inductor")
    assert inductor_config.pre_grad_custom_pass is before
    assert fused(reports) == 1
    torch.testing.assert_close(out, attention(*qkv()))


def test_install_chains(clean_pass):
    seen = []

    class Mine(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(graph)

        def uuid(self):
            return "mine"

    mine = Mine()
    inductor_config.pre_grad_custom_pass = mine
    flash_fx.install()
    installed = inductor_config.pre_grad_custom_pass
    assert installed.uuid().endswith(":mine")
    assert fused(compiled("inductor")[1]) == 1
    assert len(seen) == 1
    flash_fx.uninstall()
    assert inductor_config.pre_grad_custom_pass is mine
    flash_fx.uninstall()
    assert inductor_config.pre_grad_custom_pass is mine


def test_chained_pass_without_uuid_is_not_cached(clean_pass):
    assert flash_fx.FlashAttentionPass(lambda graph: None).uuid() is None


# *** uuid ***


def test_uuid_same():
    assert flash_fx.FlashAttentionPass().uuid() == flash_fx.FlashAttentionPass().uuid() == uuid(Options())


def test_uuid_changes_with_options():
    assert uuid(Options(inductor_patterns=True)) != uuid(Options())


@pytest.mark.parametrize("edited", ["template", "source", "triton", "torch"])
def test_uuid_changes_with(edited, tmp_path, monkeypatch):
    """Everything that decides what the pass does, on a copy."""
    import shutil

    from flash_fx import fingerprint
    from flash_fx.kernels import render

    fingerprint._sources.cache_clear()
    before = uuid(Options())
    package = tmp_path / "flash_fx"
    shutil.copytree(
        fingerprint.Path(fingerprint.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(render.template_folder(), tmp_path / "templates")
    monkeypatch.setattr(fingerprint, "__file__", str(package / "fingerprint.py"))
    monkeypatch.setattr(render, "template_folder", lambda: tmp_path / "templates")
    fingerprint._sources.cache_clear()
    assert uuid(Options()) == before  # the same content elsewhere
    if edited == "template":
        path = tmp_path / "templates" / "forward.py.jinja"
        path.write_text(path.read_text() + "# edited\n")
    elif edited == "source":
        (package / "new.py").write_text("")
    elif edited == "triton":
        monkeypatch.setattr(fingerprint, "_triton_version", lambda: "0.0.0")
    else:
        monkeypatch.setattr(torch, "__version__", "0.0.0")
    fingerprint._sources.cache_clear()
    try:
        assert uuid(Options()) != before
    finally:
        fingerprint._sources.cache_clear()
