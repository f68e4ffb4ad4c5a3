"""The text of programs: it reads well, comes back the same, and says what is wrong."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from strategies import programs

from flash_fx.errors import ProgramError
from flash_fx.score.expr import KV, SCORE, Program, Q, load, op, where
from flash_fx.score.text import parse

CANONICAL = [
    "",
    "score = score * 0.125",
    "score = score * 0.125; keep = kv_idx <= q_idx",
    "keep = (kv_idx <= q_idx) & (q_idx - kv_idx < 256)",
    "score = score + c0[h] * (kv_idx - q_idx)",
    "score = score + c0[h, c1[q_idx, kv_idx]]",
    "score = tanh(score / 50.0) * 50.0; sink = c0[h]; weight = c1; drop = 0.1; empty = 0.0",
    "keep = kv_idx < q_idx; sink = 0.0; empty = nan",
    "score = where(kv_idx <= q_idx, score, -10000.0)",
    "score = score - (1.0 - c0[b, 0, 0, kv_idx])",
    "t0 = c0[b, kv_idx]; score = score + t0; keep = t0 > -1.0",
    "keep = ~(c0[b, kv_idx] | (kv_idx > q_idx + kv_len - q_len)) ^ (kv_idx // 64 == q_idx % s0)",
    "score = -score * -2.0; keep = ~isnan(pow(score, 2))",
]


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_text_is_a_fixed_point(text: str) -> None:
    assert str(parse(text)) == text


@given(programs)
@settings(max_examples=200, deadline=None)
def test_random_programs_round_trip(program: Program) -> None:
    assert parse(str(program)) == program


def test_pickle_gives_the_same_object() -> None:
    program = parse(CANONICAL[-1])
    assert pickle.loads(pickle.dumps(program)) == program


def test_operators_build_what_the_text_says() -> None:
    built = Program(score=where(KV <= Q, SCORE * 0.5 + load(0, KV), op("exp", -SCORE)), keep=~(KV < Q))
    text = "score = where(kv_idx <= q_idx, score * 0.5 + c0[kv_idx], exp(-score)); keep = ~(kv_idx < q_idx)"
    assert parse(text) == built


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score = ", "cannot parse the score program 'score = ': invalid syntax"),
        ("score = x", "unknown name 'x'; known are score, b, h, q_idx, kv_idx"),
        ("score = sinh(score)", "unknown function 'sinh'; known are where"),
        ("score = where(score, 1.0)", "where takes 3 arguments, got 2"),
        ("score = score[b]", "only captures c0, c1, ... can be indexed, got 'score'"),
        ("keep = 0 < kv_idx < 3", "'0 < kv_idx < 3' is not part of the score language"),
        ("score = score if b else score", "is not part of the score language"),
        ("bias = score", "a score program is a list of assignments to score, keep"),
        ("score += 1.0", "a score program is a list of assignments to score, keep"),
        ("score = score; score = score", "'score' is assigned twice"),
        ("drop = 2.0", "'drop' must be a probability from 0 to 1, got 2.0"),
        ("empty = 1.0", "'empty' must be 0.0 or nan, got 1.0"),
    ],
)
def test_errors_name_the_place_and_what_is_known(text: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_a_program_is_a_str() -> None:
    with pytest.raises(ProgramError, match="a score program is a str, got int"):
        parse(3)  # type: ignore[arg-type]
