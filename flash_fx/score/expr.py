"""Expressions and programs of the score language.

An expression is an immutable tree (shared as a DAG) of constants, names, loads of captured tensors and pointwise
operations. Equal expressions are the same object, so `==` and hashing cost nothing and sharing is visible.

    Program(score=Name("score") * 0.125, keep=Name("kv_idx") <= Name("q_idx"))

is causal attention with scale 1/8. Comparison operators build expressions, so compare expressions with `is`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

Number = bool | int | float

INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")  # int, position of the element
LENGTH_NAMES = ("q_len", "kv_len")  # int, run-time lengths M and N of the attention
SCORE_NAME = "score"  # float, the raw dot product q . k
NAMES = (SCORE_NAME, *INDEX_NAMES, *LENGTH_NAMES)  # besides these, s0, s1, ... are run-time sizes (int)

# op -> arity. The first group prints as Python operators, the second as calls.
OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
PREFIX = {"neg": "-", "not": "~"}
CALLS = {
    "where": 3, "minimum": 2, "maximum": 2, "pow": 2,
    "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log1p": 1, "sqrt": 1, "rsqrt": 1,
    "tanh": 1, "sigmoid": 1, "erf": 1, "sin": 1, "cos": 1, "abs": 1, "sign": 1,
    "floor": 1, "ceil": 1, "round": 1, "trunc": 1, "isnan": 1,
    "float": 1, "int": 1, "bool": 1,
}  # fmt: skip
ARITY = {**dict.fromkeys(OPERATORS, 2), **dict.fromkeys(PREFIX, 1), **CALLS}
BOOL_RESULT = COMPARISONS | {"isnan", "bool"}
FLOAT_RESULT = frozenset(
    {
        "div",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sqrt",
        "rsqrt",
        "tanh",
        "sigmoid",
        "erf",
        "sin",
        "cos",
        "float",
    }
)

_INTERNED: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()


class Expr:
    """Base class. Build with `const`, `name`, `load`, `op`, or Python operators on expressions."""

    __slots__ = ("__weakref__", "args", "head")
    head: Any  # Const: the value; Name: the name; Load: the capture's number; Op: the operation
    args: tuple[Expr, ...]

    def __new__(cls, head: Any, args: tuple[Expr, ...] = ()) -> Expr:
        key = (cls, type(head), repr(head) if isinstance(head, float) else head, args)
        found = _INTERNED.get(key)
        if found is None:
            found = object.__new__(cls)
            found.head, found.args = head, args
            _INTERNED[key] = found
        return found

    def __reduce__(self) -> tuple:
        return type(self), (self.head, self.args)

    def __repr__(self) -> str:
        from .text import format_expr

        return format_expr(self)

    def __add__(self, other: Expr | Number) -> Expr:
        return op("add", self, other)

    def __radd__(self, other: Number) -> Expr:
        return op("add", other, self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return op("sub", self, other)

    def __rsub__(self, other: Number) -> Expr:
        return op("sub", other, self)

    def __mul__(self, other: Expr | Number) -> Expr:
        return op("mul", self, other)

    def __rmul__(self, other: Number) -> Expr:
        return op("mul", other, self)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return op("div", self, other)

    def __floordiv__(self, other: Expr | Number) -> Expr:
        return op("floordiv", self, other)

    def __mod__(self, other: Expr | Number) -> Expr:
        return op("mod", self, other)

    def __and__(self, other: Expr | Number) -> Expr:
        return op("and", self, other)

    def __or__(self, other: Expr | Number) -> Expr:
        return op("or", self, other)

    def __lt__(self, other: Expr | Number) -> Expr:
        return op("lt", self, other)

    def __le__(self, other: Expr | Number) -> Expr:
        return op("le", self, other)

    def __gt__(self, other: Expr | Number) -> Expr:
        return op("gt", self, other)

    def __ge__(self, other: Expr | Number) -> Expr:
        return op("ge", self, other)

    def __neg__(self) -> Expr:
        return op("neg", self)

    def __invert__(self) -> Expr:
        return op("not", self)


class Const(Expr):
    """A bool, int or float literal (float includes inf and nan)."""

    __slots__ = ()


class Name(Expr):
    """`score`, an index, a length, or a run-time size `s0`, `s1`, ..."""

    __slots__ = ()


class Load(Expr):
    """`c3[b, kv_idx]`: one element of capture 3; one index expression per dimension of the tensor."""

    __slots__ = ()


class Op(Expr):
    """A pointwise operation of `ARITY`."""

    __slots__ = ()


def const(value: Number) -> Const:
    return Const(value)  # type: ignore[return-value]


def name(text: str) -> Name:
    return Name(text)  # type: ignore[return-value]


def load(capture: int, *index: Expr | int) -> Load:
    return Load(capture, tuple(_lift(i) for i in index))  # type: ignore[return-value]


def op(operation: str, *args: Expr | Number) -> Expr:
    assert ARITY.get(operation) == len(args), f"{operation} takes {ARITY.get(operation)} arguments, got {len(args)}"
    return Op(operation, tuple(_lift(a) for a in args))


def where(condition: Expr, then: Expr | Number, other: Expr | Number) -> Expr:
    return op("where", condition, then, other)


def _lift(value: Expr | Number) -> Expr:
    return value if isinstance(value, Expr) else const(value)


SCORE, B, H, Q, KV, Q_LEN, KV_LEN = map(name, NAMES)
TRUE, FALSE = const(True), const(False)
NEG_INF = const(-math.inf)


@dataclass(frozen=True, eq=True)
class Program:
    """What happens to one raw score `q . k` on its way to weighting one value row.

    With `s = score(q . k)` where `keep` holds and -inf elsewhere, the weight of a value row is

        weight * dropout(exp(s) / (exp(sink) + sum over kept kv_idx of exp(s)))

    `score`   float, the new score, computed in float32 (float64 for float64 operands)
    `keep`    bool, the weight is exactly 0 where false; None keeps everything
    `sink`    float over b, h, q_idx: one more term of the denominator that has no value row; None is no term
    `weight`  float factor after the softmax, not renormalised; None is 1
    `drop`    dropout probability on the weights in [0, 1), inverted scaling; None is no dropout
    `empty`   what a row without any kept key gives: 0.0 behind a NaN guard, nan where no sink saves it (a maximum of
              -inf was subtracted from it); None is what the formula gives, 0 beside a sink and NaN without one
    """

    score: Expr = SCORE
    keep: Expr | None = None
    sink: Expr | None = None
    weight: Expr | None = None
    drop: float | None = None
    empty: float | None = None

    def __post_init__(self) -> None:
        if self.empty is not None and math.isnan(self.empty):
            object.__setattr__(self, "empty", math.nan)  # one object, so that programs compare equal

    @property
    def guarded(self) -> bool:
        """Whether a row without a key gives 0 for a guard's sake."""
        return self.empty == 0.0

    @property
    def unsaved(self) -> bool:
        """Whether a row without a key is NaN in spite of a sink."""
        return self.sink is not None and self.empty is math.nan

    def __str__(self) -> str:
        from .text import format_program

        return format_program(self)

    def parts(self) -> Iterator[tuple[str, Expr]]:
        """The expressions that are present, in the order they print."""
        for field in ("score", "keep", "sink", "weight"):
            value = getattr(self, field)
            if value is not None:
                yield field, value

    def map(self, change: Callable[[Expr], Expr]) -> Program:
        """The program with every expression changed."""
        return replace(self, **{part: change(e) for part, e in self.parts()})  # type: ignore[arg-type]

    def loads(self) -> tuple[Load, ...]:
        """The distinct places where captures are read, in the order of evaluation."""
        return tuple(n for n in walk(*(e for _, e in self.parts())) if isinstance(n, Load))


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below the roots, arguments before their users."""
    seen: set[int] = set()
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same node over other arguments."""
    return node if args == node.args else type(node)(node.head, args)


def substitute(root: Expr, table: dict[Expr, Expr]) -> Expr:
    """Replace every occurrence of the table's keys, without entering the replacements."""
    done: dict[int, Expr] = {}
    for node in walk(root):
        new = table.get(node)
        done[id(node)] = new if new is not None else rebuild(node, tuple(done[id(a)] for a in node.args))
    return done[id(root)]


def map_loads(root: Expr, change: Callable[[Load], Expr]) -> Expr:
    """The expression with every load, its index mapped already, replaced by `change` of it."""
    done: dict[int, Expr] = {}
    for node in walk(root):
        new = rebuild(node, tuple(done[id(a)] for a in node.args))
        done[id(node)] = change(new) if isinstance(new, Load) else new
    return done[id(root)]


def names_in(*roots: Expr) -> frozenset[str]:
    return frozenset(n.head for n in walk(*roots) if isinstance(n, Name))


def captures_in(*roots: Expr) -> tuple[int, ...]:
    """Numbers of the captured tensors read below the roots, ascending."""
    return tuple(sorted({n.head for n in walk(*roots) if isinstance(n, Load)}))


def kind_of(root: Expr, capture_kinds: tuple[str, ...] = ()) -> str:
    """ "bool", "int" or "float". `capture_kinds` gives the kind of each capture; a missing one counts as float."""
    kinds: dict[int, str] = {}
    for node in walk(root):
        kinds[id(node)] = _kind(node, [kinds[id(a)] for a in node.args], capture_kinds)
    return kinds[id(root)]


def _kind(node: Expr, args: list[str], capture_kinds: tuple[str, ...]) -> str:
    if isinstance(node, Const):
        return type(node.head).__name__
    if isinstance(node, Name):
        return "float" if node.head == SCORE_NAME else "int"
    if isinstance(node, Load):
        return capture_kinds[node.head] if node.head < len(capture_kinds) else "float"
    if node.head in BOOL_RESULT:
        return "bool"
    if node.head in FLOAT_RESULT:
        return "float"
    if node.head == "int":
        return "int"
    if node.head == "where":
        args = args[1:]
    if node.head in ("and", "or", "xor", "not"):
        return "bool" if all(k == "bool" for k in args) else "int"
    if "float" in args:
        return "float"
    arithmetic = node.head in OPERATORS or node.head == "neg"
    return "int" if "int" in args or arithmetic else "bool"
