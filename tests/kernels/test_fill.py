"""Finite fills in the real kernels: tiles that a fill covers are skipped exactly when that changes nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from test_interpret import SMALL, Shape, autograd, check, compare, keep, kernels, operands, pytestmark, randn

from flash_fx.kernels import launch, tiles
from flash_fx.kernels.tiles import Tile
from flash_fx.score.fill import fill_of
from flash_fx.score.text import parse

__all__ = ["pytestmark"]
MIN = torch.finfo(torch.float32).min
SQUARE = Shape(b=1, h=2, hk=1, m=40, n=40, d=8, dv=8)
CAUSAL, STRICT, EARLY = "kv_idx <= q_idx", "kv_idx < q_idx - 18", "kv_idx <= q_idx - 18"
FORMS = {
    "select": "where({c}, score * 0.3, {f!r})",
    "added": "score * 0.3 + where({c}, 0.0, {f!r})",
    "capped": "where({c}, tanh(score * 0.1) * 5.0, {f!r})",
}


@pytest.mark.parametrize("fill", [-1e4, -1e9, MIN])
@pytest.mark.parametrize("form", FORMS)
def test_causal(form: str, fill: float) -> None:
    check(f"score = {FORMS[form].format(c=CAUSAL, f=fill)}", shape=SQUARE)


@pytest.mark.parametrize("form", ["select", "added"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(form: str, dtype: torch.dtype) -> None:
    check(f"score = {FORMS[form].format(c=STRICT, f=-1e9)}", shape=SQUARE, dtype=dtype)


@pytest.mark.parametrize("m, n", [(20, 50), (50, 20), (17, 16), (33, 1)])
@pytest.mark.parametrize("form", ["select", "added"])
def test_lengths_that_differ(form: str, m: int, n: int) -> None:
    text = f"score = {FORMS[form].format(c='kv_idx <= q_idx + (kv_len - q_len)', f=-1e9)}"
    check(text, shape=Shape(b=1, h=1, hk=1, m=m, n=n, d=8, dv=8))


@pytest.mark.parametrize("condition", [
    STRICT, EARLY, "kv_idx >= q_idx + 20", "abs(q_idx - kv_idx) < 5", "(kv_idx <= q_idx) & (q_idx - kv_idx < 9)",
    "kv_idx // 16 == q_idx // 16", "(kv_idx < q_idx) | (kv_idx < 3)", "kv_idx < 20", "kv_idx >= 60", "kv_idx < 0",
])  # fmt: skip
@pytest.mark.parametrize("form", ["select", "added"])
def test_conditions_that_fill_whole_rows_or_tiles(form: str, condition: str) -> None:
    check(f"score = {FORMS[form].format(c=condition, f=-1e9)}", shape=SQUARE)


@pytest.mark.parametrize("slope", [0.0, 1.0, 40.0, 300.0])
@pytest.mark.parametrize("offset", [-9600.0, -9896.0, -9990.0, -10500.0])
def test_kept_scores_around_the_fill(slope: float, offset: float) -> None:
    check(f"score = where({CAUSAL}, score * {slope} + {offset}, -1e4)", shape=SQUARE)
    check(f"score = score * {slope} + {offset} + where({CAUSAL}, 0.0, -1e4)", shape=SQUARE)


def test_added_fills_that_outliers_reach() -> None:
    """Filled scores above kept ones: |q . k| is larger than the fill."""
    tensors, program = operands(SQUARE, torch.float32), parse(f"score = score + where({CAUSAL}, 0.0, -1e4)")
    tensors[0][0, 0, 3] *= 200.0
    tensors[1][0, 0, 30] *= 100.0
    with tiles.override(SMALL):
        ours = kernels(tensors, [], [], program)
    results = [autograd(tensors, [], [], program, t) for t in (torch.float32, torch.float64)]
    compare(ours, *results, torch.float32)


def test_with_everything_else() -> None:
    padding, shape = keep(0.6, 1, 40), SQUARE
    check(f"score = where({CAUSAL} & c0[b, kv_idx], score * 0.3, {MIN!r})", [padding], shape)
    check(f"score = where(c0[b, kv_idx], where({CAUSAL}, score * 0.3, -1e9), {MIN!r})", [padding], shape)
    check(f"score = where({STRICT}, score * 0.3, -1e9); keep = c0[b, kv_idx] & (kv_idx <= q_idx + 4)", [padding], shape)
    check(f"score = where({STRICT}, score * 0.3, -1e9); keep = kv_idx < q_idx - 20; empty = 0.0", shape=shape)
    check(f"score = where({STRICT}, score * 0.3, -1e4); sink = c0[h] * 100.0 - 9990.0", [randn(2)], shape)
    check(f"score = where({STRICT}, score, -1e9); weight = c0[h, kv_idx]", [randn(2, 40)], shape)


BIASES = {
    "h, q_idx, kv_idx": (2, 40, 40), "b // 2, q_idx, kv_idx": (1, 40, 40), "h, kv_idx": (2, 40), "q_idx": (40,), "h": (2,),
    "b * 2 + h, kv_idx": (2, 40),
}  # fmt: skip


@pytest.mark.parametrize("index", BIASES)
@pytest.mark.parametrize("condition", [CAUSAL, STRICT])
def test_gradients_of_captures(index: str, condition: str) -> None:
    bias = randn(*BIASES[index])
    check(f"score = score * 0.3 + c0[{index}] + where({condition}, 0.0, -1e5)", [bias], SQUARE)
    check(f"score = where({condition}, score * 0.3 + c0[{index}], -1e9)", [bias], SQUARE)


def test_added_masks_and_dropout() -> None:
    left = torch.where(torch.arange(40) < 21, MIN, 0.0)[None]  # left padding: rows with no key at all
    check(f"score = score * 0.3 + where({CAUSAL}, 0.0, {MIN!r}) + c0[b, kv_idx]", [left], SQUARE)
    program, seed = parse(f"score = where({STRICT}, score * 0.3, -1e9); drop = 0.5"), torch.tensor([3, 4])
    tensors, eye = operands(SQUARE, torch.float32), torch.eye(40)[None, None]
    with tiles.override(SMALL):
        uniform = parse("score = score * 0.0; drop = 0.5")
        alive = launch.forward(*tensors[:2], eye, [], [], seed, uniform)[0] != 0
        ours = kernels(tensors, [], [], program, seed)
    results = [autograd(tensors, [], [], program, t, drop_mask=alive) for t in (torch.float32, torch.float64)]
    compare(ours, *results, torch.float32)


@pytest.mark.parametrize("form", ["select", "added"])
def test_clear_tiles_are_not_touched(form: str) -> None:
    """What stands there is not read: NaN in values, and in the gradients of rows, stays where it is."""
    program = parse(f"score = {FORMS[form].format(c=CAUSAL, f=MIN)}")
    q, k, v, g = operands(Shape(b=1, m=64, n=64, d=8, dv=8), torch.float32)
    poisoned, rows = v.clone(), g.clone()
    poisoned[:, :, 48:], rows[:, :, :16] = torch.nan, torch.nan
    for tile in (SMALL, Tile(32, 16, 4, 1)):
        with tiles.override(tile):
            out, lse = launch.forward(q, k, v, [], [], None, program)
            assert torch.equal(launch.forward(q, k, poisoned, [], [], None, program)[0][:, :, :32], out[:, :, :32])
            dk, dv = launch.backward(rows, q, k, v, [], [], None, out, lse, program, [False, True, True])
            assert dk[:, :, 32:].isfinite().all() and dv[:, :, 32:].isfinite().all()
            (dq,) = launch.backward(g, q, k, poisoned, [], [], None, out, lse, program, [True, False, False])
            assert dq[:, :, :32].isfinite().all()


def test_one_row_that_is_not_clear_is_enough() -> None:
    program = parse(f"score = where({EARLY}, score * 0.3, -1e9)")
    q, k, v, _ = operands(SQUARE, torch.float32)
    assert fill_of(program) is not None
    with tiles.override(SMALL):
        out, _ = launch.forward(q, k, v, [], [], None, program)
    torch.testing.assert_close(out[:, :, :18], v.mean(2, keepdim=True).expand(1, 2, 18, 8))
