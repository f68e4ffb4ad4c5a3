"""Query, key and value as views: from a twin node and the index of each of its dimensions to `[B, H, L, D]`.

An index is legal if it is a position of one axis (`h`), of a group of heads (`h // 4`), of two folded axes
(`b * 8 + h`), shifted (`m + 3`), every other
one (`2 * h + 1`) or fixed. Then `select`, `slice`, `view`, `permute`, `expand` reach it without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..score.expr import Const, Expr, Op, name, walk
from . import index as ix
from .site import Operand

aten = torch.ops.aten
B, H = name("$b"), name("$h")


@dataclass
class _Axis:
    """One dimension of the source: which letters it holds, with their sizes."""

    letters: list[str]
    sizes: list[Expr]


def as_operand(
    node: torch.fx.Node, shape: list[Expr], index: list[Expr], letters: dict[Expr, str], sizes: dict[str, Expr]
) -> tuple[Operand, Expr] | None:
    """The operand and its number of heads, or None where views cannot reach it.

    `letters` maps coordinates to "b", "h", "l", "d"; `sizes` gives each letter's size.
    """
    steps: list = []
    axes: list[_Axis] = []
    digits = _batch_digits(shape, index, sizes)
    adopted = _adopt_ones(shape, index, letters)
    for position, (size, i) in enumerate(zip(shape, index, strict=True)):
        if position in digits:
            axes.append(_Axis([f"b{digits.index(position)}"], [size]))
            continue
        if position in adopted:
            axes.append(_Axis([adopted[position]], [ix.ONE]))
            continue
        axis = _axis(len(axes), size, i, letters, sizes, steps)
        if axis is None:
            return None
        axes.extend(axis)
    order = [letter for a in axes for letter in a.letters]
    if len(set(order)) != len(order):
        return None
    heads = next((s for a in axes for letter, s in zip(a.letters, a.sizes, strict=True) if letter == "h"), ix.ONE)
    if any(len(a.letters) > 1 for a in axes):
        steps.append((aten.view.default, (tuple(s for a in axes for s in a.sizes),)))
    have = {letter: size for a in axes for letter, size in zip(a.letters, a.sizes, strict=True)}
    _arrange(order, have, sizes, steps)
    return Operand(node, tuple(steps)), heads


def _adopt_ones(shape: list[Expr], index: list[Expr], letters: dict[Expr, str]) -> dict[int, str]:
    """Dimensions of size 1 stand for the batch or the head, in this order, where no other dimension does."""
    used = {letters[n] for i in index for n in walk(i) if n in letters}
    missing = [letter for letter in "bh" if letter not in used]
    ones = [p for p, (size, i) in enumerate(zip(shape, index, strict=True)) if size is ix.ONE and isinstance(i, Const)]
    return dict(zip(ones, missing, strict=False))


def _batch_digits(shape: list[Expr], index: list[Expr], sizes: dict[str, Expr]) -> list[int]:
    """Dimensions that together count the batch, most significant first: `b // 6`, `b // 3 % 2`, `b % 3`."""
    found = []
    for position, (size, i) in enumerate(zip(shape, index, strict=True)):
        divisor = _digit_divisor(i, size)
        if divisor is not None:
            found.append((position, divisor, size))
    found.sort(key=lambda f: -ix.Indexer({}, {}).hint(f[1]))
    below: Expr = ix.ONE
    for _, divisor, size in reversed(found):
        if not ix.same(divisor, below):
            return []
        below = ix.mul(below, size)
    return [f[0] for f in found] if len(found) > 1 and ix.same(below, sizes["b"]) else []


def _digit_divisor(i: Expr, size: Expr) -> Expr | None:
    if not isinstance(i, Op) or i.head not in ("floordiv", "mod"):
        return None
    x, c = i.args
    if i.head == "floordiv":
        return c if x is B else None
    if not ix.same(c, size):
        return None
    if x is B:
        return ix.ONE
    return x.args[1] if isinstance(x, Op) and x.head == "floordiv" and x.args[0] is B else None


def _axis(at: int, size: Expr, i: Expr, letters: dict, sizes: dict, steps: list) -> list[_Axis] | None:
    """The axes this dimension becomes (none where it is selected away)."""
    if isinstance(i, Const):
        steps.append((aten.squeeze.dim, (at,)) if size is ix.ONE else (aten.select.int, (at, i)))
        return []
    if i in letters:
        letter = letters[i]
        return (
            [_Axis([letter], [size])] if ix.same(size, sizes[letter]) else _shifted(at, size, i, letters, sizes, steps)
        )
    if _is_group(i, size, sizes):
        return [_Axis(["h"], [size])]
    folded = _folded(size, i, sizes)
    return folded if folded is not None else _shifted(at, size, i, letters, sizes, steps)


def _is_group(i: Expr, size: Expr, sizes: dict) -> bool:
    """`h // G` with G * size == H."""
    return (
        isinstance(i, Op) and i.head == "floordiv" and i.args[0] is H and ix.same(ix.mul(i.args[1], size), sizes["h"])
    )


def _folded(size: Expr, i: Expr, sizes: dict) -> list[_Axis] | None:
    """`b * Hk + (h or h // G)` over a dimension of size B * Hk."""
    for term, heads in _head_terms(i, sizes):
        if ix.same(ix.sub(i, term), ix.mul(B, heads)) and ix.same(size, ix.mul(sizes["b"], heads)):
            return [_Axis(["b", "h"], [sizes["b"], heads])]
    return None


def _head_terms(i: Expr, sizes: dict) -> list[tuple[Expr, Expr]]:
    terms: list[tuple[Expr, Expr]] = [(H, sizes["h"])]
    for atoms in ix.to_poly(i):
        for a in atoms:
            if isinstance(a, Op) and a.head == "floordiv" and a.args[0] is H:
                quotient = ix.Indexer({}, {})._split(sizes["h"], a.args[1])
                if quotient is not None and quotient[1] is ix.ZERO:
                    terms.append((a, quotient[0]))
    return terms


def _shifted(at: int, size: Expr, i: Expr, letters: dict, sizes: dict, steps: list) -> list[_Axis] | None:
    """`m + start`, or `2 * h + start`: a slice."""
    for coordinate, letter in letters.items():
        step = ix.to_poly(i).get((coordinate,), 0)
        start = ix.sub(i, ix.mul(coordinate, ix.const(step)))
        if step > 0 and not any(n in letters for n in walk(start)):
            taken = ix.add(ix.mul(ix.sub(sizes[letter], ix.ONE), ix.const(step)), ix.ONE)
            stop = (ix.add(start, taken), step) if step > 1 else (ix.add(start, sizes[letter]),)
            steps.append((aten.slice.Tensor, (at, start, *stop)))
            return [_Axis([letter], [sizes[letter]])]
    return None


def _arrange(order: list[str], have: dict[str, Expr], wanted: dict[str, Expr], steps: list) -> None:
    """Permute to b, h, l, d; digits of the batch are merged, missing axes inserted, all but the heads expanded."""
    digits = sorted(letter for letter in order if letter[0] == "b" and letter != "b")
    present = digits + [letter for letter in "bhld" if letter in order]
    permutation = tuple(order.index(letter) for letter in present)
    if permutation != tuple(range(len(order))):
        steps.append((aten.permute.default, (permutation,)))
    if digits:
        order = ["b", *present[len(digits) :]]
        have = {**have, "b": wanted["b"]}
        steps.append((aten.reshape.default, (tuple(have[letter] for letter in order),)))
    for position, letter in enumerate("bhld"):
        if letter not in order:
            steps.append((aten.unsqueeze.default, (position,)))
    short = {letter for letter in "bld" if have.get(letter, ix.ONE) is ix.ONE and wanted[letter] is not ix.ONE}
    if short:
        shape = tuple(wanted[letter] if letter in short else ix.const(-1) for letter in "bhld")
        steps.append((aten.expand.default, (shape,)))
