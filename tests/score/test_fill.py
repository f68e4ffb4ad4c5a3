"""What is recognised as a finite fill, and that the bound of filled scores is one."""

from __future__ import annotations

import pytest
import torch

from flash_fx.score.evaluate import evaluate, fill_top
from flash_fx.score.expr import op
from flash_fx.score.fill import fill_of
from flash_fx.score.region import kv_region
from flash_fx.score.text import parse

CAUSAL = "kv_idx <= q_idx"


@pytest.mark.parametrize(("text", "inside", "top"), [
    (f"where({CAUSAL}, score * 0.5, -1e9)", "score * 0.5", "-1000000000.0"),
    ("where(kv_idx > q_idx, -1e9, score * 0.5)", "score * 0.5", "-1000000000.0"),
    (f"where(~({CAUSAL}), -1e9, score)", "score", "-1000000000.0"),
    (f"score * 0.5 + where({CAUSAL}, 0.0, -1e9)", "score * 0.5", "c0 * 0.5 + -1000000000.0"),
    (f"where({CAUSAL}, 0.0, -1e9) + score", "score", "-1000000000.0 + c0"),
    (f"where({CAUSAL}, score, -1e9) * 0.5", "score * 0.5", "-500000000.0"),
    (f"score + c0[b, kv_idx] + where({CAUSAL}, 0.0, -1e9)", "score + c0[b, kv_idx]", "c0 + c2 + -1000000000.0"),
    (f"where({CAUSAL}, score, -1e9) - c0[h]", "score - c0[h]", "-1000000000.0 - c1"),
    (f"where(c0[b, kv_idx], where({CAUSAL}, score, -1e5), -1e9)", "where(c0[b, kv_idx], score, -1000000000.0)", "-100000.0"),
    (f"where({CAUSAL}, score, -9984.0)", "score", "-9984.0"),
    (f"where({CAUSAL}, tanh(score) * c0[h], -1e4)", "tanh(score) * c0[h]", "-10000.0"),
])  # fmt: skip
def test_finite_fill(text: str, inside: str, top: str) -> None:
    found = fill_of(parse(f"score = {text}"))
    assert found is not None
    assert kv_region(parse(f"keep = {found.condition}")) == kv_region(parse(f"keep = {CAUSAL}"))
    assert (str(found.inside), str(found.top)) == (inside, top)


@pytest.mark.parametrize("text", [
    "score", f"where({CAUSAL}, score, -inf)", f"where({CAUSAL}, score, -10.0)", "where(c0[kv_idx], score, -1e9)",
    f"where({CAUSAL}, 1.0, -1e9)", f"pow(score, 3.0) + where({CAUSAL}, 1.0, -1e9)",
    f"score * float(b) + where({CAUSAL}, 0.0, -1e9)",
    f"exp(where({CAUSAL}, score, -1e9))",
])  # fmt: skip
def test_no_finite_fill(text: str) -> None:
    assert fill_of(parse(f"score = {text}")) is None


@pytest.mark.parametrize("text", [
    f"where({CAUSAL}, 0.0, -1e9) + score * -0.3", f"(score / 4.0 + where({CAUSAL}, 2.0, -1e4)) * 0.5 - c0[b, kv_idx]",
    f"tanh(score) * c0[b, kv_idx] + c1[h] * (kv_idx - q_idx) + where({CAUSAL}, 0.0, -1e6)",
    f"where({CAUSAL}, 0.0, -1e4) + minimum(abs(score), c0[b, kv_idx] * s0) + where(c0[b, kv_idx] > 0.0, score, float(q_idx))",
])  # fmt: skip
def test_top_is_above_every_filled_score(text: str) -> None:
    program, g = parse(f"score = {text}"), torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, 5, 8, generator=g) * 3 for _ in range(2))
    captures = [torch.randn(2, 5, generator=g) * 9, torch.randn(3, generator=g)]
    env = {
        "score": q @ k.mT,
        "b": range(2),
        "h": range(3),
        "q_idx": range(5),
        "kv_idx": range(5),
        "q_len": 5,
        "kv_len": 5,
    }
    fill = fill_of(program)
    assert fill is not None
    filled = evaluate(op("not", fill.condition), env, captures, [3]).expand(2, 3, 5, 5)
    scores = evaluate(program.score, env, captures, [3]).expand(2, 3, 5, 5)
    top = fill_top(fill.top, q, k, captures, [3])
    assert (scores[filled] <= top).all() and top < -1000


def test_top_of_broadcast_and_unusual_captures() -> None:
    q = torch.zeros(1, 1, 4, 8)
    for values, top in (([3.0, -7.0], 3.0), ([2, 5], 5.0), ([torch.nan, 1.0], torch.nan)):
        fill = fill_of(parse(f"score = score + c0[0, kv_idx] + where({CAUSAL}, 0.0, -65504.0)"))
        assert fill is not None
        found = fill_top(fill.top, q, q, [torch.tensor(values).expand(3, 2)], [])
        torch.testing.assert_close(found, torch.tensor(top - 65504.0), equal_nan=True)
