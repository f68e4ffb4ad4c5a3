"""Public bug reports that are about compiling rather than about one program; the numbers are those of the reports."""

from __future__ import annotations

import functools
import itertools
import math
import re
from pathlib import Path

import pytest
import test_field_reports as programs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from field import AOT, PROGRAMS, compare, number_of, run, sm, widened
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_fx
from flash_fx import tiled
from flash_fx.testing import capture_rewrites

# Tests of other files that are all or most of a report.
ELSEWHERE = {
    6: "tests/test_zoo_numerics.py::test_training",  # causal_bottom_right, causal_buffer with rows of their own
    9: "tests/kernels/test_interpret.py::test_scores",
    15: "tests/kernels/test_interpret.py::test_head_dims",
    16: "tests/kernels/test_tiles.py::test_every_kernel_fits_every_device",
    18: "tests/gpu/test_numerics.py::test_dropout_differs_in_every_replay_of_a_cuda_graph",
    19: "tests/gpu/test_field_reports.py::test_report_19_a_change_of_the_precision_is_honoured",
    21: "tests/gpu/test_field_reports.py::test_report_21_addresses_beyond_32_bits",
    22: "tests/surface/test_backend.py::test_uuid_changes_with",
    24: "tests/kernels/test_interpret.py::test_gradients_are_bitwise_repeatable_and_only_the_asked_for_are_made",
    28: "tests/gpu/test_field_reports.py::test_report_28_a_broadcast_mask_stays_small",
    32: "tests/ops/test_contracts.py::test_opcheck_backward",
    38: "tests/gpu/test_field_reports.py::test_report_38_the_second_device",
    40: "tests/test_models.py::test_every_layer_is_fused_and_no_score_matrix_remains",
    42: "tests/mutate.py::MUTANTS",
}
NOT_APPLICABLE = {
    23: "nothing is tuned by running it: tiles are a table (flash_fx/kernels/tiles.py), and no kernel accumulates "
    "into memory that another run of it would find",
    36: "ranks choose alike: the table depends on the program, the shapes and the device alone",
}


def qkv(*shape, grad=True, **options):
    torch.manual_seed(0)
    return [torch.randn(*(shape or (2, 4, 8, 16)), requires_grad=grad, **options) for _ in range(3)]


def plain(q, k, v):
    return sm(q @ k.mT * 0.25) @ v


def close_to_eager(compiled, fn, args):
    compare(run(compiled, args), run(fn, args), run(fn, widened(args)))


def test_every_report_is_tested_or_explained():
    here = [number_of(p.name) for p in PROGRAMS] + [number_of(n) for n in globals()]
    assert set(range(1, 43)) == {n for n in here if n} | ELSEWHERE.keys() | NOT_APPLICABLE.keys()
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        assert re.search(rf"^(def )?{name}\b", (Path(__file__).parents[1] / file).read_text(), re.M), place
    assert programs.test_program


# *** 5: an empty row in the loss of others ***


@pytest.mark.parametrize("spelling", ["filled", "added"])
def test_report_05_other_rows_do_not_notice_an_empty_one(spelling):
    drop = torch.zeros(4, 4, dtype=torch.bool)
    drop[0] = True

    def fn(q, k, v):
        s = q @ k.mT * 0.25
        return sm(s.masked_fill(drop, -math.inf) if spelling == "filled" else s + torch.where(drop, -math.inf, 0.0)) @ v

    q, k, v = qkv(1, 1, 4, 16)
    out = torch.compile(fn, backend=AOT)(q, k, v)
    assert out[:, :, 0].isnan().all()  # as in eager
    dq, dk, dv = torch.autograd.grad(out[:, :, 1:].sin().sum(), (q, k, v))
    alone = plain(rows := q[:, :, 1:], k, v)
    known = torch.autograd.grad(alone.sin().sum(), (rows, k, v))
    torch.testing.assert_close(out[:, :, 1:], alone)
    torch.testing.assert_close(dq[:, :, 1:], known[0])
    for ours, without in ((dk, known[1]), (dv, known[2])):  # in eager the empty row makes these NaN throughout
        assert ours.isnan().all() or torch.allclose(ours, without, atol=1e-5)


# *** 8, 13, 14: shapes that change ***


def test_report_08_shorter_keys_make_the_shape_dynamic():
    compiled = torch.compile(plain, backend=AOT)
    q, k, v = qkv(1, 2, 257, 16)
    for cut in (257, 129, 100):
        wanted = torch.autograd.grad(plain(q, k[:, :, :cut], v[:, :, :cut]).sin().sum(), (q, k, v))
        got = torch.autograd.grad(compiled(q, k[:, :, :cut], v[:, :, :cut]).sin().sum(), (q, k, v))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_report_13_one_graph_for_sizes_that_differ_in_every_axis():
    compiled = torch.compile(programs.field_programs.dynamic_attention, backend=AOT, dynamic=True)
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril() | (torch.rand(1, 1, 512, 512) < 0.3)
    mask[..., 0] = True
    with flash_fx.recording() as reports:
        for b, h, m, n in ((2, 4, 16, 18), (3, 4, 17, 33), (1, 4, 1, 128), (5, 4, 300, 2), (2, 8, 16, 16)):
            torch.manual_seed(m)
            args = [torch.randn(b, h, s, 32, requires_grad=True) for s in (m, n, n)]
            close_to_eager(compiled, programs.field_programs.dynamic_attention, [*args, mask])
    assert all((r.fused, r.left) == (1, 0) for r in reports)
    assert len(reports) <= 3  # sizes of 1, and an equality of sizes that the first call had


def test_report_14_many_lengths_compile_twice():
    compiled = torch.compile(plain, backend=AOT)
    with flash_fx.recording() as reports:
        for length in range(33, 700, 35):
            compiled(*qkv(2, 2, length, 16))
    assert [(r.fused, r.left) for r in reports] == [(1, 0)] * 2


def test_report_14_every_head_dim_is_fused():
    compiled = torch.compile(plain, backend=AOT)
    with flash_fx.recording() as reports:
        for d in (16, 24, 40):
            compiled(*qkv(2, 2, 9, d))
    assert [(r.fused, r.left) for r in reports] == [(1, 0)] * 3


def test_report_14_a_scale_that_changes_is_right_with_every_value():
    """A program holds numbers: each value compiles anew, until Dynamo's limit, and is fused as long as it does."""

    def fn(q, k, v, scale):
        return sm(q @ k.mT * scale) @ v

    compiled, args = torch.compile(fn, backend=AOT), qkv(grad=False)
    with flash_fx.recording() as reports:
        for scale in (0.1, 0.25, 0.5, -0.75, 0.0):
            torch.testing.assert_close(compiled(*args, scale), fn(*args, scale), rtol=1e-4, atol=1e-5)
    assert {(r.fused, r.left) for r in reports} == {(1, 0)}


# *** 12: every spelling ***

PRODUCTS = {
    "matmul": lambda q, k: q @ k.transpose(-2, -1),
    "bmm": lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:3], -1),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "baddbmm": lambda q, k: torch.baddbmm(
        q.new_zeros(1, 1, 1), q.reshape(-1, *q.shape[2:]), k.reshape(-1, *k.shape[2:]).mT
    ).view(*q.shape[:3], -1),
}
SCALES = {"mul": lambda s: s * 0.2, "div": lambda s: s / 5.0, "on_q": None, "on_k": None}
SOFTMAXES = {
    "last": lambda s: F.softmax(s, dim=-1), "third": lambda s: F.softmax(s, dim=3),
    "dtype": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "float": lambda s: s.float().softmax(-1).to(s.dtype),
}  # fmt: skip
DROPOUTS = {"none": lambda w: w, "eval": lambda w: F.dropout(w, 0.5, False), "zero": lambda w: F.dropout(w, 0.0, True)}
CHOICES = list(itertools.product(PRODUCTS, SCALES, ("mask+s", "s+mask"), ("contiguous", "permuted"), (1, 4)))


@pytest.mark.parametrize("chunk", range(8))
def test_report_12_every_spelling_is_fused(chunk):
    """All products, scales, orders, layouts and batches; softmax, dropout and dtype take turns."""
    for number, (product, scale, order, layout, batch) in list(enumerate(CHOICES))[chunk::8]:
        torch._dynamo.reset()
        dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        softmax, dropout = list(SOFTMAXES)[number // 2 % 4], list(DROPOUTS)[number // 8 % 3]

        def fn(q, k, v, mask, p=product, s=scale, o=order, perm=layout, f=softmax, d=dropout):
            if perm == "permuted":
                q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
            scores = PRODUCTS[p](q * 0.2 if s == "on_q" else q, k * 0.2 if s == "on_k" else k)
            scores = scores if SCALES[s] is None else SCALES[s](scores)
            return DROPOUTS[d](SOFTMAXES[f](mask + scores if o == "mask+s" else scores + mask)) @ v

        shape = (batch, 2, 16, 32) if layout == "contiguous" else (batch, 16, 2, 32)
        mask = torch.zeros(batch, 1, 1, 16, dtype=dtype)
        mask[..., 11:] = -10.0
        found = capture_rewrites(fn, *qkv(*shape, dtype=dtype), mask)[2]
        assert (found.fused, found.left) == (1, 0), (CHOICES[number], softmax, dropout, str(found))


# *** 17, 18: dropout ***

RATE = 0.5


def dropped(q, k, v):
    return F.dropout(sm(q @ k.mT * 0.25), RATE) @ v


def under_checkpoint(q, k, v):
    return checkpoint(dropped, q, k, v, use_reentrant=False)


def under_a_policy(q, k, v, policy=CheckpointPolicy.MUST_RECOMPUTE):
    def choose(_, operator, *args, **kwargs):
        ours = operator is torch.ops.flash_fx.attention.default
        return policy if ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    return checkpoint(dropped, q, k, v, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("budget", [None, 0.3, 0.7])  # at 0 torch draws anew whatever is random, stock dropout too
@pytest.mark.parametrize("fn", [dropped, under_checkpoint, under_a_policy], ids=lambda f: f.__name__)
def test_report_17_the_backward_drops_what_the_forward_dropped(fn, budget):
    if budget is not None and fn is not dropped:
        pytest.skip("a budget and a checkpoint exclude each other")
    q, k, _ = qkv(2, 2, 64, 32)
    v = torch.eye(64).expand(2, 2, 64, 64).clone().requires_grad_()
    settings = {} if budget is None else {"activation_memory_budget": budget}
    with torch._functorch.config.patch(settings), flash_fx.recording() as reports:
        layers = torch.compile(lambda q, k, v: (fn(q, k, v).relu(), fn(q, k, v)), backend=flash_fx)
        first, second = layers(q, k, v)
        direction = torch.randn(second.shape)
        dv = torch.autograd.grad(second, v, direction)[0]
    assert sum(r.fused for r in reports) == 2
    torch.testing.assert_close(dv, second.detach().mT @ direction, rtol=1e-4, atol=1e-5)
    assert not torch.equal(first == 0, second == 0)


@pytest.mark.parametrize("where", ["weights", "result", "both", "scores"])
def test_report_18_only_dropout_of_the_weights_is_absorbed(where):
    def fn(q, k, v):
        scores = q @ k.mT * 0.25
        weights = sm(F.dropout(scores, RATE) if where == "scores" else scores)
        out = (F.dropout(weights, RATE) if where in ("weights", "both") else weights) @ v
        return F.dropout(out, 0.25) if where in ("result", "both") else out

    report = capture_rewrites(fn, *qkv())[2]
    programs_found = [s.program for s in report.sites]
    wanted = {"weights": "; drop = 0.5", "both": "; drop = 0.5", "result": "", "scores": None}[where]
    assert programs_found == ([""] if wanted is None else [f"score = score * 0.25{wanted}"])
    assert report.left == (where == "scores")


def test_report_18_means_over_many_seeds():
    q, k, v = qkv(2, 4, 16, 32, grad=False)
    compiled = torch.compile(dropped, backend=AOT)
    mean = torch.stack([compiled(q, k, v) for _ in range(200)]).mean(0)
    spread = (sm(q @ k.mT * 0.25).square() @ v.square()).sqrt()  # of one draw, at p = 0.5
    assert ((mean - plain(q, k, v)).abs() < 5.5 * spread / math.sqrt(200)).all()


def test_report_18_one_module_in_training_and_in_eval():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.dropout(sm(q @ k.mT * 0.25), 0.999, self.training) @ v

    model = Model()
    compiled = torch.compile(model, backend=AOT)
    q, k, _ = qkv(grad=False)
    ones = torch.ones(2, 4, 8, 16)
    assert (compiled(q, k, ones) == 0).float().mean() > 0.9
    model.eval()
    torch.testing.assert_close(compiled(q, k, ones), ones)


# *** 26: what eager refuses ***


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: sm(q @ k.mT).half() @ v,
        lambda q, k, v: torch.softmax(q @ k.mT, -1, dtype=torch.float32).to(torch.bfloat16) @ v.half(),
        lambda q, k, v: sm(q @ k.mT + torch.zeros(8, 8, dtype=torch.float64)) @ v,
        lambda q, k, v: sm(q.half() @ k.mT) @ v,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_report_26_eager_and_compiled_raise_alike(fn):
    args = qkv()
    with pytest.raises(RuntimeError):
        fn(*args)
    with pytest.raises(RuntimeError):  # Dynamo's own error is one
        torch.compile(fn, backend=AOT)(*args)


@pytest.mark.filterwarnings("ignore")
def test_report_26_products_of_nested_tensors_raise_alike():
    nested = torch.nested.nested_tensor([torch.randn(5, 16), torch.randn(7, 16)], layout=torch.jagged)
    for call in (lambda x: sm(x @ x.transpose(1, 2)) @ x,) * 2:
        with pytest.raises(RuntimeError):
            call(nested)
        with pytest.raises(RuntimeError):
            torch.compile(call, backend=AOT)(nested)


# *** 27: second derivatives and function transforms ***


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_report_27_a_second_derivative_outside_is_an_error(inner):
    args = qkv()
    out = torch.compile(plain, backend=flash_fx.make_backend(inner=inner))(*args)
    with pytest.raises(RuntimeError, match=r"double backward|no autograd formula"):
        torch.autograd.grad(out.sum(), args[0], create_graph=True)[0].square().sum().backward()


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian], ids=lambda t: t.__name__
)
def test_report_27_transforms_inside_are_left(transform):
    q, k, v = (t.detach()[0, 0] for t in qkv())
    fn = transform(lambda q: plain(q, k, v).square().sum())
    with flash_fx.recording() as reports:
        got = torch.compile(lambda q: fn(q), backend=AOT)(q)
    torch.testing.assert_close(got, fn(q), rtol=1e-4, atol=1e-5)
    assert [(r.fused, r.left) for r in reports] == [(0, 1)]


@pytest.mark.parametrize("mask", ["shared", "batched", "made_inside"])
def test_report_27_vmap(mask):
    keep = torch.rand(*((3,) if mask == "batched" else ()), 8, 8) < 0.7
    keep[..., 0] = True

    def one(q, k, v, keep):
        keep = q.new_ones(8, 8).tril() > 0 if mask == "made_inside" else keep
        return sm((q @ k.mT).masked_fill(~keep, -math.inf)) @ v

    fn = torch.vmap(one, in_dims=(0, 0, 0, 0 if mask == "batched" else None))
    close_to_eager(torch.compile(fn, backend=AOT), fn, [*qkv(3, 2, 8, 16), keep])


# *** 28: captures stay as small as they are ***


@pytest.mark.parametrize("kind", ["bool", "float", "expanded", "computed"])
def test_report_28_a_broadcast_mask_is_captured_as_it_is(kind):
    def fn(q, k, v, mask):
        if kind == "computed":
            mask = torch.arange(33)[None, None, None] < mask.view(2, 1, 1, 1)
        if kind == "expanded":
            mask = mask.expand(2, 4, 33, 33)
        s = q @ k.mT
        return sm(s + mask if kind == "float" else s.masked_fill(~mask, -1e9)) @ v

    shape = (2,) if kind == "computed" else (2, 1, 1, 33)
    mask = torch.ones(shape, dtype={"float": torch.float32, "computed": torch.int64}.get(kind, torch.bool))
    _, (after,), report = capture_rewrites(fn, *qkv(2, 4, 33, 16), mask)
    assert report.fused == 1
    call = next(n for n in after.graph.nodes if n.target is torch.ops.flash_fx.attention.default)
    for capture in call.args[3]:
        assert capture.meta["example_value"].numel() <= 2 * 33


# *** 32, 41: what operators write ***


@torch.library.custom_op("flash_fx_test::named_out", mutates_args=())
def named_out(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x + out


@torch.library.custom_op("flash_fx_test::log_keys", mutates_args=("log",))
def log_keys(keys: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    log.copy_(keys)
    return keys.new_zeros(())


named_out.register_fake(lambda x, out: torch.empty_like(x))
log_keys.register_fake(lambda keys, log: keys.new_empty(()))


def test_report_32_an_argument_that_is_only_called_out():
    def fn(q, k, v):
        return sm(q @ torch.ops.flash_fx_test.named_out(k, out=v).mT) @ v

    args = qkv(grad=False)
    with flash_fx.recording() as reports:
        torch.testing.assert_close(torch.compile(fn, backend=AOT)(*args), fn(*args))
    assert [r.fused for r in reports] == [1]


def test_report_32_one_input_for_two_attentions():
    def fn(q, k, v):
        return plain(q, k, v) + plain(q, k, v * 2)

    close_to_eager(torch.compile(fn, backend=AOT), fn, qkv())


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_report_41_a_side_effect_whose_result_is_ignored(inner):
    def fn(q, k, v, log):
        token = torch.ops.flash_fx_test.log_keys(k, log)
        return sm(q @ k.mT * 0.25 + 0 * token) @ v

    compiled = torch.compile(fn, backend=flash_fx.make_backend(inner=inner))
    log, wanted = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 8, 16)
    for step in range(3):
        q, k, v = (t + step for t in qkv(grad=False))
        torch.testing.assert_close(compiled(q, k, v, log), fn(q, k, v, wanted), rtol=1e-4, atol=1e-5)
        assert torch.equal(log, wanted)


# *** 33, 37: several processes; one is enough to meet their graphs ***


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return x + self.o(plain(q, k, v).transpose(1, 2).flatten(2))


class Stack(nn.Module):  # not nn.Sequential, whose forward Dynamo does not take as one graph
    def __init__(self, layers, size):
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers, size):
    torch.manual_seed(0)
    return Stack(layers, size)


def after_three_steps(model, call, size):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        call(torch.randn(2, 9, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("order", ["compiled_inside", "compiled_outside"])
def test_report_33_ddp_splits_the_graph(order, process_group):
    size = 256  # a layer fills the smallest bucket
    wanted = after_three_steps(eager := stack(3, size), eager, size)
    model = stack(3, size)
    with flash_fx.recording() as reports:
        if order == "compiled_inside":
            call = DistributedDataParallel(torch.compile(model, backend=AOT), bucket_cap_mb=1)
        else:
            call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=AOT)
        got = after_three_steps(model, call, size)
    assert (sum(r.fused for r in reports), sum(r.left for r in reports)) == (3, 0)
    assert len(reports) > 1  # Dynamo splits where DDP's buckets end
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_report_37_dtensors_are_left(process_group):
    mesh = dist.init_device_mesh("cpu", (1,))
    args = [distribute_tensor(t.detach(), mesh, [Shard(1)]).requires_grad_() for t in qkv()]
    with flash_fx.recording() as reports:
        out = torch.compile(plain, backend=AOT)(*args)
    torch.testing.assert_close(out.full_tensor(), plain(*args).full_tensor())
    assert [s.reason for r in reports for s in r.sites] == ["operand"]


@pytest.mark.parametrize("local", [True, False])
def test_report_37_tensor_parallel_layers(local, process_group):
    wanted, x = stack(1, 64), torch.randn(2, 9, 64)
    plan = {f"layers.0.{n}": ColwiseParallel(use_local_output=local) for n in "qkv"} | {"layers.0.o": RowwiseParallel()}
    model = parallelize_module(stack(1, 64), dist.init_device_mesh("cpu", (1,)), plan)
    with flash_fx.recording() as reports:
        out = torch.compile(model, backend=AOT)(x)
    torch.testing.assert_close(out, wanted(x), rtol=1e-4, atol=1e-5)
    assert [(r.fused, r.left) for r in reports] == [(1, 0) if local else (0, 1)]
    out.sum().backward()


# *** 34: what is saved and what is made again ***


@pytest.mark.parametrize(("policy", "forwards"), [("MUST_SAVE", 1), ("MUST_RECOMPUTE", 2)])
@pytest.mark.filterwarnings("ignore")
def test_report_34_a_policy_for_our_operator_is_followed(policy, forwards, monkeypatch):
    calls = []
    forward = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda *a: calls.append(1) or forward(*a))

    def fn(q, k, v):
        return under_a_policy(q, k, v, CheckpointPolicy[policy]).sin()

    torch.compile(fn, backend=flash_fx)(*qkv(2, 2, 64, 32)).sum().backward()
    assert len(calls) == forwards


def test_report_34_new_nodes_have_values_and_places():
    _, (after,), _ = capture_rewrites(lambda q, k, v: plain(q, k[:, :, 1:], v[:, :, 1:]) + 1, *qkv())
    new = [n for n in after.graph.nodes if n.op == "call_function"]
    assert all("example_value" in n.meta and "stack_trace" in n.meta for n in new)
