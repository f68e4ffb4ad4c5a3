"""Pulled expressions: small algebra in its readable form, and generated masks against torch, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_fx.match.pull import M, N, cast, choose, compare, compare_float, logical, negate
from flash_fx.score.evaluate import reference
from flash_fx.score.expr import FALSE, TRUE, Expr, const, name, op
from flash_fx.score.text import parse
from flash_fx.testing import capture_rewrites

C = name("c")
LATER = op("gt", N, M)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (negate(LATER), "$n <= $m"),
        (negate(negate(C)), "c"),
        (negate(op("and", C, LATER)), "~c | ($n <= $m)"),
        (negate(op("lt", C, const(0.5))), "~(c < 0.5)"),  # NaN is neither below nor above
        (compare("lt", op("sub", N, M), const(1)), "$n <= $m"),
        (compare("gt", M, N), "$n < $m"),
        (compare("ge", op("add", M, const(3)), op("add", N, const(3))), "$n <= $m"),
        (compare("lt", const(2), const(3)), "True"),
        (compare("ge", N, const(0)), "True"),
        (compare("lt", N, const(0)), "False"),
        (compare_float("eq", op("where", C, const(1.0), const(0.0)), const(0.0)), "~c"),
        (choose(C, TRUE, FALSE), "c"),
        (choose(C, FALSE, TRUE), "~c"),
        (choose(TRUE, M, N), "$m"),
        (choose(FALSE, M, N), "$n"),
        (choose(C, M, M), "$m"),
        (logical("logical_and", [C, TRUE]), "c"),
        (logical("bitwise_or", [C, TRUE]), "True"),
        (cast(TRUE, "bool", "float"), "1.0"),
        (cast(C, "bool", "int"), "where(c, 1, 0)"),
    ],
)
def test_algebra(made: Expr, text: str) -> None:
    assert repr(made) == text


ROWS, KEYS = 6, 9


def rows() -> Tensor:
    return torch.arange(ROWS)[:, None]


def keys() -> Tensor:
    return torch.arange(KEYS)[None]


MASKS: dict[str, Callable[[], Tensor]] = {
    "tril": lambda: torch.ones(ROWS, KEYS, dtype=torch.bool).tril(2),
    "not triu": lambda: ~torch.ones(ROWS, KEYS).triu(3).bool(),
    "float tril": lambda: torch.tril(torch.ones(ROWS, KEYS)) == 1,
    "band": lambda: torch.ones(ROWS, KEYS).tril(4).triu(-2) > 0,
    "arange": lambda: keys() <= rows(),
    "window": lambda: (rows() - keys()).abs() <= 2,
    "strided": lambda: (keys() % 3 == 0) | (keys() == rows()),
    "blocks": lambda: keys() // 3 <= rows() // 2,
    "flipped": lambda: torch.ones(ROWS, KEYS, dtype=torch.bool).tril(2).flip(1, 0),
    "sliced": lambda: torch.ones(16, 16, dtype=torch.bool).tril()[4 : 4 + ROWS, :KEYS],
    "negative slice": lambda: torch.ones(16, 16, dtype=torch.bool).tril()[-ROWS:, -KEYS:],
    "transposed": lambda: torch.ones(KEYS, ROWS, dtype=torch.bool).triu(-2).T,
    "repeated": lambda: torch.ones(ROWS, 3, dtype=torch.bool).tril().repeat(1, 3),
    "xor": lambda: torch.ones(ROWS, KEYS, dtype=torch.bool).tril() ^ (keys() == 0) | (keys() == rows()),
    "eye": lambda: torch.eye(KEYS, dtype=torch.bool)[:ROWS],
    "added": lambda: torch.zeros(ROWS, KEYS).masked_fill(keys() > rows() + 1, -math.inf) == 0,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_generated_mask_keeps_what_torch_keeps(mask: Callable[[], Tensor]) -> None:
    """The program of the site, evaluated by the reference, against eager; the mask itself is not captured."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~mask(), -math.inf).softmax(-1) @ v

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4, generator=generator) for n in (ROWS, KEYS, KEYS))
    _, _, report = capture_rewrites(attention, q, k, v)
    assert (report.fused, report.left) == (1, 0)
    assert "c0" not in report.sites[0].program
    out, _ = reference(q, k, v, program=parse(report.sites[0].program))
    torch.testing.assert_close(out, attention(q, k, v), equal_nan=True)
