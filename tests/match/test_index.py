"""Index arithmetic: text of the normal forms, and view index maps by brute force against torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_fx.match import index as ix
from flash_fx.score.expr import Const, Expr, Name, const, name, op

I, H, M, S, T = (name(f"${n}") for n in ("i", "h", "m", "S", "T"))  # noqa: E741
SMALL = settings(max_examples=60, deadline=None)


def value_of(e: Expr, env: dict[Expr, int]) -> int:
    """An integer expression at concrete coordinates."""
    if isinstance(e, Const):
        return int(e.head)
    if isinstance(e, Name):
        return env[e]
    args = [value_of(a, env) for a in e.args]
    return {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "neg": lambda x: -x,
        "floordiv": lambda x, y: x // y, "mod": lambda x, y: x % y,
    }[e.head](*args)  # fmt: skip


# *** polynomials ***


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (ix.add(I, const(0)), "$i"),
        (ix.add(const(2), ix.add(I, const(-2))), "$i"),
        (ix.sub(I, I), "0"),
        (ix.add(ix.mul(I, const(3)), ix.mul(const(2), I)), "$i * 5"),
        (ix.mul(ix.add(I, const(1)), ix.sub(I, const(1))), "$i * $i - 1"),
        (ix.sub(const(3), I), "3 - $i"),
        (ix.sub(const(0), I), "-$i"),
        (ix.add(ix.mul(op("floordiv", I, const(4)), const(4)), op("mod", I, const(4))), "$i"),
        (ix.add(ix.mul(op("floordiv", I, S), S), op("mod", I, S)), "$i"),
        (ix.product([S, const(2), S]), "$S * $S * 2"),
    ],
)
def test_normal_form(made: Expr, text: str) -> None:
    assert repr(made) == text


def test_equal_polynomials_are_the_same_object() -> None:
    assert ix.add(ix.mul(I, S), M) is ix.add(M, ix.mul(S, I))
    assert ix.same(ix.mul(ix.add(I, M), S), ix.add(ix.mul(S, M), ix.mul(I, S)))
    assert not ix.same(ix.add(I, M), ix.add(I, H))


@st.composite
def integers(draw: st.DrawFn, depth: int = 3) -> Expr:
    leaves = st.one_of(st.integers(-4, 4).map(const), st.sampled_from([I, H, M]))
    if depth == 0:
        return draw(leaves)
    kind = draw(st.sampled_from(["leaf", "add", "sub", "mul", "neg", "floordiv", "mod"]))
    if kind == "leaf":
        return draw(leaves)
    x = draw(integers(depth - 1))
    if kind == "neg":
        return op("neg", x)
    return op(kind, x, const(draw(st.integers(1, 5))) if kind in ("floordiv", "mod") else draw(integers(depth - 1)))


@SMALL
@given(integers(), st.tuples(*[st.integers(0, 6)] * 3))
def test_normal_form_keeps_the_value(e: Expr, at: tuple[int, ...]) -> None:
    env = dict(zip((I, H, M), at, strict=True))
    assert value_of(ix.from_poly(ix.to_poly(e)), env) == value_of(e, env)


@SMALL
@given(integers(), st.integers(1, 6))
def test_division_keeps_the_value(e: Expr, divisor: int) -> None:
    sizes = {I: 5, H: 3, M: 4}
    indexer = ix.Indexer({k: const(v) for k, v in sizes.items()}, {})
    quotient, remainder = indexer.floordiv(e, const(divisor)), indexer.mod(e, const(divisor))
    again = indexer.renormalise(e)
    for at in itertools.product(*map(range, sizes.values())):
        env = dict(zip(sizes, at, strict=True))
        assert value_of(quotient, env) == value_of(e, env) // divisor
        assert value_of(remainder, env) == value_of(e, env) % divisor
        assert value_of(again, env) == value_of(e, env)


# *** division with sizes ***


def indexer(**sizes: Expr) -> ix.Indexer:
    return ix.Indexer({name(f"${k}"): v for k, v in sizes.items()}, {S: 4, T: 6})


@pytest.mark.parametrize(
    ("e", "divisor", "quotient", "remainder"),
    [
        (ix.add(ix.mul(I, const(8)), H), const(8), "$i", "$h"),
        (ix.add(ix.mul(I, const(16)), H), const(8), "$i * 2", "$h"),
        (ix.add(ix.mul(I, S), M), S, "$i", "$m"),
        (M, S, "0", "$m"),
        (S, S, "1", "0"),
        (H, const(4), "$h // 4", "$h % 4"),  # h may be 4..7
        (ix.sub(ix.mul(I, const(8)), H), const(8), "($i * 8 - $h) // 8", "($i * 8 - $h) % 8"),  # may be negative
        (ix.add(ix.mul(I, S), M), T, "($S * $i + $m) // $T", "($S * $i + $m) % $T"),  # nothing known of S and T
    ],
)
def test_division(e: Expr, divisor: Expr, quotient: str, remainder: str) -> None:
    known = indexer(i=const(5), h=const(8), m=S)
    assert (repr(known.floordiv(e, divisor)), repr(known.mod(e, divisor))) == (quotient, remainder)


# *** views ***


def check_map(source: tuple[int, ...], target: torch.Tensor, found: tuple[Expr, ...], coordinates: list[Expr]) -> None:
    """`target` holds the flat source position of each of its elements."""
    for at in itertools.product(*map(range, target.shape)):
        env = dict(zip(coordinates, at, strict=True))
        position = [value_of(e, env) for e in found]
        assert all(0 <= p < s for p, s in zip(position, source, strict=True)), (at, position)
        flat = sum(p * math.prod(source[i + 1 :]) for i, p in enumerate(position))
        assert flat == target[at].item(), (at, found)


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with as many elements: factors in one order, grouped in two ways, ones thrown in."""
    factors = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))

    def grouped() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=len(factors))) | {len(factors)})
        shape = [math.prod(factors[a:b]) for a, b in zip([0, *cuts], cuts)]
        if draw(st.booleans()):
            shape.insert(draw(st.integers(0, len(shape))), 1)
        return tuple(shape)

    return grouped(), grouped()


@SMALL
@given(regrouped(), st.data())
def test_view_of_a_permutation_matches_torch(shapes: tuple, data: st.DataObject) -> None:
    source, target = shapes
    order = data.draw(st.permutations(range(len(target))))
    moved = torch.arange(math.prod(source)).view(source).view(target).permute(order)
    coordinates = [name(f"${i}") for i in range(len(target))]
    before: list[Expr] = [ix.ZERO] * len(target)
    for place, dim in enumerate(order):
        before[dim] = coordinates[place]
    sizes = {c: const(s) for c, s in zip(coordinates, moved.shape, strict=True)}
    found = ix.Indexer(sizes, {}).view([const(s) for s in source], [const(s) for s in target], before)
    check_map(source, moved, found, coordinates)


def test_view_with_run_time_sizes() -> None:
    b, h = name("$b"), name("$hd")
    known = ix.Indexer({b: S, h: const(4), M: T}, {S: 3, T: 5})
    merged = known.view([S, const(4), T], [ix.mul(S, const(4)), T], [ix.add(ix.mul(b, const(4)), h), M])
    assert list(map(repr, merged)) == ["$b", "$hd", "$m"]
    split = known.view([ix.mul(S, const(4)), T], [S, const(4), T], [b, h, M])
    assert list(map(repr, split)) == ["$b * 4 + $hd", "$m"]


def test_view_ignores_dimensions_of_one() -> None:
    known = indexer(m=const(6))
    assert list(map(repr, known.view([const(6)], [ix.ONE, const(6), ix.ONE], [ix.ZERO, M, ix.ZERO]))) == ["$m"]
    assert known.groups([ix.ONE, const(6)], [const(2), const(3)]) == [([1], [0, 1])]
