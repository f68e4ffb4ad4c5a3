"""Symbolic derivatives against torch.autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from strategies import LOADS, PARTIAL, SMOOTH, captures, environment, tame_floats

from flash_fx.score.evaluate import evaluate
from flash_fx.score.expr import ARITY, SCORE, Expr, Load, op, substitute, walk
from flash_fx.score.grad import derivative, loads_of
from flash_fx.score.text import parse


def _expr(text: str) -> Expr:
    return parse(f"score = {text}").score


def _autograd(expr: Expr, wrt: Expr, env: dict, caps: list[torch.Tensor]) -> torch.Tensor:
    """d expr / d wrt per element: the load is replaced by a score of its own, expanded and differentiated."""
    if isinstance(wrt, Load):
        leaf = evaluate(wrt, env, caps, [2], torch.float64).expand_as(env["score"]).clone().requires_grad_()
        score = env["score"]
        # the load becomes the last capture, read at every position
        fresh = Load(len(caps), tuple(_expr(n) for n in ("b", "h", "q_idx", "kv_idx")))
        value = evaluate(substitute(expr, {wrt: fresh}), {**env, "score": score}, [*caps, leaf], [2], torch.float64)
    else:
        leaf = env["score"].clone().requires_grad_()
        value = evaluate(expr, {**env, "score": leaf}, caps, [2], torch.float64)
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(value.expand_as(leaf).sum(), leaf, allow_unused=True, materialize_grads=True)[0]


def _assert_matches(expr: Expr, wrt: Expr, env: dict) -> None:
    theirs = _autograd(expr, wrt, env, captures())
    ours = evaluate(derivative(expr, wrt), env, captures(), [2], torch.float64).expand_as(theirs)
    finite = theirs.isfinite() & (theirs.abs() < 1e12)
    close = torch.isclose(ours, theirs, rtol=1e-9, atol=1e-9) | ~finite
    assert close.all(), f"d {expr!r} / d {wrt!r} = {derivative(expr, wrt)!r}: {ours[~close]}, torch {theirs[~close]}"


@given(tame_floats)
@settings(max_examples=150, deadline=None)
def test_random_expressions_by_score_and_loads(expr: Expr) -> None:
    for wrt in (SCORE, *(n for n in walk(expr) if n in LOADS)):
        _assert_matches(expr, wrt, environment())


@pytest.mark.parametrize("operation", [o for o in ARITY if o in (*SMOOTH, *PARTIAL, "abs", "sign", "floor", "trunc")])
def test_unary_operation(operation: str) -> None:
    env = environment()
    env["score"] = env["score"].abs() + 0.1 if operation in PARTIAL else env["score"]
    _assert_matches(op(operation, SCORE * 0.5), SCORE, env)


@pytest.mark.parametrize("text", [
    "score / (c1[b, kv_idx] + 3.0)", "c4 / (score * score + 1.0)", "score % 0.7", "2.5 % (score * score + 0.3)",
    "pow(score * score + 0.1, 1.5)", "pow(2.0, score)", "pow(score * score + 0.2, score)", "pow(score, 0)",
    "pow(score, kv_idx)", "score // 0.3", "exp(score) + int(score) + bool(score) + (score < 0.1)",
])  # fmt: skip
def test_formula(text: str) -> None:
    for wrt in (SCORE, *(n for n in walk(_expr(text)) if isinstance(n, Load))):
        _assert_matches(_expr(text), wrt, environment())


@pytest.mark.parametrize("text", [
    "maximum(score, 0.0)", "minimum(0.0, score)", "maximum(score, score * 2.0)", "minimum(score * 3.0, -score)",
    "abs(score)", "sign(score)", "pow(score, 2)", "pow(score, 1)", "where(score > 0.0, score, 0.0)",
    "where(score >= 0, score, 0)", "round(score)",
])  # fmt: skip
def test_kinks_follow_torch(text: str) -> None:
    env = environment()
    env["score"] = (env["score"] * 2).round().abs() * 0.0
    _assert_matches(_expr(text), SCORE, env)


def test_the_branch_not_taken_adds_no_nan() -> None:
    env = environment()
    slope = evaluate(derivative(_expr("where(score > 0.0, sqrt(score), 0.0)"), SCORE), env, [], [], torch.float64)
    assert slope.isfinite().all()


@pytest.mark.parametrize(("text", "slope"), [
    ("score", "1.0"),
    ("score * 0.125", "0.125"),
    ("score + c0[h] * (kv_idx - q_idx)", "1.0"),
    ("where(kv_idx <= q_idx, score * 2.0, -inf)", "where(kv_idx <= q_idx, 2.0, 0.0)"),
    ("tanh(score)", "1.0 - tanh(score) * tanh(score)"),
    ("float(kv_idx)", "0.0"),
    ("round(score)", "0.0"),
])  # fmt: skip
def test_text_of_slopes(text: str, slope: str) -> None:
    assert repr(derivative(_expr(text), SCORE)) == slope


def test_nothing_flows_through_an_index() -> None:
    outer = _expr("c0[h, c1[q_idx, kv_idx]]")
    assert repr(derivative(outer, outer.args[1])) == "0.0"


def test_loads_of_are_distinct_and_found_in_every_part() -> None:
    program = parse("score = score + c0[h] + c0[b]; weight = c0[h] * c1[h]; sink = c0[0]")
    assert [repr(n) for n in loads_of(program, 0)] == ["c0[h]", "c0[b]", "c0[0]"]
