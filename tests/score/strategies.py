"""Random expressions and programs for hypothesis, and an environment to evaluate them in."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash_fx.score.expr import (
    COMPARISONS,
    KV,
    KV_LEN,
    Q_LEN,
    SCORE,
    B,
    Const,
    Expr,
    H,
    Program,
    Q,
    const,
    load,
    name,
    op,
)  # fmt: skip

SHAPE = (2, 2, 3, 4)  # B, H, M, N of the environment
SMOOTH = ("tanh", "sigmoid", "erf", "sin", "cos", "exp", "exp2", "expm1")
KINKED = ("abs", "sign", "floor", "ceil", "round", "trunc")
PARTIAL = ("log", "log2", "log1p", "sqrt", "rsqrt")

# c0 float [H], c1 float [B, N], c2 int [N] with values below H, c3 bool [B, M, N], c4 float []
LOADS = (load(0, H), load(0, load(2, KV)), load(1, B, KV), load(1, 0, KV), load(4))


def captures(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    batch, heads, rows, keys = SHAPE
    return [
        torch.randn(heads, generator=g, dtype=torch.float64).to(dtype),
        torch.randn(batch, keys, generator=g, dtype=torch.float64).to(dtype),
        torch.randint(0, heads, (keys,), generator=g, dtype=torch.int32),
        torch.rand(batch, rows, keys, generator=g) > 0.5,
        torch.randn((), generator=g, dtype=torch.float64).to(dtype),
    ]


def environment(seed: int = 0) -> dict:
    batch, heads, rows, keys = SHAPE
    score = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ranges = {"b": range(batch), "h": range(heads), "q_idx": range(rows), "kv_idx": range(keys)}
    return {"score": score, **ranges, "q_len": rows, "kv_len": keys}


def opaque(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """The same strategy with a short repr: hypothesis warns of the long ones that nesting gives."""

    @st.composite
    def drawn(draw: st.DrawFn) -> object:
        return draw(strategy)

    return drawn()


def negated(e: Expr) -> Expr:
    """As the parser builds it: the minus of a literal is part of the literal."""
    return const(-e.head) if isinstance(e, Const) and not isinstance(e.head, bool) else -e


_ints: st.SearchStrategy[Expr] = st.recursive(
    st.sampled_from((B, H, Q, KV, Q_LEN, KV_LEN, name("s0"))) | st.integers(-3, 3).map(const),
    lambda sub: st.one_of(
        st.builds(op, st.sampled_from(("add", "sub", "mul", "minimum", "maximum")), sub, sub),
        st.builds(op, st.sampled_from(("abs", "floor", "int")), sub),
        st.builds(negated, sub),
        st.builds(op, st.sampled_from(("floordiv", "mod")), sub, st.integers(1, 3).map(const)),
    ),
    max_leaves=5,
)
ints = opaque(_ints)
floats_const = st.sampled_from((-2.0, -0.75, -0.0, 0.0, 0.1, 0.5, 1.0, 2.0, 3.0)).map(const)


def bools_over(values: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    leaf = st.builds(op, st.sampled_from(sorted(COMPARISONS)), values, values)
    return opaque(st.recursive(
        leaf | st.booleans().map(const) | st.just(load(3, B, Q, KV)),
        lambda sub: st.one_of(
            st.builds(op, st.sampled_from(("and", "or", "xor")), sub, sub),
            st.builds(op, st.just("not"), sub),
            st.builds(op, st.just("where"), sub, sub, sub),
        ),
        max_leaves=4,
    ))  # fmt: skip


def floats_over(unary: tuple[str, ...]) -> st.SearchStrategy[Expr]:
    """Float expressions; with `unary` from SMOOTH they and their slopes are finite."""

    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        sub = opaque(inner)
        return opaque(st.one_of(
            st.builds(op, st.sampled_from(("add", "sub", "mul", "minimum", "maximum")), sub, sub | ints),
            st.builds(op, st.sampled_from(unary), sub),
            st.builds(negated, sub),
            st.builds(op, st.just("float"), sub | ints),
            st.builds(op, st.just("where"), bools_over(ints | sub), sub, sub | ints),
            st.builds(op, st.just("pow"), sub, st.integers(0, 3).map(const)),
            st.builds(op, st.just("div"), sub, st.sampled_from((0.5, 3.0, -4)).map(const)),
        ))  # fmt: skip

    leaf = st.sampled_from((SCORE, SCORE, *LOADS)) | floats_const
    return opaque(st.recursive(leaf, grow, max_leaves=6).map(lambda e: op("float", e)))


floats = floats_over(SMOOTH + KINKED + PARTIAL)
tame_floats = floats_over(SMOOTH + KINKED)
bools = bools_over(ints | floats)
programs = opaque(st.builds(
    Program,
    score=floats,
    keep=st.none() | bools,
    sink=st.none() | st.sampled_from((load(0, H), const(0.0))),
    weight=st.none() | floats,
    drop=st.none() | st.sampled_from((0.0, 0.1, 0.5)),
    empty=st.none() | st.sampled_from([0.0, math.nan]),
))  # fmt: skip
