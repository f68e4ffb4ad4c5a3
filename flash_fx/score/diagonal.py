"""Indices that are affine in q_idx and kv_idx, and those among them that count diagonals: `kv_idx - q_idx + x`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .expr import KV, Const, Expr, Name, Op, Q, captures_in, const, names_in, walk
from .region import bound_value
from .simplify import FOLD, make

ZERO = const(0)
Steps = tuple[int, int, Expr]


def affine(e: Expr) -> Steps | None:
    """(a, b, rest) where the index is a * q_idx + b * kv_idx + rest, rest names neither; None where it is not."""
    if not names_in(e) & {"q_idx", "kv_idx"}:
        return None if captures_in(e) else (0, 0, e)
    if e is Q or e is KV:
        return int(e is Q), int(e is KV), ZERO
    if not isinstance(e, Op) or e.head not in ("add", "sub", "mul", "neg"):
        return None
    parts = [found for a in e.args if (found := affine(a)) is not None]
    if len(parts) < len(e.args):
        return None
    if e.head == "neg":
        return _scaled(parts[0], -1)
    left, right = parts
    if e.head == "mul":
        other, factor = (right, left) if left[:2] == (0, 0) else (left, right)
        known = factor[:2] == (0, 0) and isinstance(factor[2], Const)
        return _scaled(other, int(factor[2].head)) if known else None
    if e.head == "sub":
        right = _scaled(right, -1)
    return left[0] + right[0], left[1] + right[1], make("add", left[2], right[2])


def _scaled(steps: Steps, factor: int) -> Steps:
    return steps[0] * factor, steps[1] * factor, make("mul", steps[2], const(factor))


def diagonal_offset(index: Expr, sizes: Mapping[str, Any]) -> Any:
    """x of the index `kv_idx - q_idx + x`, where x is made of `sizes` (by name; run-time ones too) and numbers; or None."""
    steps = affine(index)
    if steps is None or steps[:2] != (-1, 1) or not all(_is_known(n, sizes) for n in walk(steps[2])):
        return None
    return bound_value(steps[2], sizes)


def _is_known(node: Expr, sizes: Mapping[str, Any]) -> bool:
    if isinstance(node, Name):
        return node.head in sizes
    return type(node.head) is int if isinstance(node, Const) else node.head in FOLD
