"""Tile bounds by brute force: never drop a kept key, never claim a dropped one, tight for the common masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ints

from flash_fx.score.evaluate import evaluate
from flash_fx.score.expr import COMPARISONS, KV, KV_LEN, Q_LEN, Expr, Program, Q, const, name, op
from flash_fx.score.region import Region, bound_value, kv_region, q_region
from flash_fx.score.text import parse

SHAPES = [(6, 6), (4, 9), (9, 4), (1, 5)]
TILES = (1, 2, 4)


def _keep(program: Program, rows: int, keys: int, size: int) -> torch.Tensor:
    env = {"b": range(1), "h": range(1), "q_idx": range(rows), "kv_idx": range(keys), "q_len": rows, "kv_len": keys}
    keep = torch.ones((), dtype=torch.bool) if program.keep is None else evaluate(program.keep, env, [], [size])
    return keep.expand(1, 1, rows, keys)[0, 0]


def _bounds(region: Region, length: int, values: dict[str, int]) -> tuple[int, int, int, int]:
    lo, full_lo = (0 if e is None else max(0, bound_value(e, values)) for e in (region.lo, region.full_lo))
    full_hi, hi = (length if e is None else min(length, bound_value(e, values)) for e in (region.full_hi, region.hi))
    return lo, full_lo, full_hi, hi


def _check(program: Program, rows: int, keys: int, size: int, *, tight: bool) -> None:
    keep = _keep(program, rows, keys, size)
    sides = ((kv_region(program), keep, "q0", "q1"), (q_region(program), keep.t(), "k0", "k1"))
    for region, table, first, last in sides:
        for tile in TILES:
            for start in range(0, table.shape[0], tile):
                stop = min(start + tile, table.shape[0])
                values = {first: start, last: stop - 1, "q_len": rows, "kv_len": keys, "s0": size}
                where = f"{program} rows {start}:{stop} of {rows} x {keys}, s0 = {size}, {region}"
                lo, full_lo, full_hi, hi = _bounds(region, table.shape[1], values)
                some, every = table[start:stop].any(0), table[start:stop].all(0)
                assert not some[: max(lo, 0)].any() and not some[max(hi, 0) :].any(), f"drops a kept position: {where}"
                assert full_hi <= full_lo or every[full_lo:full_hi].all(), f"claims a dropped position: {where}"
                if tight:
                    assert max(0, hi - lo) == _extent(some), f"not tight: {where}"
                    assert max(0, full_hi - full_lo) == int(every.sum()), f"full part not tight: {where}"


def _extent(some: torch.Tensor) -> int:
    found = some.nonzero().flatten()
    return int(found[-1] - found[0] + 1) if len(found) else 0


TIGHT = [
    "",
    "keep = kv_idx <= q_idx",
    "keep = ~(kv_idx > q_idx)",
    "keep = kv_idx <= q_idx + kv_len - q_len",
    "keep = (kv_idx <= q_idx) & (q_idx - kv_idx < 3)",
    "keep = (kv_idx <= q_idx) & (kv_idx >= q_idx - s0)",
    "keep = abs(q_idx - kv_idx) < 2",
    "keep = kv_idx < s0",
    "keep = (kv_idx < s0) & (q_idx < 2)",
    "keep = (kv_idx < s0) | (kv_idx <= q_idx)",
    "keep = where(kv_idx < 2, True, kv_idx <= q_idx)",
    "keep = where(q_idx < kv_idx, False, True)",
    "keep = kv_idx // 2 == q_idx // 2",
    "keep = (kv_idx // 2 == q_idx // 2) & (kv_idx <= q_idx)",
    "keep = kv_idx // 2 <= q_idx // 2",
    "keep = (q_idx - kv_idx) // 2 < 1",
    "keep = 2 * kv_idx <= q_idx",
    "keep = kv_idx <= minimum(q_idx, 3)",
    "keep = True",
    "keep = False",
]


@pytest.mark.parametrize("text", TIGHT)
def test_common_masks_are_exact(text: str) -> None:
    for rows, keys in SHAPES:
        for size in (0, 2, 5):
            _check(parse(text), rows, keys, size, tight=True)


LOOSE = [
    "keep = kv_idx != q_idx", "keep = kv_idx % 2 == q_idx % 2", "keep = (q_idx + kv_idx) % 3 == 0",
    "keep = kv_idx * q_idx < 4", "keep = float(kv_idx) <= q_idx * 1.0", "keep = (kv_idx <= q_idx) ^ (kv_idx < 2)",
    "keep = kv_idx // s0 == q_idx // s0", "keep = (kv_idx == 0) | (kv_idx == q_idx)",
    "keep = (kv_idx <= q_idx) & ((kv_idx < 2) | (q_idx - kv_idx < 2))",
]  # fmt: skip


@pytest.mark.parametrize("text", LOOSE)
def test_other_masks_are_sound(text: str) -> None:
    for rows, keys in SHAPES:
        _check(parse(text), rows, keys, 2, tight=False)


sides = st.recursive(
    st.sampled_from((Q, KV, KV, Q_LEN, KV_LEN, name("s0"))) | st.integers(-4, 4).map(const),
    lambda sub: st.one_of(
        st.builds(op, st.sampled_from(("add", "sub", "minimum", "maximum")), sub, sub),
        st.builds(op, st.sampled_from(("floordiv", "mod")), sub, st.integers(1, 3).map(const)),
        st.builds(op, st.just("mul"), sub, st.integers(-2, 2).map(const)),
        st.builds(op, st.sampled_from(("neg", "abs")), sub),
    ),
    max_leaves=4,
)
masks: st.SearchStrategy[Expr] = st.recursive(
    st.builds(op, st.sampled_from(sorted(COMPARISONS)), sides, sides | ints),
    lambda sub: st.one_of(
        st.builds(op, st.sampled_from(("and", "or", "xor")), sub, sub),
        st.builds(op, st.just("not"), sub),
        st.builds(op, st.just("where"), sub, sub, sub),
    ),
    max_leaves=4,
)


@given(masks, st.sampled_from(SHAPES), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_random_masks_are_sound(mask: Expr, shape: tuple[int, int], size: int) -> None:
    _check(Program(keep=mask), *shape, size, tight=False)


def test_a_load_is_unknown_but_does_not_hide_the_rest() -> None:
    region = kv_region(parse("keep = (kv_idx <= q_idx) & c0[b, kv_idx]"))
    assert str(region) == "Region(lo=None, full_lo=0, full_hi=0, hi=q1 + 1)"
    assert not kv_region(parse("keep = (kv_idx <= q_idx) | c0[b, kv_idx]")).is_bounded
    assert not kv_region(parse("keep = kv_idx < c0[b]")).is_bounded


def test_text_of_bounds() -> None:
    region = kv_region(parse("keep = (kv_idx <= q_idx + kv_len - q_len) & (q_idx - kv_idx < 256)"))
    assert str(region) == (
        "Region(lo=q0 - 255, full_lo=q1 - 255, full_hi=q0 + kv_len - q_len + 1, hi=q1 + kv_len - q_len + 1)"
    )
