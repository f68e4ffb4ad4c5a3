"""Emitted statements: their text, and their values with numpy standing in for Triton."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flash_fx.kernels.emit import Emitter, Place, literal, range_lines
from flash_fx.kernels.facts import is_tame, linear_scale
from flash_fx.kernels.spec import CaptureFact, KernelSpec
from flash_fx.score.evaluate import evaluate
from flash_fx.score.region import kv_region, q_region
from flash_fx.score.text import parse

PLACE = Place(
    score="qk",
    q="offs_m[:, None]",
    q_first="start_m",
    q_local="local_m[:, None]",
    q_mask="mask_m[:, None]",
    kv="offs_n[None, :]",
    kv_first="start_n",
    kv_local="local_n[None, :]",
)
ERF = np.vectorize(math.erf, otypes=[np.float32])
TL = SimpleNamespace(
    math=SimpleNamespace(exp2=np.exp2, log2=np.log2, erf=ERF),
    exp=np.exp,
    log=np.log,
    sqrt=np.sqrt,
    sin=np.sin,
    cos=np.cos,
    rsqrt=lambda x: 1.0 / np.sqrt(x),
    abs=np.abs,
    floor=np.floor,
    ceil=np.ceil,
    where=np.where,
    minimum=lambda a, b, propagate_nan=None: np.minimum(a, b),
    maximum=lambda a, b, propagate_nan=None: np.maximum(a, b),
    PropagateNan=SimpleNamespace(ALL=None),
    float32=np.float32,
    int32=np.int32,
    int64=np.int64,
    cast=lambda x, t: t(x) if np.isscalar(x) else np.asarray(x).astype(t),
)


def emit(
    text: str, captures: tuple[CaptureFact, ...] = (), dtype: str = "float32", place: Place = PLACE
) -> tuple[list[str], str]:
    emitter = Emitter(KernelSpec("", captures, dtype, 64, 64), place)
    value = emitter.value(parse(f"score = {text}").score, "float")
    return emitter.take(), value


def run(text: str, qk: np.ndarray) -> np.ndarray:
    lines, value = emit(text)
    scope = {
        "tl": TL,
        "qk": qk,
        "offs_m": np.arange(qk.shape[0]),
        "offs_n": np.arange(qk.shape[1]),
        "off_b": 1,
        "off_h": 3,
    }
    with np.errstate(all="ignore"):
        exec("\n".join(lines), scope)
        return np.broadcast_to(np.float32(eval(value, scope)), qk.shape)


VALUES = np.float32(
    [
        -math.inf,
        -1e30,
        -50.0,
        -2.5,
        -1.5,
        -0.5,
        -0.3,
        -1e-4,
        -1e-30,
        0.0,
        1e-6,
        0.25,
        0.5,
        1.0,
        2.5,
        30.0,
        1e5,
        math.inf,
        math.nan,
    ]
)


@pytest.mark.parametrize(
    "text",
    [
        "tanh(score)",
        "sigmoid(score)",
        "expm1(score)",
        "log1p(score)",
        "erf(score)",
        "exp(score)",
        "log2(score)",
        "sin(score)",
        "abs(score)",
        "sign(score)",
        "floor(score)",
        "ceil(score)",
        "round(score)",
        "trunc(score)",
        "float(isnan(score))",
        "minimum(score, 0.5)",
        "maximum(0.5, score)",
        "where(score > 0.0, score, score * 2.0)",
        "score // 0.75",
        "pow(score, 2.0)",
        "pow(score, 3.0)",
        "pow(score, 0.5)",
        "pow(score, -1.0)",
        "pow(2.0, score)",
        "rsqrt(score)",
        "float(score != score)",
        "score / 3.0 - 1.0",
        "float(bool(score))",
        "float(~(score > 0.0) | (score > 1.0))",
    ],
)
def test_values_of_float_functions(text: str) -> None:
    limited = text.startswith("sin") or text in ("score // 0.75", "pow(score, 0.5)")  # special values differ, as in C
    qk = (VALUES[np.abs(VALUES) < 1e3] if limited else VALUES)[None, :]
    ours = run(text, qk)
    expected = evaluate(parse(f"score = {text}").score, {"score": torch.from_numpy(qk.copy())}).float().numpy()
    np.testing.assert_allclose(ours, np.broadcast_to(expected, qk.shape), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(
    "text", ["(q_idx - kv_idx) // 3", "(kv_idx - q_idx) % 4", "q_idx // -3", "(q_idx - 3) % -2", "h * 2 - b"]
)
def test_floor_division_and_modulo_of_negative_integers(text: str) -> None:
    qk = np.zeros((7, 9), np.float32)
    env = {"q_idx": range(7), "kv_idx": range(9), "b": 1, "h": 3}
    expected = evaluate(parse(f"score = float({text})").score, env).numpy()
    np.testing.assert_array_equal(run(f"float({text})", qk), np.broadcast_to(expected, (1, 1, 7, 9))[0, 0])


def test_one_assignment_per_distinct_expression() -> None:
    lines, value = emit("(score + 1.0) * (score + 1.0)")
    assert lines == ["t0 = qk + 1.0", "t1 = t0 * t0"] and value == "t1"


def test_loads_widen_only_the_scalar_part_and_stay_in_bounds() -> None:
    lines, _ = emit("c0[b, 0, q_idx, kv_idx]", (CaptureFact("bfloat16", 4),))
    assert lines == [
        "t0 = tl.load(C0 + tl.cast(off_b, tl.int64) * stride_c0_0 + tl.cast(start_m, tl.int64) * stride_c0_2"
        " + tl.cast(start_n, tl.int64) * stride_c0_3"
        " + (local_m[:, None] * stride_c0_2 + local_n[None, :] * stride_c0_3),"
        " mask=mask_m[:, None], other=0)",
        "t1 = t0.to(tl.float32)",
    ]
    lines, _ = emit("c0[h]", (CaptureFact("float32", 1),))
    assert lines == ["t0 = tl.load(C0 + tl.cast(off_h, tl.int64) * stride_c0_0)"]
    lines, _ = emit("c0[kv_idx // 2 - q_idx]", (CaptureFact("float32", 1),))
    assert "mask=mask_m[:, None], other=0" in lines[-1] and ".to(tl.int64) * stride_c0_0" in lines[-1]
    lines, _ = emit("where(c0[kv_idx], score, 0.0)", (CaptureFact("bool", 1),))
    assert lines[1] == "t1 = t0 != 0"


def test_hoisting_takes_what_the_loop_does_not_change() -> None:
    spec = KernelSpec("", (CaptureFact("float32", 2),), "float32", 64, 64)
    outer = Emitter(spec, PLACE)
    score = parse("score = score + c0[h, q_idx] * 2.0 + float(kv_idx)").score
    outer.hoist([score], frozenset({"kv_idx", "score"}))
    assert [line.split(" = ")[0] for line in outer.take()] == ["t0", "t1"]
    inner = Emitter(spec, PLACE, outer)
    inner.value(score, "float")
    assert not any("tl.load" in line for line in inner.take())


def test_literals() -> None:
    assert [literal(v, "float") for v in (1, 0.5, math.inf, -1e300)] == ["1.0", "0.5", 'float("inf")', 'float("-inf")']
    assert literal(math.nan, "float") == 'float("nan")' and literal(True, "int") == "1" and literal(2, "bool") == "True"
    assert emit("sqrt(2.0) * score")[0] == ["t0 = 1.4142135623730951 * qk"]


BOUNDS = {
    "N": 100,
    "M": 90,
    "BLOCK_N": 16,
    "BLOCK_M": 8,
    "tl": SimpleNamespace(
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        where=lambda c, a, b: a if c else b,
        cast=lambda x, t: int(x),
        int32=int,
    ),
}


@pytest.mark.parametrize(
    "keep",
    [
        "kv_idx <= q_idx",
        "kv_idx <= q_idx - 20",
        "kv_idx >= q_idx",
        "(kv_idx <= q_idx) & (q_idx - kv_idx < 20)",
        "kv_idx < 50",
        "(kv_idx <= q_idx) | (kv_idx < 30)",
        "kv_idx <= q_idx + (kv_len - q_len)",
        "(q_idx // 8) == (kv_idx // 8)",
        "kv_idx < -3",
    ],
)
def test_loop_bounds_cover_every_kept_position_and_full_tiles_are_full(keep: str) -> None:
    program = parse(f"keep = {keep}")
    kept = evaluate(program.keep, {"q_idx": range(90), "kv_idx": range(100), "q_len": 90, "kv_len": 100}).expand(
        1, 1, 90, 100
    )[0, 0]
    extra = {"q0": "first", "q1": "last", "k0": "first", "k1": "last"}
    for axis, region, mask, block, other, length in (
        ("n", kv_region(program), kept, 16, 8, 100),
        ("m", q_region(program), kept.T, 8, 16, 90),
    ):
        lines = range_lines(Emitter(KernelSpec("", (), "float32", 64, 64), Place(extra=extra)), region, axis)
        for first in range(0, mask.shape[0], other):
            scope = {**BOUNDS, "first": first, "last": min(first + other, mask.shape[0]) - 1}
            exec("\n".join(lines), {**scope, "SHORT": True}, short := {})
            exec("\n".join(lines), {**scope, "SHORT": False}, long := {})
            lo, full_lo, full_hi, hi = (long[k] for k in ("lo", "full_lo", "full_hi", "hi"))
            assert short == {**long, "full_lo": lo, "full_hi": lo}
            rows = mask[first : first + other]
            assert (
                lo % block == full_lo % block == full_hi % block == 0 and 0 <= lo <= full_lo <= full_hi and hi <= length
            )
            assert not rows[:, :lo].any() and not rows[:, max(hi, 0) :].any()
            if full_hi > full_lo:
                assert full_hi <= hi and rows[:, full_lo:full_hi].all()


def test_linear_scale() -> None:
    found = [
        linear_scale(parse(t).score) for t in ("", "score = 0.5 * score", "score = score / 4.0", "score = score * -1.0")
    ]
    assert found == [1.0, 0.5, 0.25, None] and linear_scale(parse("score = score + 1.0").score) is None


def test_tame_scores() -> None:
    assert is_tame(parse("score = tanh(score * 0.1) * 30.0 - float(q_idx)").score)
    assert not is_tame(parse("score = score + c0[h]").score) and not is_tame(
        parse("score = where(b > 0, score, -1e9)").score
    )
    assert is_tame(parse("score = where(b > 0, score, -inf)").score)
