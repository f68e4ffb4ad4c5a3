"""Exact rewrites of expressions: what is smaller and has the same value bit for bit, NaN and -0.0 included.

    simplify(where(~(Q < KV), SCORE * 1.0, NEG_INF))    # where(q_idx >= kv_idx, score, -inf)

Refused on purpose: `x * 0.0`, `x - x`, `~(a < b)` on floats (NaN), `x + 0.0` (turns -0.0 into 0.0), folding of float
constants that float32 would round, and everything that needs to know whether a capture is bool, int or float.
One liberty: a constant factor is moved through a power of two, which is exact unless the score is near overflow.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from functools import lru_cache

from .expr import COMPARISONS, FALSE, TRUE, Const, Expr, Number, Op, captures_in, const, kind_of, op, rebuild, walk

_EXACT_INT = 1 << 24  # every smaller int is a float32
_INT_LIMIT = 1 << 62  # fold only what cannot wrap in int64


def simplify(root: Expr) -> Expr:
    """The same value by fewer operations. Takes and gives any expression."""
    done: dict[int, Expr] = {}
    for node in walk(root):
        args = tuple(done[id(a)] for a in node.args)
        done[id(node)] = make(node.head, *args) if isinstance(node, Op) else rebuild(node, args)
    return done[id(root)]


def make(operation: str, *args: Expr) -> Expr:
    """`op(operation, *args)`, simplified at the top; the arguments are simple already."""
    values = [a.head for a in args if isinstance(a, Const)]
    if len(values) == len(args) and (folded := _fold(operation, values)) is not None:
        return const(folded)
    rule = RULES.get(operation)
    found = rule(*args) if rule is not None else None
    return op(operation, *args) if found is None else found


@lru_cache(maxsize=4096)
def known_kind(node: Expr) -> str | None:
    """ "bool", "int" or "float" where it is the same whatever the captures are, else None."""
    captures = captures_in(node)
    # kinds only grow from bool over int to float with their arguments: two equal extremes decide
    lowest = kind_of(node, ("bool",) * (captures[-1] + 1 if captures else 0))
    return lowest if lowest == kind_of(node) else None


# *** constants ***


def is_float32(value: float) -> bool:
    """Whether float32 holds the number exactly; False for inf and nan."""
    try:
        return math.isfinite(value) and struct.unpack("f", struct.pack("f", value))[0] == value
    except OverflowError:
        return False


def _xor(a: Number, b: Number) -> Number:
    return operator.xor(a, b)  # type: ignore[arg-type]


FOLD: dict[str, Callable[..., Number]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "and": operator.and_, "or": operator.or_, "xor": _xor,
    "neg": operator.neg, "not": lambda a: (not a) if isinstance(a, bool) else ~a,
    "minimum": min, "maximum": max, "abs": abs,
    "float": float, "int": int, "bool": bool,
}  # fmt: skip
_FOLD_INT_ONLY = frozenset({"floordiv", "mod", "and", "or", "xor", "not", "minimum", "maximum", "abs"})


def _fold(operation: str, values: list[Number]) -> Number | None:
    """The constant result, None where float32 would round or torch and Python may differ."""
    function = FOLD.get(operation)
    has_float = any(isinstance(v, float) for v in values)
    if function is None or (has_float and (operation in _FOLD_INT_ONLY or not all(_exact(v) for v in values))):
        return None
    if operation in ("floordiv", "mod", "div") and values[1] == 0:
        return None
    if operation in ("minimum", "maximum", "abs") and any(isinstance(v, bool) for v in values):
        return None
    result = function(*values)
    if isinstance(result, float):
        # the sign of a zero that comes out of nonzero numbers is not worth a proof
        exact = all(_exact(v) for v in values) and is_float32(result)
        return result if exact and (result != 0 or 0 in values) else None
    return result if abs(result) < _INT_LIMIT else None


def _exact(value: Number) -> bool:
    return is_float32(value) if isinstance(value, float) else abs(value) < _EXACT_INT


def _is(node: Expr, value: Number) -> bool:
    """Whether the node is this constant, type and sign of zero included."""
    return node is const(value)


# *** rules: op -> function of the arguments that gives the simpler expression or None ***


def _add(a: Expr, b: Expr) -> Expr | None:
    for x, c in ((a, b), (b, a)):
        if _is(c, 0) and known_kind(x) == "int":
            return x
        if _is(c, -0.0) and known_kind(x) == "float":
            return x
    return _add_constants(a, b)


def _add_constants(a: Expr, b: Expr) -> Expr | None:
    """(x + 1) + 2 -> x + 3 and (x - 1) + 2 -> x + 1 for ints."""
    if isinstance(b, Const) and type(b.head) is int and isinstance(a, Op) and a.head in ("add", "sub"):
        x, c = a.args
        if isinstance(c, Const) and type(c.head) is int and known_kind(x) == "int":
            total = b.head + (c.head if a.head == "add" else -c.head)
            return make("add", x, const(total)) if abs(total) < _INT_LIMIT else None
    return None


def _sub(a: Expr, b: Expr) -> Expr | None:
    kind = known_kind(a)
    if (_is(b, 0) and kind in ("int", "float")) or (_is(b, 0.0) and kind == "float"):
        return a
    if a is b and kind == "int":
        return const(0)
    if isinstance(b, Const) and type(b.head) is int and kind == "int":
        return _add_constants(a, const(-b.head))
    return None


def _mul(a: Expr, b: Expr) -> Expr | None:
    for x, c in ((a, b), (b, a)):
        kind = known_kind(x)
        if _is(c, 1) and kind in ("int", "float"):
            return x
        if _is(c, 1.0):
            return make("float", x)
        if _is(c, 0) and kind == "int":
            return const(0)
    return _mul_constants(a, b) or _mul_constants(b, a)


def _mul_constants(c: Expr, product: Expr) -> Expr | None:
    """2.0 * (x * 3.0) -> x * 6.0 where one factor is a power of two, so that the rounding is the same."""
    if not (isinstance(c, Const) and type(c.head) is float and isinstance(product, Op) and product.head == "mul"):
        return None
    for x, k in (product.args, product.args[::-1]):
        if isinstance(k, Const) and type(k.head) is float and known_kind(x) == "float":
            total = k.head * c.head
            exact = is_float32(total) and is_float32(k.head) and is_float32(c.head)
            if exact and total != 0 and (_is_power_of_two(k.head) or _is_power_of_two(c.head)):
                return make("mul", x, const(total))
    return None


def _is_power_of_two(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5 and 2.0**-32 <= abs(value) <= 2.0**32


def _div(a: Expr, b: Expr) -> Expr | None:
    return make("float", a) if _is(b, 1.0) or _is(b, 1) else None


def _floordiv(a: Expr, b: Expr) -> Expr | None:
    return a if _is(b, 1) and known_kind(a) == "int" else None


def _mod(a: Expr, b: Expr) -> Expr | None:
    return const(0) if _is(b, 1) and known_kind(a) == "int" else None


def _pow(a: Expr, b: Expr) -> Expr | None:
    kind = known_kind(a)
    return a if (_is(b, 1) and kind in ("int", "float")) or (_is(b, 1.0) and kind == "float") else None


def _neg(a: Expr) -> Expr | None:
    if isinstance(a, Const) and isinstance(a.head, float):
        return const(-a.head)  # exact for every float
    if isinstance(a, Op) and a.head == "neg" and known_kind(a.args[0]) in ("int", "float"):
        return a.args[0]
    return None


_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _not(a: Expr) -> Expr | None:
    if not isinstance(a, Op):
        return None
    if a.head == "not":
        return a.args[0]
    # == and != are opposite for NaN too
    if a.head in ("eq", "ne") or (a.head in COMPARISONS and all(known_kind(x) in ("bool", "int") for x in a.args)):
        return make(_OPPOSITE[a.head], *a.args)
    return None


def _and(a: Expr, b: Expr) -> Expr | None:
    return _lattice(a, b, neutral=TRUE, absorbing=FALSE)


def _or(a: Expr, b: Expr) -> Expr | None:
    return _lattice(a, b, neutral=FALSE, absorbing=TRUE)


def _lattice(a: Expr, b: Expr, *, neutral: Expr, absorbing: Expr) -> Expr | None:
    if a is b:
        return a
    for x, c in ((a, b), (b, a)):
        if c in (neutral, absorbing) and known_kind(x) == "bool":
            return x if c is neutral else absorbing
    return None


def _xor_rule(a: Expr, b: Expr) -> Expr | None:
    for x, c in ((a, b), (b, a)):
        if c in (TRUE, FALSE) and known_kind(x) == "bool":
            return x if c is FALSE else make("not", x)
    return FALSE if a is b and known_kind(a) == "bool" else None


def _where(condition: Expr, then: Expr, other: Expr) -> Expr | None:
    if then is other:
        return then
    if condition in (TRUE, FALSE):
        taken, left = (then, other) if condition is TRUE else (other, then)
        return _as_kind_of_both(taken, left)
    if known_kind(condition) != "bool":
        return None
    if then is TRUE and other is FALSE:
        return condition
    if then is FALSE and other is TRUE:
        return make("not", condition)
    if isinstance(condition, Op) and condition.head == "not":
        return make("where", condition.args[0], other, then)
    return None


def _as_kind_of_both(taken: Expr, left: Expr) -> Expr | None:
    """The taken branch in the kind that `where` promotes to, None where that is not known."""
    kind, other = known_kind(taken), known_kind(left)
    if kind == "float" or (kind is not None and kind == other) or (kind, other) == ("int", "bool"):
        return taken
    return make("float", taken) if other == "float" else None


def _same(a: Expr, b: Expr) -> Expr | None:
    return a if a is b else None


def _compare_same(result: bool) -> Callable[[Expr, Expr], Expr | None]:
    return lambda a, b: const(result) if a is b and known_kind(a) in ("bool", "int") else None


def _cast(kind: str) -> Callable[[Expr], Expr | None]:
    def rule(a: Expr) -> Expr | None:
        if known_kind(a) == kind:
            return a
        # float(float(load)): the kind of a load is not known, that of its cast is
        return a if isinstance(a, Op) and a.head == kind else None

    return rule


def _integral(a: Expr) -> Expr | None:
    return a if known_kind(a) == "int" else None


def _isnan(a: Expr) -> Expr | None:
    return FALSE if known_kind(a) in ("bool", "int") else None


RULES: dict[str, Callable[..., Expr | None]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "floordiv": _floordiv, "mod": _mod, "pow": _pow,
    "neg": _neg, "not": _not, "and": _and, "or": _or, "xor": _xor_rule, "where": _where,
    "minimum": _same, "maximum": _same,
    "lt": _compare_same(False), "gt": _compare_same(False), "ne": _compare_same(False),
    "le": _compare_same(True), "ge": _compare_same(True), "eq": _compare_same(True),
    "float": _cast("float"), "int": _cast("int"), "bool": _cast("bool"),
    "floor": _integral, "ceil": _integral, "round": _integral, "trunc": _integral, "isnan": _isnan,
}  # fmt: skip
