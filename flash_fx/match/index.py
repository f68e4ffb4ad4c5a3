"""Integer index arithmetic: through which element of the input does an element of a view come?

Indices and sizes are `Expr`s over coordinates and shape symbols. They are kept as polynomials with integer
coefficients, so that equal indices are the same object and `(b * H + h) // H` becomes `b`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..score.expr import Const, Expr, Op, const, op

Poly = dict[tuple[Expr, ...], int]  # monomial (sorted atoms) -> coefficient
ZERO, ONE = const(0), const(1)


def to_poly(e: Expr) -> Poly:
    if isinstance(e, Const) and not isinstance(e.head, float):
        return {(): int(e.head)} if e.head else {}
    if isinstance(e, Op) and e.head in ("add", "sub"):
        return _add(to_poly(e.args[0]), to_poly(e.args[1]), 1 if e.head == "add" else -1)
    if isinstance(e, Op) and e.head == "neg":
        return _add({}, to_poly(e.args[0]), -1)
    if isinstance(e, Op) and e.head == "mul":
        return _mul(to_poly(e.args[0]), to_poly(e.args[1]))
    return {(e,): 1}


def from_poly(p: Poly) -> Expr:
    """Canonical: positive terms first, constants last."""
    p = _recombined(p)
    terms = sorted(p.items(), key=lambda t: (t[1] < 0, not t[0], [repr(a) for a in t[0]]))
    result: Expr | None = None
    for atoms, coefficient in terms:
        term = _term(atoms, abs(coefficient))
        if result is None:
            result = term if coefficient > 0 else _negative(atoms, term)
        else:
            result = op("add" if coefficient > 0 else "sub", result, term)
    return ZERO if result is None else result


def _recombined(p: Poly) -> Poly:
    """`(x // c) * c + x % c` is `x`."""
    for atoms, coefficient in p.items():
        for a in atoms:
            if isinstance(a, Op) and a.head == "mod":
                x, c = a.args
                rest = _without(atoms, (a,)) or ()
                whole = _mul(_mul({(op("floordiv", x, c),): 1}, to_poly(c)), {rest: coefficient})
                if len(whole) == 1 and all(p.get(k) == v for k, v in whole.items()):
                    left = {k: v for k, v in p.items() if k != atoms and k not in whole}
                    return _recombined(_add(left, _mul(to_poly(x), {rest: coefficient})))
    return p


def _negative(atoms: tuple[Expr, ...], term: Expr) -> Expr:
    return const(-term.head) if isinstance(term, Const) else op("neg", term)


def _term(atoms: tuple[Expr, ...], coefficient: int) -> Expr:
    result: Expr | None = None
    for a in atoms:
        result = a if result is None else op("mul", result, a)
    if result is None:
        return const(coefficient)
    return result if coefficient == 1 else op("mul", result, coefficient)


def _add(x: Poly, y: Poly, sign: int = 1) -> Poly:
    out = dict(x)
    for k, v in y.items():
        out[k] = out.get(k, 0) + sign * v
        if not out[k]:
            del out[k]
    return out


def _mul(x: Poly, y: Poly) -> Poly:
    out: Poly = {}
    for a, u in x.items():
        for b, v in y.items():
            key = tuple(sorted(a + b, key=repr))
            out = _add(out, {key: u * v})
    return out


def add(x: Expr, y: Expr) -> Expr:
    return from_poly(_add(to_poly(x), to_poly(y)))


def sub(x: Expr, y: Expr) -> Expr:
    return from_poly(_add(to_poly(x), to_poly(y), -1))


def mul(x: Expr, y: Expr) -> Expr:
    return from_poly(_mul(to_poly(x), to_poly(y)))


def product(sizes: Sequence[Expr]) -> Expr:
    result: Expr = ONE
    for s in sizes:
        result = mul(result, s)
    return result


def same(x: Expr, y: Expr) -> bool:
    """Provably equal."""
    return x is y or to_poly(x) == to_poly(y)


class Indexer:
    """Index arithmetic that knows the size of every coordinate (`0 <= coordinate < size`) and a hint of every symbol."""

    def __init__(self, sizes: dict[Expr, Expr], hints: dict[Expr, int]) -> None:
        self.sizes, self.hints = sizes, hints

    # *** bounds ***

    def _upper(self, e: Expr) -> Poly | None:
        """An inclusive upper bound without coordinates, None if unknown or possibly negative."""
        total: Poly = {}
        for atoms, coefficient in to_poly(e).items():
            if coefficient < 0:
                return None
            bound: Poly = {(): coefficient}
            for a in atoms:
                atom = self._atom_upper(a)
                if atom is None:
                    return None
                bound = _mul(bound, atom)
            total = _add(total, bound)
        return total

    def _atom_upper(self, a: Expr) -> Poly | None:
        if a in self.sizes:
            return _add(to_poly(self.sizes[a]), {(): -1})
        if a in self.hints:
            return {(a,): 1}
        if isinstance(a, Op) and a.head == "mod" and self._upper(a.args[0]) is not None:
            return _add(to_poly(a.args[1]), {(): -1})
        if isinstance(a, Op) and a.head == "floordiv":
            return self._upper(a.args[0])
        return None

    @staticmethod
    def _nonnegative(p: Poly) -> bool:
        """True if no coefficient is negative once every symbol s >= 1 is written as s' + 1."""
        shifted: Poly = {}
        for atoms, coefficient in p.items():
            term: Poly = {(): coefficient}
            for a in atoms:
                term = _mul(term, {(a,): 1, (): 1})
            shifted = _add(shifted, term)
        return all(v >= 0 for v in shifted.values())

    # *** division ***

    def _split(self, e: Expr, divisor: Expr) -> tuple[Expr, Expr] | None:
        """(quotient, remainder) with `0 <= remainder < divisor` proven."""
        d = to_poly(divisor)
        if len(d) != 1:
            return (ONE, ZERO) if same(e, divisor) else None
        ((d_atoms, d_coefficient),) = d.items()
        if d_coefficient <= 0:
            return None
        quotient: Poly = {}
        rest: Poly = {}
        for atoms, coefficient in to_poly(e).items():
            left = _without(atoms, d_atoms)
            if left is not None and coefficient % d_coefficient == 0:
                quotient = _add(quotient, {left: coefficient // d_coefficient})
            else:
                rest[atoms] = coefficient
        remainder = from_poly(rest)
        top = self._upper(remainder)
        if top is None or not self._nonnegative(_add(_add(d, top, -1), {(): -1})):
            return None
        return from_poly(quotient), remainder

    def floordiv(self, e: Expr, divisor: Expr) -> Expr:
        parts = self._split(e, divisor)
        return op("floordiv", e, divisor) if parts is None else parts[0]

    def mod(self, e: Expr, divisor: Expr) -> Expr:
        parts = self._split(e, divisor)
        return op("mod", e, divisor) if parts is None else parts[1]

    def renormalise(self, e: Expr) -> Expr:
        """Simplify every // and % again after a substitution; polynomials elsewhere."""
        if not isinstance(e, Op):
            return e
        args = [self.renormalise(a) for a in e.args]
        if e.head in ("floordiv", "mod"):
            return getattr(self, e.head)(*args)
        if e.head in ("add", "sub", "mul"):
            return {"add": add, "sub": sub, "mul": mul}[e.head](*args)
        return op(e.head, *args)

    # *** views ***

    def hint(self, e: Expr) -> int:
        total = 0
        for atoms, coefficient in to_poly(e).items():
            for a in atoms:
                coefficient *= self.hints.get(a, 2)
            total += coefficient
        return total

    def view(self, source: Sequence[Expr], target: Sequence[Expr], index: Sequence[Expr]) -> tuple[Expr, ...]:
        """Index into a tensor of shape `source` of the element `index` of its view with shape `target`."""
        out: list[Expr] = [ZERO] * len(source)
        for ins, outs in self.groups(source, target):
            if len(ins) == 1 and len(outs) == 1:
                out[ins[0]] = index[outs[0]]
                continue
            linear: Expr = ZERO
            for o in outs:
                linear = add(mul(linear, target[o]), index[o])
            for i in reversed(ins[1:]):
                out[i] = self.mod(linear, source[i])
                linear = self.floordiv(linear, source[i])
            if ins:
                out[ins[0]] = linear
        return tuple(out)

    def groups(self, source: Sequence[Expr], target: Sequence[Expr]) -> list[tuple[list[int], list[int]]]:
        """Smallest runs of source and target dimensions with equal products; dimensions of size 1 are left out."""
        ins = [i for i, s in enumerate(source) if s is not ONE]
        outs = [i for i, s in enumerate(target) if s is not ONE]
        result = []
        while ins or outs:
            left, right = [ins.pop(0)] if ins else [], [outs.pop(0)] if outs else []
            a, b = product([source[i] for i in left]), product([target[i] for i in right])
            while not same(a, b) and (ins or outs):
                if ins and (not outs or self.hint(a) <= self.hint(b)):
                    left.append(ins.pop(0))
                    a = mul(a, source[left[-1]])
                else:
                    right.append(outs.pop(0))
                    b = mul(b, target[right[-1]])
            result.append((left, right))
        return result


def _without(atoms: tuple[Expr, ...], taken: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    left = list(atoms)
    for t in taken:
        if t not in left:
            return None
        left.remove(t)
    return tuple(left)
