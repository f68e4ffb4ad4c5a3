"""The evaluator against plain torch, and the reference against softmax."""

from __future__ import annotations

import math

import pytest
import torch
from strategies import SHAPE, captures, environment

from flash_fx.score.evaluate import diagonals_read, evaluate, index_tensor, reference
from flash_fx.score.expr import Expr
from flash_fx.score.text import parse


def _expr(text: str) -> Expr:
    return parse(f"score = {text}").score


def _run(text: str, dtype: torch.dtype = torch.float64, **env: object) -> torch.Tensor:
    return evaluate(_expr(text), {**environment(), **env}, captures(), [2], dtype)


def test_index_arithmetic_is_floor_and_broadcasts() -> None:
    value = _run("(kv_idx - q_idx) // 2 + (kv_idx - q_idx) % 3")
    d = torch.arange(SHAPE[3]) - torch.arange(SHAPE[2])[:, None]
    assert value.shape == (1, 1, *SHAPE[2:])
    assert torch.equal(value[0, 0], d.div(2, rounding_mode="floor") + d.remainder(3))


@pytest.mark.parametrize(("text", "shape"), [
    ("c0[h]", (1, 2, 1, 1)),
    ("c1[b, kv_idx]", (2, 1, 1, 4)),
    ("c1[0, kv_idx]", (1, 1, 1, 4)),
    ("c3[b, q_idx, kv_idx]", (2, 1, 3, 4)),
    ("c0[c2[kv_idx]]", (1, 1, 1, 4)),
    ("c4", ()),
])  # fmt: skip
def test_loads_stay_as_small_as_they_are(text: str, shape: tuple[int, ...]) -> None:
    assert _run(text).shape == shape


def test_a_range_slices_a_capture_and_a_tensor_gathers_it() -> None:
    table = torch.randn(5, 9)
    index = torch.arange(3, 7).view(1, 1, 1, 4)
    sliced = evaluate(_expr("c0[2, kv_idx]"), {"kv_idx": range(3, 7)}, [table])
    assert sliced.data_ptr() == table[2, 3:].data_ptr()
    assert torch.equal(sliced, evaluate(_expr("c0[2, kv_idx]"), {"kv_idx": index}, [table]))
    flipped = evaluate(_expr("c0[2, kv_idx]"), {"kv_idx": index.flip(-1)}, [table])
    assert torch.equal(flipped.flatten(), table[2, 3:7].flip(0))


def test_the_order_of_a_captures_dimensions_is_free_and_a_name_may_repeat() -> None:
    table = torch.randn(4, 3)
    env = environment()
    assert torch.equal(evaluate(_expr("c0[kv_idx, q_idx]"), env, [table])[0, 0], table.t())
    square = torch.randn(4, 4)
    assert torch.equal(evaluate(_expr("c0[kv_idx, kv_idx]"), env, [square]).flatten(), square.diagonal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_of_the_compute_dtype(dtype: torch.dtype) -> None:
    mixed = (
        "kv_idx * 0.1",
        "kv_idx / 3",
        "float(kv_idx)",
        "c0[h] + kv_idx",
        "exp(kv_idx)",
        "where(b < 1, 0.1, kv_idx)",
    )
    for text in mixed:
        assert _run(text, dtype).dtype == dtype, text
    assert torch.equal(_run("kv_idx * 0.1", dtype).flatten(), torch.arange(SHAPE[3], dtype=dtype) * 0.1)


def test_halves_widen_and_ints_and_bools_stay() -> None:
    half = torch.randn(2).to(torch.bfloat16)
    assert torch.equal(evaluate(_expr("c0[h] * 3.0"), environment(), [half]).flatten(), half.float() * 3.0)
    assert _run("c2[kv_idx] + 1").dtype == torch.int64
    assert _run("c3[b, q_idx, kv_idx]").dtype == torch.bool


def test_bools_count_and_combine() -> None:
    assert _run("(kv_idx < 2) + (kv_idx < 3)").flatten().tolist() == [2, 2, 1, 0]
    assert _run("~(kv_idx < 2) ^ True").flatten().tolist() == [True, True, False, False]
    assert _run("where(1, kv_idx, 0)").flatten().tolist() == [0, 1, 2, 3]
    assert _run("round(kv_idx + 0.5)").flatten().tolist() == [0.0, 2.0, 2.0, 4.0]  # half to even
    assert _run("int(-1.5 + 0.0 * kv_idx)").flatten().tolist() == [-1] * 4


def test_lengths_and_sizes() -> None:
    assert _run("q_len * 100 + kv_len * 10 + s0").item() == 342


def test_autograd_reaches_captures() -> None:
    caps = [c.requires_grad_() if c.is_floating_point() else c for c in captures()]
    value = evaluate(_expr("score * c0[c2[kv_idx]] + c1[b, kv_idx]"), environment(), caps, [], torch.float64)
    value.sum().backward()
    assert caps[0].grad is not None and caps[0].grad.abs().min() > 0
    assert torch.equal(caps[1].grad, torch.full_like(caps[1], SHAPE[1] * SHAPE[2]))


def _operands(groups: int = 2, keys: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 2 * groups, 5, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def test_reference_is_softmax_attention_with_shared_heads() -> None:
    q, k, v = _operands()
    out, lse = reference(q, k, v, program=parse("score = score * 0.3; keep = kv_idx <= q_idx + kv_len - q_len"))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    s = (q @ k.mT * 0.3).masked_fill(~torch.ones(5, 7).tril(2).bool(), -math.inf)
    torch.testing.assert_close(out, s.softmax(-1) @ v)
    torch.testing.assert_close(lse, s.logsumexp(-1))


def test_reference_sink_weight_and_dropout() -> None:
    q, k, v = _operands(1)
    sink, gate = torch.randn(2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    kept = torch.rand(2, 2, 5, 7) > 0.3
    program = parse("sink = c0[h]; weight = c1[h]; drop = 0.25")
    out, lse = reference(q, k, v, [sink, gate], program=program, drop_mask=kept)
    s = torch.cat((q @ k.mT, sink.view(1, 2, 1, 1).expand(2, 2, 5, 1)), -1)
    p = s.softmax(-1)[..., :-1] * kept / 0.75 * gate.view(1, 2, 1, 1)
    torch.testing.assert_close(out, p @ v)
    torch.testing.assert_close(lse, s.logsumexp(-1))
    with pytest.raises(ValueError, match="drop_mask"):
        reference(q, k, v, [sink, gate], program=program)


@pytest.mark.parametrize("keys", [7, 0])
def test_reference_rows_without_keys(keys: int) -> None:
    q, k, v = (t.requires_grad_() for t in _operands(keys=keys))
    out, lse = reference(q, k, v, program=parse("keep = kv_idx < q_idx"))
    assert out[:, :, 0].isnan().all() and lse[:, :, 0].isnan().all()
    out, lse = reference(q, k, v, program=parse("keep = kv_idx < q_idx; empty = 0.0"))
    assert (out[:, :, 0] == 0).all() and (lse[:, :, 0] == -math.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, 0] == 0).all()
    out, lse = reference(q, k, v, program=parse("keep = kv_idx < q_idx; sink = 0.5"))
    assert (out[:, :, 0] == 0).all() and (lse[:, :, 0] == 0.5).all()
    saved, _ = reference(q, k, v, program=parse("keep = kv_idx < q_idx; sink = 0.5; empty = nan"))
    assert saved[:, :, 0].isnan().all() and torch.equal(saved[:, :, 1:], out[:, :, 1:]) == (keys > 0)


def test_a_load_along_diagonals_is_no_gather() -> None:
    table = torch.randn(2, 12)
    tile = {"q_idx": range(2, 5), "kv_idx": range(1, 6), "h": range(2)}
    whole = {n: index_tensor(n, r, torch.device("cpu")) for n, r in tile.items()}
    for text in ("c0[h, kv_idx - q_idx + 6]", "c0[h, kv_idx - q_idx + 4 + s0]"):
        node = _expr(text)
        assert diagonals_read(node, tile, [2], table) == (1, range(3, 10))
        assert torch.equal(evaluate(node, tile, [table], [2]), evaluate(node, whole, [table], [2]))
    for text in (
        "c0[h, q_idx - kv_idx + 6]",
        "c0[h, kv_idx - q_idx + 9]",
        "c0[h, kv_idx - q_idx]",
        "c0[q_idx, kv_idx - q_idx + 6]",
    ):
        assert diagonals_read(_expr(text), tile, [], table) is None
