"""Conversions of indices taken apart: `float(kv_idx - q_idx)` is `float(kv_idx) - float(q_idx)`.

An integer becomes a float in the unit that also computes exp, one in every eight cycles of an ordinary operation: of
ALiBi's distances that is a second exp for each score. Apart, one conversion serves a whole row or column of a tile.
Exact, because float32 holds every integer below 2^24 and only such are met on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from .expr import Const, Expr, Name, Op, Program, const, names_in, op, rebuild, walk

_EXACT = 1 << 24
_LINEAR = frozenset({"add", "sub", "neg", "mul", "abs", "minimum", "maximum"})


def apart(program: Program, lengths: Mapping[str, int]) -> Program:
    """The same program with floats of q_idx and of kv_idx alone, as far as `lengths` (by name: q_len, s0, ...) prove it."""
    return _apart(program, tuple(sorted(lengths.items())))


@lru_cache(maxsize=512)
def _apart(program: Program, lengths: tuple[tuple[str, int], ...]) -> Program:
    known = dict(lengths)
    changed = program.map(lambda e: _rewritten(e, known))
    return replace(changed, keep=program.keep)  # whose bounds are integers


def _rewritten(root: Expr, lengths: Mapping[str, int]) -> Expr:
    done: dict[int, Expr] = {}
    for node in walk(root):
        found = None
        if isinstance(node, Op) and node.head == "float" and _spans_tile(node):
            found = _converted(node.args[0], lengths)
        done[id(node)] = rebuild(node, tuple(done[id(a)] for a in node.args)) if found is None else found
    return done[id(root)]


def _spans_tile(e: Expr) -> bool:
    return names_in(e) >= {"q_idx", "kv_idx"}


def _converted(e: Expr, lengths: Mapping[str, int]) -> Expr | None:
    """float(e) from floats of what does not span the tile; None where a number on the way may not be exact."""
    if isinstance(e, Const):
        return const(float(e.head))
    if not _spans_tile(e):
        return op("float", e) if _largest(e, lengths) < _EXACT else None
    if e.head not in _LINEAR or _largest(e, lengths) >= _EXACT:
        return None
    parts = [found for a in e.args if (found := _converted(a, lengths)) is not None]
    if len(parts) < len(e.args):
        return None
    # an integer has no -0.0
    if e.head == "neg":
        return const(0.0) - parts[0]
    return op(e.head, *parts) + 0.0 if e.head == "mul" else op(e.head, *parts)


def _largest(e: Expr, lengths: Mapping[str, int]) -> int:
    """No value of the integer is larger in size; `_EXACT` where that is not known."""
    if isinstance(e, Const) and type(e.head) is int:
        return abs(e.head)
    if isinstance(e, Name):
        length = {"q_idx": "q_len", "kv_idx": "kv_len"}.get(e.head, e.head)
        return abs(lengths.get(length, _EXACT))
    if not isinstance(e, Op) or e.head not in _LINEAR:
        return _EXACT
    sizes = [_largest(a, lengths) for a in e.args]
    if e.head == "mul":
        return sizes[0] * sizes[1]
    return sum(sizes) if e.head in ("add", "sub") else max(sizes)
