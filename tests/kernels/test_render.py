"""Rendered files: self-contained, named by content, stable."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from flash_fx.kernels.plan import CONTEXTS, gradients_of
from flash_fx.kernels.render import cache_folder, render, store, template_folder
from flash_fx.kernels.spec import CaptureFact, KernelSpec
from flash_fx.score.text import parse

CAUSAL = KernelSpec("score = score * 0.125; keep = kv_idx <= q_idx", (), "bfloat16", 64, 64)
BIASED = KernelSpec(
    "t0 = c0[h, q_idx, kv_idx]; score = tanh(score * 0.1) * 10.0 + t0; keep = c1[b, kv_idx]; sink = c2[h]; "
    "weight = c0[0, q_idx, kv_idx]; drop = 0.1",
    (CaptureFact("bfloat16", 3), CaptureFact("bool", 2), CaptureFact("float32", 1)), "float16", 40, 72, 2,
)  # fmt: skip
FILLED = replace(
    CAUSAL, program="score = score * 0.125 + where(kv_idx <= q_idx, 0.0, -1e9) + c0[h, q_idx, kv_idx]",
    captures=(CaptureFact("float32", 3),),
)  # fmt: skip


def _render_all(spec: KernelSpec) -> dict[str, str]:
    left_out = {"backward_capture", "backward_dq_matrix"} | ({"block_kinds"} if spec.parsed.keep is None else set())
    texts = {t: render(t, spec) for t in CONTEXTS if t not in left_out}
    for i, gradient in enumerate(gradients_of(spec.parsed, 0) if spec.captures else []):
        texts[f"backward_capture {i}"] = render("backward_capture", spec, gradient)
        if gradient.mode == "tile":
            texts[f"backward_dq_matrix {i}"] = render("backward_dq_matrix", spec, gradient, 2)
    return texts


@pytest.mark.parametrize("spec", [CAUSAL, BIASED, FILLED], ids=["causal", "biased", "filled"])
def test_files_are_plain_python(spec: KernelSpec) -> None:
    for name, text in _render_all(spec).items():
        tree = ast.parse(text)
        assert ast.get_docstring(tree), f"{name} has no notation block"
        assert text.isascii() and "\t" not in text and "{%" not in text and "{{" not in text
        assert not any(line != line.rstrip() for line in text.splitlines()), f"{name} has trailing blanks"
        imports = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        assert imports == ["triton", "triton.language"], f"{name} is not self-contained: {imports}"


def test_header_names_the_program_and_the_versions() -> None:
    head = render("forward", CAUSAL).splitlines()[:10]
    assert head[0].startswith("# Rendered by flash_fx 0.1.0 from forward.py.jinja; ")
    assert "# program: 'score = score * 0.125; keep = kv_idx <= q_idx'" in head
    assert render("forward", CAUSAL) == render("forward", replace(CAUSAL))


def test_scale_is_folded_into_exp2_and_causal_has_one_unmasked_loop() -> None:
    text = render("forward", CAUSAL)
    assert "p = tl.math.exp2(s * 0.18033688011112042 - (m_use * 0.18033688011112042)[:, None])" in text
    assert text.count("for start_n in") == 2 and text.count("offs_n[None, :] <= offs_m[:, None]") == 1


def test_a_fill_is_a_mask_that_full_tiles_do_not_compute() -> None:
    spec = replace(CAUSAL, program="score = where(kv_idx <= q_idx, score * 0.125, -1e9)")
    text = render("forward", spec)
    middle = text[text.index("# middle") : text.index("# tail")]
    assert "s = qk\n" in middle and "tl.where(t" not in middle and "m_i = m_i * 0.125  # natural units" in middle
    assert text.count("<= offs_m[:, None]") == 2 and "if may_count(m_i, top, mask_m):" in text
    assert "may_count" not in render("backward_dq", spec)  # nothing flows through what was replaced
    assert "may_count" in render(
        "backward_dq", replace(spec, program="score = score + where(kv_idx <= q_idx, 0.0, -1e9)")
    )


def test_key_is_the_identity_of_a_spec() -> None:
    others = [replace(CAUSAL, d=128), replace(CAUSAL, dtype="float16"), replace(CAUSAL, program=""), BIASED]
    assert CAUSAL.key() == replace(CAUSAL).key() and len({s.key() for s in [CAUSAL, *others]}) == 5


def test_store_is_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_FX_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    a, b = store("forward", CAUSAL, "x = 1\n"), store("forward", CAUSAL, "x = 2\n")
    assert a != b and a.read_text() == "x = 1\n" and store("forward", CAUSAL, "x = 1\n") == a
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".py", ".py"]


def test_templates_are_found() -> None:
    assert (template_folder() / "forward.py.jinja").is_file()


def test_source_of_a_loaded_kernel_can_be_read() -> None:
    pytest.importorskip("triton")
    from flash_fx.kernels.render import load_kernel

    kernel = load_kernel("forward", CAUSAL)
    assert kernel is load_kernel("forward", replace(CAUSAL))
    assert "def flash_fx_forward(" in inspect.getsource(kernel.fn)


@pytest.mark.parametrize(
    "text, axes, grouped, scattered",
    [
        ("score = score + c0[h, q_idx, kv_idx]", "h q_idx kv_idx", (), ()),
        ("score = score + c0[kv_idx, 0, q_idx]", "q_idx kv_idx", (), ()),
        ("score = score + c0[b // 2, h, q_idx, kv_idx]", "h q_idx kv_idx", (0,), ()),
        ("score = score + c0[b // s0 % 3, b % s0, h // 2, kv_idx, q_idx]", "q_idx kv_idx", (0, 1, 2), ()),
        ("score = score + c0[b * 2 + h, q_idx, kv_idx]", "b h q_idx kv_idx", (), (0,)),
        ("score = score + c0[b // 2, kv_idx]", "b kv_idx", (), (0,)),
        ("score = score + c0[b, q_idx + 1, kv_idx]", "b q_idx kv_idx", (), (1,)),
        ("score = score + c0[q_idx, q_idx]", "q_idx", (), (0, 1)),
        ("score = score + c0[h, c1[q_idx, kv_idx]]", "h q_idx kv_idx", (), (1,)),
    ],
)
def test_what_a_gradient_is_indexed_by(text: str, axes: str, grouped: tuple, scattered: tuple) -> None:
    (found,) = gradients_of(parse(text), 0)
    assert (" ".join(found.axes), found.grouped, found.scattered) == (axes, grouped, scattered)


def test_no_gradient_flows_through_a_comparison() -> None:
    assert gradients_of(parse("keep = c0[q_idx - kv_idx] > 0.0; score = where(c0[b] > 0.0, score, 0.0)"), 0) == []
