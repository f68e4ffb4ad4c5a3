"""Each rule by its text, what must stay, and the value of random expressions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from strategies import bools, captures, environment, floats, ints

from flash_fx.score.evaluate import evaluate
from flash_fx.score.expr import Expr, walk
from flash_fx.score.simplify import simplify
from flash_fx.score.text import parse

RULES = [
    ("q_idx + 0", "q_idx"),
    ("0 + q_idx", "q_idx"),
    ("score + -0.0", "score"),
    ("q_idx + 1 + 2", "q_idx + 3"),
    ("q_idx - 1 + 2", "q_idx + 1"),
    ("q_idx + 1 - 1", "q_idx"),
    ("score - 0.0", "score"),
    ("score - 0", "score"),
    ("q_idx - q_idx", "0"),
    ("score * 1.0", "score"),
    ("1.0 * q_idx", "float(q_idx)"),
    ("q_idx * 1", "q_idx"),
    ("0 * q_idx", "0"),
    ("score * 3.0 * 2.0", "score * 6.0"),
    ("0.5 * (3.0 * score)", "score * 1.5"),
    ("score / 1.0", "score"),
    ("q_idx / 1", "float(q_idx)"),
    ("q_idx // 1", "q_idx"),
    ("q_idx % 1", "0"),
    ("pow(score, 1)", "score"),
    ("pow(score, 1.0)", "score"),
    ("--score", "score"),
    ("-(-(score))", "score"),
    ("~~(score < 1.0)", "score < 1.0"),
    ("~(q_idx < kv_idx)", "q_idx >= kv_idx"),
    ("~(score == 1.0)", "score != 1.0"),
    ("(q_idx < 3) & True", "q_idx < 3"),
    ("(q_idx < 3) & False", "False"),
    ("False | (q_idx < 3)", "q_idx < 3"),
    ("(q_idx < 3) | True", "True"),
    ("(q_idx < 3) | (q_idx < 3)", "q_idx < 3"),
    ("(q_idx < 3) ^ True", "q_idx >= 3"),
    ("(q_idx < 3) ^ False", "q_idx < 3"),
    ("(q_idx < 3) ^ (q_idx < 3)", "False"),
    ("where(True, score, 1.0)", "score"),
    ("where(False, score, 1)", "float(1)"),
    ("where(b < 1, score, score)", "score"),
    ("where(b < 1, True, False)", "b < 1"),
    ("where(b < 1, False, True)", "b >= 1"),
    ("where(~(score < 1.0), score, 0.0)", "where(score < 1.0, 0.0, score)"),
    ("minimum(score, score)", "score"),
    ("q_idx <= q_idx", "True"),
    ("q_idx != q_idx", "False"),
    ("float(float(c0[h]))", "float(c0[h])"),
    ("int(q_idx)", "q_idx"),
    ("bool(q_idx < 1)", "q_idx < 1"),
    ("floor(q_idx)", "q_idx"),
    ("isnan(q_idx)", "False"),
    ("2 + 3 * 4", "14"),
    ("7 // 2 - -7 % 4", "2"),
    ("0.5 * 0.25 + 1.0", "1.125"),
    ("float(3)", "3.0"),
    ("3 < 4", "True"),
    ("score * 2.0 * 0.5", "score"),
]
STAY = [
    "score * 0.0", "score - score", "score + 0.0", "~(score < 1.0)", "score == score", "0.1 + 0.2", "0.1 * 3.0",
    "c0[h] * 1", "c0[h] + 0", "int(c0[h])", "score * 0.1 * 0.3", "1 // 0", "where(c0[h], True, False)",
    "c0[h] & True", "isnan(score)", "floor(score)", "1.0 / 3.0",
]  # fmt: skip


def _expr(text: str) -> Expr:
    return parse(f"score = {text}").score


@pytest.mark.parametrize(("before", "after"), RULES)
def test_rule(before: str, after: str) -> None:
    assert repr(simplify(_expr(before))) == after.replace("float(1)", "1.0")


@pytest.mark.parametrize("text", STAY)
def test_not_exact_so_not_done(text: str) -> None:
    assert repr(simplify(_expr(text))) == text


@pytest.mark.parametrize("before", [before for before, _ in RULES])
def test_rule_keeps_the_value(before: str) -> None:
    _assert_same_value(_expr(before), torch.float32)


@given(floats | ints | bools)
@settings(max_examples=200, deadline=None)
def test_random_expressions_keep_their_value(expr: Expr) -> None:
    _assert_same_value(expr, torch.float32)
    _assert_same_value(expr, torch.float64)


@given(floats)
@settings(max_examples=100, deadline=None)
def test_simplify_is_idempotent_and_never_grows(expr: Expr) -> None:
    once = simplify(expr)
    assert simplify(once) is once
    assert sum(1 for _ in walk(once)) <= sum(1 for _ in walk(expr))


def _assert_same_value(expr: Expr, dtype: torch.dtype) -> None:
    env = environment()
    env["score"][0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    before, after = (evaluate(e, env, captures(), [2], dtype) for e in (expr, simplify(expr)))
    before, after = torch.broadcast_tensors(before, after)
    assert before.dtype == after.dtype, f"{expr!r} -> {simplify(expr)!r}"
    same = (before == after) | (before.isnan() & after.isnan())
    assert same.all(), f"{expr!r} -> {simplify(expr)!r}: {before[~same]} became {after[~same]}"
    if before.is_floating_point():
        signs = (torch.signbit(before) == torch.signbit(after)) | before.isnan()
        assert signs.all(), f"{expr!r} -> {simplify(expr)!r} changes the sign of a zero"
