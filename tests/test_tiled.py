"""The plain PyTorch path against float64, with eager's error in the same dtype as the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from numerics import assert_within_budget
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_fx import cpu_sdpa, tiled
from flash_fx.score.evaluate import evaluate, reference
from flash_fx.score.expr import Program
from flash_fx.score.text import parse

BASE = {"B": 2, "H": 4, "Hk": 2, "M": 37, "N": 53, "D": 8, "Dv": 6}


@dataclass(frozen=True)
class Case:
    """A program, the shapes of its captures by the letters of BASE or numbers, and what differs from BASE."""

    name: str
    text: str
    captures: Sequence[str] = ()  # "H N" is float, "H:int5" ints below 5, "B N:bool" bools
    sizes: Sequence[int] = ()
    shape: tuple[tuple[str, int], ...] = ()


SELF = (("N", 37),)
CASES = [
    Case("identity", ""),
    Case("scale", "score = score * 0.35"),
    Case("causal", "score = score * 0.35; keep = kv_idx <= q_idx", shape=SELF),
    Case("causal_from_end", "score = score * 0.35; keep = kv_idx <= q_idx + kv_len - q_len"),
    Case("window", "score = score * 0.35; keep = (kv_idx <= q_idx) & (q_idx - kv_idx < 9)", shape=SELF),
    Case("prefix", "keep = (kv_idx < s0) | (kv_idx <= q_idx)", sizes=[7]),
    Case("chunk", "keep = kv_idx // 16 == q_idx // 16", shape=SELF),
    Case("padding", "score = score * 0.35; keep = c0[b, kv_idx] | (kv_idx == 0)", ["B N:bool"]),
    Case("alibi", "score = score * 0.35 + c0[h] * (kv_idx - q_idx); keep = kv_idx <= q_idx", ["H"]),
    Case("softcap", "score = tanh(score * 0.35 / 5.0) * 5.0; keep = kv_idx <= q_idx"),
    Case("bias", "score = score * 0.35 + c0[b, h, q_idx, kv_idx]", ["B H M N"]),
    Case("bias_rows", "score = score * 0.35 + c0[0, h, q_idx, 0] * cos(kv_idx) + c1[kv_idx]", ["1 H M 1", "N"]),
    Case("bias_scalar", "score = score * c0 + c1[0] * c2[b, 0, kv_idx]", ["", "1", "B 1 N"]),
    Case("bias_turned", "score = score * 0.35 + c0[kv_idx, h, q_idx]", ["N H M"]),
    Case("table", "score = score * 0.35 + c0[h, c1[q_idx, kv_idx]]", ["H 5", "M N:int5"]),
    Case("table_of_distance", "score = score + c0[minimum(abs(kv_idx - q_idx), 4), h]", ["5 H"]),
    Case("diagonals", "score = score * 0.35 + c0[h, kv_idx - q_idx + q_len - 1]", ["H 89"]),
    Case("diagonals_shifted", "score = score + c0[kv_idx + s0 - q_idx, b, h]; keep = kv_idx <= q_idx", ["99 B H"], [40]),
    Case("diagonals_and_rows", "score = score * 0.35 + c0[q_idx, kv_idx - q_idx + 36]", ["M 89"]),
    Case("bias_of_groups", "score = score * 0.35 + c0[b // 2, h // 2, q_idx, kv_idx]", ["1 2 M N"]),
    Case("bias_of_folded_heads", "score = score * 0.35 + c0[b * 4 + h, 0, kv_idx + s0]", ["8 1 55"], [2]),
    Case("bias_twice", "score = score * c0[h] + c0[h] * c0[b]", ["H"]),
    Case("sink", "score = score * 0.35; keep = kv_idx < q_idx; sink = c0[h]", ["H"]),
    Case("softmax1", "score = score * 0.35; sink = 0.0"),
    Case("sink_beside_no_key", "score = score * 0.35; keep = kv_idx < q_idx; sink = c0[h]; empty = nan", ["H"]),
    Case("weight", "weight = c0[h] * c1[b, kv_idx]", ["H", "B N"]),
    Case("score_and_weight", "score = score + c0[b, kv_idx]; weight = sigmoid(c0[b, kv_idx])", ["B N"]),
    Case("many_groups", "score = score * 0.35; keep = kv_idx <= q_idx", shape=(("Hk", 1),)),
    Case("equal_heads", "score = score * 0.35", shape=(("Hk", 4),)),
    Case("one_row", "score = score * 0.35; keep = kv_idx <= q_idx + kv_len - q_len", shape=(("M", 1),)),
    Case("one_key", "score = score * 0.35", shape=(("N", 1),)),
    Case("finite_fill", "score = where(kv_idx <= q_idx, score * 0.35, -10000.0)"),
    Case("finite_fill_rows", "score = where(kv_idx < q_idx, score * 0.35, -1e9)"),
    Case("finite_fill_added", "score = score * 0.35 + where(kv_idx <= q_idx - 5, 0.0, -1e4)"),
    Case("finite_fill_window", "score = where(abs(kv_idx - q_idx) < 5, score * 0.35, -1e9)", shape=SELF),
    Case("finite_fill_above", "score = where(kv_idx <= q_idx, score * 50.0 - 9900.0, -1e4)", shape=SELF),
    Case("finite_fill_added_above", "score = score * 50.0 - 9900.0 + where(kv_idx <= q_idx, 0.0, -1e4)", shape=SELF),
    Case("finite_fill_of_tiles", "score = where(kv_idx < q_idx - 20, score, -1e9) + c0[h, kv_idx]", ["H N"], shape=SELF),
    Case("finite_fill_and_keep", "score = where(kv_idx < q_idx, score, -1e9); keep = c0[b, kv_idx]", ["B N:bool"]),
    Case("finite_fill_and_sink", "score = where(kv_idx < q_idx, score, -1e4); sink = c0[h]", ["H"]),
    Case("empty_rows", "score = score * 0.35; keep = kv_idx < q_idx - 20; empty = 0.0"),
    Case("nan_rows", "score = score * 0.35; keep = (kv_idx < q_idx) & (b < 1)"),
]  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of rows and of the batch, at sizes a test can afford."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 16 * 4 * 53)


def _capture(spec: str, sizes: dict[str, int], g: torch.Generator) -> Tensor:
    dims, _, kind = spec.partition(":")
    shape = [sizes[d] if d in sizes else int(d) for d in dims.split()]
    if kind == "bool":
        return torch.rand(shape, generator=g) > 0.4
    if kind:
        return torch.randint(0, int(kind.removeprefix("int")), shape, generator=g)
    return torch.randn(shape, generator=g)


def _inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value, captures; an outlier in query; layouts as models have them."""
    s = {**BASE, **dict(case.shape)}
    g = torch.Generator().manual_seed(len(case.text))
    query = torch.randn(s["B"], s["M"], s["H"], s["D"], generator=g).transpose(1, 2)
    key = torch.randn(s["B"], s["Hk"], s["D"], s["N"], generator=g).transpose(2, 3)
    value = torch.randn(s["B"], s["N"], s["Hk"], s["Dv"], generator=g).transpose(1, 2)
    query[0, 0, 0] *= 4.0
    captures = [_capture(c, s, g) for c in case.captures]
    return [t.to(dtype) if t.is_floating_point() else t for t in (query, key, value, *captures)]


def _eager(inputs: list[Tensor], case: Case, program: Program, grad: Tensor) -> dict[str, Tensor]:
    """Everything in the dtype of the inputs, as unfused model code computes it, except for the score expression."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    dtype = inputs[0].dtype
    out, lse = reference(*inputs[:3], inputs[3:], case.sizes, program, compute_dtype=dtype)
    return _named(out, lse, torch.autograd.grad(out, _floats(inputs), grad.to(dtype), materialize_grads=True))


def _ours(inputs: list[Tensor], case: Case, program: Program, grad: Tensor, bmhd: bool = False) -> dict[str, Tensor]:
    needs = [t.is_floating_point() for t in inputs]
    q, k, v, *captures = inputs
    out, lse = tiled.forward(q, k, v, captures, case.sizes, None, program, bmhd)
    grad = grad.to(q.dtype)
    grads = tiled.backward(grad, q, k, v, captures, case.sizes, None, out, lse, program, needs)
    return _named(out, lse, grads)


def _floats(inputs: list[Tensor]) -> list[Tensor]:
    return [t for t in inputs if t.is_floating_point()]


def _named(out: Tensor, lse: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    names = ["query", "key", "value", *(f"capture {i}" for i in range(len(grads) - 3))]
    named = {f"grad of {n}": g for n, g in zip(names, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach().float(), **named}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_output_and_gradients(case: Case, dtype: str) -> None:
    program, inputs = parse(case.text), _inputs(case, DTYPES[dtype])
    batch, heads, rows, _ = inputs[0].shape
    g = torch.Generator().manual_seed(1)
    grad = torch.randn(batch, heads, rows, inputs[2].shape[-1], generator=g).to(DTYPES[dtype])
    golden = _eager([t.double() if t.is_floating_point() else t for t in inputs], case, program, grad)
    ours = _ours(inputs, case, program, grad)
    if dtype == "fp64":
        for name, value in golden.items():
            close = 1e-5 if name == "lse" else 1e-11  # lse is float32
            torch.testing.assert_close(
                ours[name], value, rtol=close, atol=close, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
    else:
        golden = {n: t.double() for n, t in golden.items()}
        assert_within_budget(ours, _eager(inputs, case, program, grad), golden)
    assert ours["out"].is_contiguous() and ours["lse"].is_contiguous() and ours["lse"].dtype == torch.float32


def _case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


@pytest.mark.parametrize("name", ["alibi", "equal_heads"])
def test_memory_order_follows_the_consumer(name: str) -> None:
    case = _case(name)
    inputs, grad = _inputs(case, torch.float32), torch.ones(()).expand(2, 4, 37, 6)
    ours, turned = (_ours(inputs, case, parse(case.text), grad, bmhd) for bmhd in (False, True))
    assert turned["out"].transpose(1, 2).is_contiguous()
    for name_, value in ours.items():
        assert torch.equal(value, turned[name_]), name_


def test_only_the_needed_gradients_and_none_at_all() -> None:
    case = _case("alibi")
    program, (q, k, v, slopes) = parse(case.text), _inputs(case, torch.float32)
    out, lse = tiled.forward(q, k, v, [slopes], [], None, program, False)
    args = (torch.ones_like(out), q, k, v, [slopes], [], None, out, lse, program)
    every = tiled.backward(*args, [True] * 4)
    for i, name in enumerate(("query", "key", "value", "slopes")):
        (one,) = tiled.backward(*args, [j == i for j in range(4)])
        assert torch.equal(one, every[i]), name
    assert tiled.backward(*args, [False] * 4) == []


def test_rows_without_keys_are_nan_and_poison_only_values() -> None:
    case = _case("nan_rows")
    inputs = _inputs(case, torch.float32)
    ours = _ours(inputs, case, parse(case.text), torch.ones(2, 4, 37, 6))
    out = ours["out"]
    assert out[:, :, 0].isnan().all() and out[0, :, 1:].isfinite().all() and out[1].isnan().all()
    assert torch.equal(ours["lse"].isnan(), ours["out"][..., 0].isnan())
    assert ours["grad of value"].isnan().all()
    assert ours["grad of query"].isfinite().all() and ours["grad of key"].isfinite().all()


@pytest.mark.parametrize(("text", "wanted"), [("score = score", torch.nan), ("empty = 0.0", 0.0)])
def test_no_keys_at_all(text: str, wanted: float) -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    out, lse = tiled.forward(q, k, k, [], [], None, parse(text), False)
    grads = tiled.backward(torch.ones_like(out), q, k, k, [], [], None, out, lse, parse(text), [True] * 3)
    assert torch.equal(out.nan_to_num(nan=7.0), torch.full_like(out, wanted).nan_to_num(nan=7.0))
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape] and (grads[0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 2, 0)])
def test_no_queries(shape: tuple[int, int, int]) -> None:
    q, k = torch.randn(*shape, 4), torch.randn(shape[0], 2, 5, 4)
    out, lse = tiled.forward(q, k, k, [], [], None, parse("score = score * 2.0"), True)
    grads = tiled.backward(out, q, k, k, [], [], None, out, lse, parse("score = score * 2.0"), [True] * 3)
    assert out.shape == q.shape and lse.shape == shape and (grads[1] == 0).all() and (grads[2] == 0).all()


def test_capture_with_stride_zero() -> None:
    case = _case("bias")
    inputs = _inputs(case, torch.float64)
    inputs[3] = inputs[3][:1, :1].expand(2, 4, 37, 53)
    grad = torch.randn(2, 4, 37, 6, dtype=torch.float64)
    ours, golden = (f(inputs, case, parse(case.text), grad) for f in (_ours, _eager))
    for name, value in golden.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-6 if name == "lse" else 1e-11)


# *** dropout ***


def _drop(rate: float, seed: int, value: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    program = parse(f"score = score * 0.35; keep = kv_idx <= q_idx + 20; drop = {rate}")
    q, k, *_ = _inputs(_case("scale"), torch.float64)
    words = torch.tensor([seed, 0])
    out, lse = tiled.forward(q, k, value, [], [], words, program, False)
    grad = torch.ones_like(out) if grad is None else grad
    return out, lse, tiled.backward(grad, q, k, value, [], [], words, out, lse, program, [True] * 3)


def test_dropout_backward_uses_the_mask_of_the_forward() -> None:
    """With the identity as value the output is the weights, which shows the mask."""
    value = torch.eye(53, dtype=torch.float64).expand(2, 2, 53, 53)
    grad = torch.randn(2, 4, 37, 53, dtype=torch.float64)
    w, _, grads = _drop(0.4, 3, value, grad)
    q, k, *_ = (t.requires_grad_() for t in _inputs(_case("scale"), torch.float64))
    leaf = value.clone().requires_grad_()
    program = parse("score = score * 0.35; keep = kv_idx <= q_idx + 20; drop = 0.4")
    out, _ = reference(q, k, leaf, [], [], program, drop_mask=w != 0)
    torch.testing.assert_close(w, out.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(grads, torch.autograd.grad(out, (q, k, leaf), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_dropout_follows_the_seed_and_the_rate() -> None:
    value = torch.eye(53, dtype=torch.float64).expand(2, 2, 53, 53)
    first, again, other = (_drop(0.3, s, value)[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    kept = torch.ones(37, 53).tril(20).bool().expand(2, 4, 37, 53)
    rate = (first[kept] == 0).double().mean().item()
    assert abs(rate - 0.3) < 4 * (0.21 / kept.sum().item()) ** 0.5
    same = ((first == 0) == (other == 0))[kept].double().mean().item()
    assert abs(same - 0.58) < 0.03  # independent masks agree with probability 0.3^2 + 0.7^2
    assert not _drop(0.0, 1, value)[0][kept].eq(0).any()


# *** memory and work ***


class _Largest(TorchDispatchMode):
    """The greatest number of elements of any tensor an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
                self.products += t.numel() if "bmm" in str(func) else 0
        return result


@pytest.mark.parametrize("text", [
    "score = score * 0.35; keep = kv_idx <= q_idx", "score = tanh(score) + c0[h, kv_idx]; sink = 0.0; drop = 0.1",
    "score = score + c0[h, (q_idx + kv_idx) % 300]; weight = c0[h, kv_idx]",
])  # fmt: skip
def test_no_tensor_of_all_scores(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 32 * 2 * 300)
    q, k, slopes = torch.randn(2, 2, 300, 8), torch.randn(2, 1, 300, 8), torch.randn(2, 300)
    captures = [slopes] if "c0" in text else []
    with _Largest() as seen:
        program, seed = parse(text), torch.tensor([1, 2])
        out, lse = tiled.forward(q, k, k, captures, [], seed, program, False)
        tiled.backward(out, q, k, k, captures, [], seed, out, lse, program, [True] * (3 + len(captures)))
    assert 0 < seen.numel <= 300 * 300 / 4


def test_causal_skips_almost_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1 << 22)
    q, k = torch.randn(1, 2, 1024, 8), torch.randn(1, 1, 1024, 8)
    work = {}
    masks = (
        "", "keep = kv_idx <= q_idx", "keep = (kv_idx <= q_idx) & (q_idx - kv_idx < 64)",
        "score = where(kv_idx <= q_idx, score, -1e9)", "score = score + where(kv_idx <= q_idx, 0.0, -1e9)",
    )  # fmt: skip
    for text in masks:
        with _Largest() as seen:
            tiled.forward(q, k, k, [], [], None, parse(text), False)
        work[text] = seen.products
    everything, causal, window, replaced, added = work.values()
    assert causal < 0.57 * everything and window < 0.25 * everything and replaced == added == causal


# *** PyTorch's own kernel ***


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("keep", ["", "; keep = kv_idx <= q_idx", "; keep = kv_idx <= q_idx + kv_len - q_len"])
def test_cpu_kernel_agrees_with_tiles(keep: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("sdpa", f"score = score * 0.35{keep}", shape=(("Hk", 4), ("N", 37), ("Dv", 8)))
    program, inputs = parse(case.text), _inputs(case, DTYPES[dtype])
    grad = torch.randn(2, 4, 37, 8, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    assert cpu_sdpa.plain_attention(*inputs[:3], program) is not None
    kernel = _ours(inputs, case, program, grad, bmhd=True)
    golden = _eager([t.double() for t in inputs], case, program, grad)
    assert_within_budget(kernel, _eager(inputs, case, program, grad), {n: t.double() for n, t in golden.items()})
    monkeypatch.setattr(cpu_sdpa, "plain_attention", lambda *_: None)
    tiles = _ours(inputs, case, program, grad)
    close = 1e-5 if dtype == "fp32" else 1e-3  # the kernel's exp is cruder for halves
    torch.testing.assert_close(kernel["lse"], tiles["lse"], rtol=close, atol=close)
    assert kernel["out"].transpose(1, 2).is_contiguous() and kernel["lse"].is_contiguous()


@pytest.mark.parametrize(("text", "scale"), [
    ("", 1.0), ("score = score * 2", 2.0), ("score = 0.5 * score", 0.5), ("score = score / 4.0", 0.25),
    ("score = score * -1.0", None), ("score = 1.0 / score", None), ("score = score * score", None),
    ("score = score * c0", None), ("sink = 0.0", None), ("drop = 0.1", None), ("weight = 2.0", None),
    ("keep = kv_idx < q_idx", None),
])  # fmt: skip
def test_what_the_cpu_kernel_takes(text: str, scale: float | None) -> None:
    q = torch.randn(1, 2, 5, 4)
    assert cpu_sdpa.plain_attention(q, q, q, parse(text)) == (None if scale is None else (False, scale))
    assert cpu_sdpa.plain_attention(q.double(), q.double(), q.double(), parse(text)) is None
    assert cpu_sdpa.plain_attention(q, q[:, :1], q[:, :1], parse(text)) is None


def test_evaluate_is_not_asked_for_unused_names() -> None:
    assert evaluate(parse("score = float(q_idx)").score, {"q_idx": range(2, 4)}).flatten().tolist() == [2.0, 3.0]
