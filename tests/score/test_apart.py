"""What is taken apart, what is not for want of a bound, and that no value changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from strategies import SHAPE, environment, ints

from flash_fx.score.apart import apart
from flash_fx.score.evaluate import evaluate
from flash_fx.score.expr import KV, Expr, Program, Q, op
from flash_fx.score.text import parse

LENGTHS = {"q_len": 4096, "kv_len": 5000, "s0": -7}
APART = [
    ("float(kv_idx - q_idx)", "float(kv_idx) - float(q_idx)"),
    ("float(-abs(kv_idx - q_idx))", "0.0 - abs(float(kv_idx) - float(q_idx))"),
    ("float(kv_idx - q_idx + (q_len - kv_len))", "float(kv_idx) - float(q_idx) + float(q_len - kv_len)"),
    ("float(minimum(q_idx - kv_idx, s0))", "minimum(float(q_idx) - float(kv_idx), float(s0))"),
    ("float((kv_idx - q_idx) * 3)", "(float(kv_idx) - float(q_idx)) * 3.0 + 0.0"),
    ("float(q_idx // 2 - kv_idx)", "float(q_idx // 2 - kv_idx)"),
    ("float(kv_idx * q_idx)", "float(kv_idx * q_idx)"),
    ("float((kv_idx - q_idx) * 2000)", "float((kv_idx - q_idx) * 2000)"),
    ("float(kv_idx - q_idx + s1)", "float(kv_idx - q_idx + s1)"),
    ("float((kv_idx - q_idx) // 2)", "float((kv_idx - q_idx) // 2)"),
    ("float(c0[h, q_idx, kv_idx])", "float(c0[h, q_idx, kv_idx])"),
    ("float(c0[b] + kv_idx - q_idx)", "float(c0[b] + kv_idx - q_idx)"),
    ("float(kv_idx)", "float(kv_idx)"),
]


@pytest.mark.parametrize(("before", "after"), APART)
def test_rule(before: str, after: str) -> None:
    found = apart(parse(f"score = score + {before}"), LENGTHS)
    assert str(found) == str(parse(f"score = score + ({after})"))


def test_a_condition_keeps_its_integers() -> None:
    program = parse("score = score; keep = float(kv_idx - q_idx) < 3.0")
    assert apart(program, LENGTHS) == program


def test_lengths_that_nobody_knows() -> None:
    program = parse("score = score + float(kv_idx - q_idx)")
    assert apart(program, {"q_len": 4096}) == program
    assert apart(program, {"q_len": 4096, "kv_len": 1 << 24}) == program


@settings(max_examples=200, deadline=None)
@given(ints)
def test_no_value_changes(e: Expr) -> None:
    program = Program(score=op("float", Q - KV + e))
    lengths = {"q_len": SHAPE[2], "kv_len": SHAPE[3], "s0": 2}
    before, after = (
        evaluate(p.score, environment(), (), [2], torch.float32) for p in (program, apart(program, lengths))
    )
    before, after = torch.broadcast_tensors(before, after)
    assert torch.equal(before, after) and torch.equal(before.signbit(), after.signbit())
