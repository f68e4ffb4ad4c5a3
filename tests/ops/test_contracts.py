"""The operators keep their word: schemas, fakes, strides, autograd, and errors that say what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_fx
from flash_fx.score.evaluate import reference
from flash_fx.score.text import parse

ops = torch.ops.flash_fx


@dataclass(frozen=True)
class Call:
    """Sizes, program and captures of one call of the operator."""

    name: str
    program: str
    captures: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    kv_heads: int = 4
    value_dim: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float32

    def tensors(self, dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """query, key, value; captures"""
        g = torch.Generator().manual_seed(4)
        keys = (self.batch, self.kv_heads, 7)
        shapes = [(self.batch, 4, 9, 8), (*keys, 8), (*keys, self.value_dim)]
        made = [
            torch.randn(s, generator=g, dtype=torch.float64).to(dtype or self.dtype).requires_grad_()
            for s in (*shapes, *self.captures)
        ]
        return made[:3], made[3:]


CALLS = [
    Call("plain", ""),
    Call("causal", "score = score * 0.5; keep = kv_idx <= q_idx"),
    Call("bias", "score = score * 0.5 + c0[h, q_idx, kv_idx]", ((4, 9, 7),)),
    Call("slopes", "score = score + c0[h] * (kv_idx - q_idx)", ((4,),)),
    Call("grouped", "score = score / 2.0; keep = kv_idx < s0", sizes=(5,), kv_heads=2, value_dim=12),
    Call("sink", "score = score * 0.5; sink = c0[h]", ((4,),)),
    Call("weight", "score = score * 0.5; weight = c0[b, kv_idx]", ((2, 7),)),
    Call("bfloat16", "score = score * 0.5 + c0[kv_idx]", ((7,),), dtype=torch.bfloat16),
    Call("one batch", "score = tanh(score)", batch=1),
    Call("float64", "score = score * 0.5 + c0[q_idx, 0]", ((9, 1),), dtype=torch.float64),
]
EACH_CALL = pytest.mark.parametrize("call", CALLS, ids=lambda c: c.name)
EACH_OP = pytest.mark.parametrize("op", ["attention", "tiled_attention"])


def arguments(call: Call, *, bmhd: bool = False) -> tuple[Any, ...]:
    qkv, captures = call.tensors()
    return (*qkv, captures, list(call.sizes), None, call.program, bmhd)


def backward_arguments(call: Call) -> tuple[Any, ...]:
    qkv, captures = call.tensors()
    qkv, captures = [t.detach() for t in qkv], [t.detach() for t in captures]
    out, lse = ops.attention(*qkv, captures, list(call.sizes), None, call.program, False)
    needs = [True] * (3 + len(captures))
    return (torch.randn_like(out), *qkv, captures, list(call.sizes), None, out, lse, call.program, needs)


# *** torch.library ***


@EACH_CALL
def test_opcheck(call: Call) -> None:
    torch.library.opcheck(ops.attention.default, arguments(call))


@EACH_CALL
def test_opcheck_tiled(call: Call) -> None:
    detached = [t.detach() if isinstance(t, Tensor) else t for t in arguments(call)]
    detached[3] = [c.detach() for c in detached[3]]
    torch.library.opcheck(ops.tiled_attention.default, tuple(detached))


@pytest.mark.parametrize("op", ["attention_backward", "tiled_attention_backward"])
@pytest.mark.parametrize("call", CALLS[1:6:2], ids=lambda c: c.name)
def test_opcheck_backward(call: Call, op: str) -> None:
    torch.library.opcheck(getattr(ops, op).default, backward_arguments(call))


def layouts(results: Sequence[Tensor]) -> list[tuple]:
    return [(t.shape, t.stride(), t.dtype) for t in results]


def fake_of(op: Callable, args: Sequence[Any]) -> list[tuple]:
    with FakeTensorMode() as mode:
        return layouts(op(*torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, tuple(args))))


@EACH_OP
@pytest.mark.parametrize("bmhd", [False, True])
@EACH_CALL
def test_fake_strides_are_the_real_ones(call: Call, bmhd: bool, op: str) -> None:
    with torch.no_grad():
        args = arguments(call, bmhd=bmhd)
        assert fake_of(getattr(ops, op), args) == layouts(getattr(ops, op)(*args))


@pytest.mark.parametrize("op", ["attention_backward", "tiled_attention_backward"])
@EACH_CALL
def test_fake_strides_of_gradients(call: Call, op: str) -> None:
    args = list(backward_arguments(call))
    args[1] = args[1].transpose(1, 2).contiguous().transpose(1, 2)  # gradients are contiguous for any input layout
    assert fake_of(getattr(ops, op), args) == layouts(getattr(ops, op)(*args))


# *** the public function ***


@EACH_CALL
def test_attention_matches_the_reference_in_float64(call: Call) -> None:
    qkv, captures = call.tensors(torch.float64)
    leaves = [*qkv, *captures]
    ours = flash_fx.attention(*qkv, captures, call.program, call.sizes)
    truth, _ = reference(*qkv, captures, call.sizes, parse(call.program))
    direction = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(out, leaves, direction) for out in (ours, truth))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    qkv, captures = CALLS[2].tensors(torch.float64)
    small = [t[:1, :2, :3, :2].detach().clone().requires_grad_() for t in qkv]
    bias = captures[0][:2, :3, :3].detach().clone().requires_grad_()
    call = lambda q, k, v, c: flash_fx.attention(q, k, v, [c], CALLS[2].program)  # noqa: E731
    assert torch.autograd.gradcheck(call, (*small, bias))


def test_only_wanted_gradients_are_made() -> None:
    (q, k, v), (bias,) = CALLS[2].tensors()
    out = flash_fx.attention(q.detach(), k, v.detach(), [bias.detach()], CALLS[2].program)
    (dk,) = torch.autograd.grad(out.sum(), (k,))
    assert dk.shape == k.shape


@pytest.mark.parametrize("dim", [8, 12], ids=["one head dim", "other value dim"])
def test_a_capture_that_the_program_does_not_read_has_no_gradient(dim: int) -> None:
    q, k, v = (torch.randn(1, 2, 5, d, requires_grad=True) for d in (8, 8, dim))
    unused = torch.randn(3, requires_grad=True)
    flash_fx.attention(q, k, v, [unused]).sum().backward()
    assert q.grad is not None
    assert unused.grad is None or not unused.grad.any()


def test_integer_captures_have_no_gradient() -> None:
    q, k, v = (torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3))
    lengths = torch.tensor([3, 5])
    flash_fx.attention(q, k, v, [lengths], "keep = kv_idx < c0[b]").sum().backward()
    assert torch.equal(k.grad[0, :, 3:], torch.zeros(2, 2, 8))


# *** bad input ***


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


GOOD = (randn(2, 4, 9, 8), randn(2, 4, 7, 8), randn(2, 4, 7, 8))
BAD_OPERANDS: dict[str, tuple[tuple, str]] = {
    "no tensor": (([1.0], *GOOD[1:]), "query must be a tensor, got list"),
    "capture no tensor": ((*GOOD, [3.0], "score = score * c0"), "captures[0] must be a tensor, got float"),
    "rank": (
        (GOOD[0], GOOD[1][0], GOOD[2]),
        "key must be [batch, heads, length, head_dim], got 3 dimensions: [4, 7, 8]",
    ),
    "integers": (
        tuple(t.to(torch.int64) for t in GOOD),
        "query must be float32, bfloat16 or float16 (float64 on the CPU), got torch.int64",
    ),
    "mixed dtypes": (
        (GOOD[0].bfloat16(), *GOOD[1:]),
        "query, key and value must share one dtype, got torch.bfloat16, torch.float32, torch.float32",
    ),
    "device": (
        (*GOOD[:2], randn(2, 4, 7, 8, device="meta")), "value must be on the query's device cpu, got meta",
    ),
    "capture device": (
        (*GOOD, [randn(7, device="meta")], "score = score + c0[kv_idx]"),
        "captures[0] must be on the query's device cpu, got meta",
    ),
    "batch": (
        (GOOD[0][:1], *GOOD[1:]),
        "query, key and value must share the batch, got [1, 4, 9, 8], [2, 4, 7, 8], [2, 4, 7, 8]",
    ),
    "head dims": (
        (randn(2, 4, 9, 16), *GOOD[1:]), "query and key must share head_dim, got [2, 4, 9, 16] and [2, 4, 7, 8]",
    ),
    "key and value lengths": (
        (*GOOD[:2], GOOD[2][:, :, :5]), "key and value must share heads and length, got [2, 4, 7, 8] and [2, 4, 5, 8]",
    ),
    "heads": (
        (GOOD[0], GOOD[1][:, :3], GOOD[2][:, :3]), "query heads must be a multiple of key heads, got 4 and 3",
    ),
    "no heads": (
        (GOOD[0], GOOD[1][:, :0], GOOD[2][:, :0]), "query heads must be a multiple of key heads, got 4 and 0",
    ),
    "head dim": (
        (randn(1, 1, 2, 513), randn(1, 1, 2, 513), randn(1, 1, 2, 8)), "head_dim must be 1 to 512, got 513 for query",
    ),
    "value head dim": (
        (randn(1, 1, 2, 8), randn(1, 1, 2, 8), randn(1, 1, 2, 600)), "head_dim must be 1 to 512, got 600 for value",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD_OPERANDS.values(), ids=BAD_OPERANDS)
def test_bad_operands(args: tuple, message: str) -> None:
    with pytest.raises(flash_fx.OperandError) as raised:
        flash_fx.attention(*args)
    assert str(raised.value) == message
    assert isinstance(raised.value, ValueError)


BAD_PROGRAMS = {
    "unknown capture": (
        "score = score + c1[kv_idx]", [randn(7)],
        "the score program 'score = score + c1[kv_idx]' reads capture c1, but 1 captures were given",
    ),
    "index count": (
        "score = score + c0[kv_idx]", [randn(9, 7)],
        "capture c0 has 2 dimensions, but the score program 'score = score + c0[kv_idx]' indexes 1",
    ),
    "unknown size": (
        "keep = kv_idx < s0", [], "the score program 'keep = kv_idx < s0' reads size s0, but 0 sizes were given",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "captures", "message"), BAD_PROGRAMS.values(), ids=BAD_PROGRAMS)
def test_bad_programs(program: str, captures: list[Tensor], message: str) -> None:
    with pytest.raises(flash_fx.ProgramError) as raised:
        flash_fx.attention(*GOOD, captures, program)
    assert str(raised.value) == message


UNPARSABLE = ["score = score +", "score = foo(score)", "score = x", "mask = 1", "score = score;;", "1"]


@pytest.mark.parametrize("program", UNPARSABLE)
def test_unparsable_programs_are_quoted(program: str) -> None:
    with pytest.raises(flash_fx.ProgramError) as raised:
        flash_fx.attention(*GOOD, program=program)
    assert repr(program)[1:-1] in str(raised.value)


# *** rewrite ***


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.25
        return torch.softmax(scores.masked_fill(~keep, float("-inf")), -1) @ v


def masked_arguments() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return (*(torch.randn(2, 3, 6, 16, generator=g) for _ in range(3)), torch.ones(6, 6, dtype=torch.bool).tril())


def check_rewritten(report: flash_fx.Report, call: Callable, graph: torch.fx.Graph) -> None:
    args = masked_arguments()
    program = "score = score * 0.25; keep = c0[q_idx, kv_idx]"
    assert [(s.status, s.program) for s in report.sites] == [("fused", program)]
    assert not any("softmax" in str(n.target) for n in graph.nodes)
    torch.testing.assert_close(call(*args), Attention()(*args))


def test_rewrite_an_exported_program() -> None:
    exported = torch.export.export(Attention(), masked_arguments())
    report = flash_fx.rewrite(exported)
    check_rewritten(report, exported.module(), exported.graph)


def test_rewrite_an_exported_program_with_dynamic_shapes() -> None:
    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(Attention(), masked_arguments(), dynamic_shapes=(batch, batch, batch, None))
    report = flash_fx.rewrite(exported)
    check_rewritten(report, exported.module(), exported.graph)
    q, k, v, keep = masked_arguments()
    more = [torch.cat([t, t.flip(0), t]) for t in (q, k, v)]
    torch.testing.assert_close(exported.module()(*more, keep), Attention()(*more, keep))


def test_rewrite_a_traced_module() -> None:
    traced = torch.fx.symbolic_trace(Attention())
    report = flash_fx.rewrite(traced, masked_arguments())
    check_rewritten(report, traced, traced.graph)


def test_rewrite_trains() -> None:
    traced = torch.fx.symbolic_trace(Attention())
    flash_fx.rewrite(traced, [t.requires_grad_(t.is_floating_point()) for t in masked_arguments()])
    grads = []
    for call in (traced, Attention()):
        args = [t.requires_grad_(t.is_floating_point()) for t in masked_arguments()]
        grads.append(torch.autograd.grad(call(*args).square().sum(), args[:3]))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Attention(),), "rewrite takes an fx.GraphModule or a torch.export.ExportedProgram, got Attention"),
        ((3,), "rewrite takes an fx.GraphModule or a torch.export.ExportedProgram, got int"),
        (
            (torch.fx.symbolic_trace(Attention()),),
            "this graph carries no shapes: pass example_inputs, one per placeholder",
        ),
    ],
    ids=["module", "number", "no shapes"],
)
def test_bad_rewrites(args: tuple, message: str) -> None:
    with pytest.raises(flash_fx.OperandError) as raised:
        flash_fx.rewrite(*args)
    assert str(raised.value) == message


def test_rewrite_with_too_few_example_inputs_says_so() -> None:
    with pytest.raises(flash_fx.OperandError, match="has 4 placeholders, got 2 example_inputs"):
        flash_fx.rewrite(torch.fx.symbolic_trace(Attention()), masked_arguments()[:2])


@pytest.mark.parametrize("rest", [(), (3,), (2, 5)])
def test_sum_by_index(rest: tuple[int, ...]) -> None:
    values, index = torch.randn(6, *rest), torch.tensor([4, 0, 4, 2, 0, 4])
    torch.library.opcheck(ops.sum_by_index.default, (values, index, 5))
    expected = torch.stack([values[index == i].sum(0) for i in range(5)])
    torch.testing.assert_close(ops.sum_by_index(values, index, 5), expected)
