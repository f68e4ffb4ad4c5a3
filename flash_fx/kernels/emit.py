"""Score expressions as Triton statements. The only file that joins kernel text.

    Emitter(spec, place).value(parse("score = tanh(score * 0.1) * 10.0").score)

appends assignments `t0 = ...` to `.lines` and returns the text of the value. An expression is emitted once per scope:
what does not change in a loop goes before it (`hoist`), and equal expressions are the same object anyway.

Everything is scalar or broadcastable to the score tile; floats are float32, indices int32, offsets into captures int64
where they come from a position. Only operations that the interpreter also has are used: no libdevice, no inline asm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from ..score.diagonal import ZERO, affine
from ..score.expr import KV, Const, Expr, Load, Name, Op, Q, kind_of, names_in
from ..score.region import Region
from ..score.simplify import FOLD
from .facts import LOG2E
from .spec import KernelSpec

LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Place:
    """Where in a kernel an expression is evaluated: what the names are called there.

    `q`, `kv` are index tiles like `offs_m[:, None]`; `q_first + q_local` and `kv_first + kv_local` are the same split
    into a scalar and a small tile, so that only the scalar needs int64. A mask is empty where every index is in range.
    """

    score: str = ""
    q: str = ""
    q_first: str = ""
    q_local: str = ""
    q_mask: str = ""
    kv: str = ""
    kv_first: str = ""
    kv_local: str = ""
    kv_mask: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    def name(self, name: str) -> str:
        table = {"score": self.score, "q_idx": self.q, "kv_idx": self.kv, "b": "off_b", "h": "off_h"}
        text = {**table, "q_len": "M", "kv_len": "N", **self.extra}.get(name, name.upper())  # s0 -> S0
        assert text, f"{name} has no value here"
        return text


def literal(value: bool | int | float, kind: str) -> str:
    """A Python literal of the kind; floats beyond float32 become infinite, as they would in torch."""
    if kind == "bool":
        return repr(bool(value))
    if kind == "int":
        return repr(int(value))
    value = float(value)
    if math.isnan(value):
        return 'float("nan")'
    if abs(value) > 3.4028235677973366e38:
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(value)


class Emitter:
    """Emits expressions at one place. A nested scope starts from what its parent has already computed."""

    def __init__(self, spec: KernelSpec, place: Place, parent: Emitter | None = None) -> None:
        self.spec, self.place = spec, place
        self.lines: list[str] = []
        self.done: dict[tuple[Expr, str], str] = dict(parent.done) if parent else {}
        self.numbers: Iterator[int] = parent.numbers if parent else count()
        self.precise = spec.dtype == "float32"  # 16-bit operands do not see the last bits of a score

    def take(self) -> list[str]:
        """The lines emitted since the last call."""
        lines, self.lines = self.lines, []
        return lines

    # *** values ***

    def value(self, e: Expr, kind: str | None = None) -> str:
        """Text of the value, a name or a literal, converted to `kind` ("bool", "int", "float") if given."""
        own = kind_of(e, self.spec.capture_kinds)
        kind = own if kind is None else kind
        if isinstance(e, Const):
            return literal(e.head, kind)
        found = self.done.get((e, kind))
        if found is None:
            found = self._own(e) if kind == own else self._convert(self.value(e), own, kind)
            self.done[e, kind] = found
        return found

    def hoist(self, roots: Iterable[Expr], varying: frozenset[str]) -> None:
        """Emits every largest subexpression that names nothing of `varying`."""
        for e in roots:
            if isinstance(e, (Const, Name)):
                continue
            if names_in(e) & varying:
                self.hoist(e.args, varying)
            else:
                self.value(e)

    def _convert(self, text: str, own: str, kind: str) -> str:
        if kind == "bool":
            return self.let(f"{text} != 0")
        return self.let(f"tl.cast({text}, {'tl.float32' if kind == 'float' else 'tl.int32'})")

    def _own(self, e: Expr) -> str:
        if isinstance(e, Name):
            return self.place.name(e.head)
        if isinstance(e, Load):
            return self._load(e)
        return self._op(e)  # type: ignore[arg-type]

    def let(self, text: str) -> str:
        """A new name for the text of an expression."""
        name = f"t{next(self.numbers)}"
        self.lines.append(f"{name} = {text}")
        return name

    # *** captured loads ***

    def _load(self, e: Load) -> str:
        fact = self.spec.captures[e.head]
        scalars, tiles = [f"C{e.head}"], []
        for dim, index in enumerate(e.args):
            stride = f"stride_c{e.head}_{dim}"
            scalar, tile = self._offset(index)
            scalars += [f"tl.cast({scalar}, tl.int64) * {stride}"] if scalar else []
            tiles += [f"{tile} * {stride}"] if tile else []
        # a tile of int32 offsets, added last: int64 pointers to it would take twice the registers of the loop
        if len(tiles) > 1:
            tiles = [f"({' + '.join(tiles)})"]
        text = self.let(f"tl.load({' + '.join(scalars + tiles)}{self._guard(e)})")
        if fact.kind == "bool":
            return self.let(f"{text} != 0")
        if fact.kind == "float":
            return text if fact.dtype == "float32" else self.let(f"{text}.to(tl.float32)")
        return text if fact.dtype in ("int32", "int64") else self.let(f"{text}.to(tl.int32)")

    def _offset(self, index: Expr) -> tuple[str, str]:
        """An index as a scalar (to be widened) plus a tile, either may be empty."""
        if isinstance(index, Const):
            return (literal(index.head, "int"), "") if index.head else ("", "")
        if index is Q:
            return self.place.q_first, self.place.q_local
        if index is KV:
            return self.place.kv_first, self.place.kv_local
        steps = affine(index) if self._reads_tile(index) else None
        if steps is not None:
            return self._affine_offset(*steps)
        text = self.value(index, "int")
        if self._reads_tile(index):
            return "", f"{text}.to(tl.int64)"
        return text, ""

    def _affine_offset(self, rows: int, keys: int, rest: Expr) -> tuple[str, str]:
        """A diagonal is a matrix with strides of its own."""
        axes = ((rows, self.place.q_first, self.place.q_local), (keys, self.place.kv_first, self.place.kv_local))
        scalars = [f"{first} * {step}" for step, first, _ in axes if step and first]
        tiles = [f"{local} * {step}" for step, _, local in axes if step and local]
        if rest is not ZERO:
            scalars.append(self.value(rest, "int"))
        return f"({' + '.join(scalars)})", f"({' + '.join(tiles)})" if tiles else ""

    def _reads_tile(self, e: Expr) -> bool:
        return bool(names_in(e) & {"q_idx", "kv_idx", "score"})

    def _guard(self, e: Expr) -> str:
        """Positions beyond M or N must not be read: whatever the index makes of them."""
        names = names_in(e)
        masks = [self.place.q_mask if "q_idx" in names else "", self.place.kv_mask if "kv_idx" in names else ""]
        text = " & ".join(m for m in masks if m)
        return f", mask={text}, other=0" if text else ""

    # *** operations ***

    def _op(self, e: Op) -> str:
        if all(isinstance(a, Const) for a in e.args) and (folded := _fold(e)) is not None:
            return literal(folded, kind_of(e))
        own = kind_of(e, self.spec.capture_kinds)
        kinds = [kind_of(a, self.spec.capture_kinds) for a in e.args]
        method = getattr(self, f"_{e.head}", None)
        if e.head in _CASTS:
            return self._cast(e, kinds[0])
        if e.head in _INFIX:
            common = _common(kinds) if own == "bool" else own
            return self._infix(_INFIX[e.head], *(self.value(a, common) for a in e.args))
        if e.head == "where":
            condition, *branches = e.args
            then, other = (self.value(a, own) for a in branches)
            return self.let(f"tl.where({self.value(condition, 'bool')}, {then}, {other})")
        if own == "int" and e.head in _INTEGRAL:
            return self.value(e.args[0], "int")
        args = [self.value(a, _common(kinds) if own == "bool" else own) for a in e.args]
        if method is not None:
            return method(own, *args)
        return self.let(f"{_FUNCTIONS[e.head]}({', '.join(args)})")

    def _infix(self, symbol: str, a: str, b: str) -> str:
        return self.let(f"{_paren(a)} {symbol} {_paren(b)}")

    def _cast(self, e: Op, kind: str) -> str:
        if e.head == "int" and kind == "float":
            return self.let(f"tl.cast({self.value(e.args[0])}, tl.int32)")  # truncates, as torch
        return self.value(e.args[0], e.head)

    def _neg(self, kind: str, x: str) -> str:
        return self.let(f"-{x}")

    def _not(self, kind: str, x: str) -> str:
        return self.let(f"{x} == 0" if kind == "bool" else f"~{x}")

    def _floordiv(self, kind: str, x: str, y: str) -> str:
        if kind == "float":
            return self.let(f"tl.floor({_paren(x)} / {_paren(y)})")
        return self.let(f"{self._quotient(x, y)} - {self._borrow(x, y)}")

    def _mod(self, kind: str, x: str, y: str) -> str:
        """Sign of the divisor, as Python and torch."""
        if kind == "float":
            floor = self.let(f"tl.floor({_paren(x)} / {_paren(y)})")
            return self.let(f"{_paren(x)} - {floor} * {_paren(y)}")
        remainder = self.let(f"{_paren(x)} - {self._quotient(x, y)} * {_paren(y)}")
        return self.let(f"{remainder} + {self._borrow(x, y)} * {_paren(y)}")

    def _quotient(self, x: str, y: str) -> str:
        return self.let(f"{_paren(x)} // {_paren(y)}")

    def _borrow(self, x: str, y: str) -> str:
        """1 where C's truncating division lies above the floor; 0 for one that already is the floor."""
        r = self.let(f"{_paren(x)} - ({_paren(x)} // {_paren(y)}) * {_paren(y)}")
        return self.let(f"tl.cast(({r} != 0) & (({r} < 0) != ({_paren(y)} < 0)), tl.int32)")

    def _minimum(self, kind: str, x: str, y: str) -> str:
        return self._extremum("minimum", kind, x, y)

    def _maximum(self, kind: str, x: str, y: str) -> str:
        return self._extremum("maximum", kind, x, y)

    def _extremum(self, which: str, kind: str, x: str, y: str) -> str:
        nan = ", propagate_nan=tl.PropagateNan.ALL" if kind == "float" else ""
        return self.let(f"tl.{which}({x}, {y}{nan})")

    def _sign(self, kind: str, x: str) -> str:
        if kind == "float":
            return self.let(f"tl.where({x} > 0.0, 1.0, tl.where({x} < 0.0, -1.0, 0.0))")
        return self.let(f"tl.where({x} > 0, 1, tl.where({x} < 0, -1, 0))")

    def _isnan(self, kind: str, x: str) -> str:
        return self.let(f"{x} != {x}")

    def _trunc(self, kind: str, x: str) -> str:
        return self.let(f"tl.where({x} < 0.0, tl.ceil({x}), tl.floor({x}))")

    def _round(self, kind: str, x: str) -> str:
        """Half to even."""
        floor = self.let(f"tl.floor({x})")
        rest = self.let(f"{x} - {floor}")
        odd = self.let(f"{floor} - 2.0 * tl.floor({floor} * 0.5)")
        return self.let(f"tl.where(({rest} > 0.5) | (({rest} == 0.5) & ({odd} == 1.0)), {floor} + 1.0, {floor})")

    def _exp(self, kind: str, x: str) -> str:
        return self.let(f"tl.exp({x})")

    def _sigmoid(self, kind: str, x: str) -> str:
        return self.let(f"1.0 / (1.0 + tl.math.exp2({x} * -{LOG2E}))")

    def _tanh(self, kind: str, x: str) -> str:
        """From exp2 of a negative number: never overflows, exact limits, NaN stays."""
        e = self.let(f"tl.math.exp2(tl.abs({x}) * -{2 * LOG2E})")
        large = self.let(f"(1.0 - {e}) / (1.0 + {e})")
        large = self.let(f"tl.where({x} < 0.0, -{large}, {large})")
        if not self.precise:
            return large
        y = self.let(f"{x} * {x}")  # 1 - e cancels near 0: odd series, next term below float32's rounding
        small = self.let(f"{x} + {x} * {y} * {_horner(y, _TANH)}")
        return self.let(f"tl.where({y} < 0.0625, {small}, {large})")

    def _expm1(self, kind: str, x: str) -> str:
        small = self.let(f"{x} * {_horner(x, [1 / math.factorial(k) for k in range(1, 10)])}")
        return self.let(f"tl.where(tl.abs({x}) < 0.4, {small}, tl.exp({x}) - 1.0)")

    def _log1p(self, kind: str, x: str) -> str:
        """log(u) with u = 1 + x rounded, corrected by x / (u - 1): Kahan."""
        u = self.let(f"1.0 + {x}")
        exact = self.let(f'({u} == 1.0) | ({u} == float("inf"))')
        safe = self.let(f"tl.where({exact}, 2.0, {u})")
        return self.let(f"tl.where({exact}, {x}, tl.log({safe}) * ({x} / ({safe} - 1.0)))")

    def _pow(self, kind: str, x: str, y: str) -> str:
        power = _as_int(y)
        if power is not None and 0 <= power <= 8:
            return self.let(" * ".join([x] * power)) if power else ("1.0" if kind == "float" else "1")
        if kind == "int":
            x, y = (self.let(f"tl.cast({t}, tl.float32)") for t in (x, y))
        if y == "0.5":
            return self.let(f"tl.sqrt({x})")
        size = self.let(f"tl.math.exp2({_paren(y)} * tl.math.log2(tl.abs({x})))")
        odd = self.let(f"{y} - 2.0 * tl.floor({_paren(y)} * 0.5)")
        signed = self.let(f'tl.where({odd} == 0.0, {size}, tl.where({odd} == 1.0, -{size}, float("nan")))')
        result = self.let(f"tl.where({x} < 0.0, {signed}, {size})")
        result = self.let(f"tl.where(({y} == 0.0) | ({x} == 1.0), 1.0, {result})")
        return result if kind == "float" else self.let(f"tl.cast({result}, tl.int32)")


_TANH = [-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925]
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_FUNCTIONS = {
    "exp2": "tl.math.exp2", "log": "tl.log", "log2": "tl.math.log2", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt",
    "erf": "tl.math.erf", "sin": "tl.sin", "cos": "tl.cos", "abs": "tl.abs", "floor": "tl.floor", "ceil": "tl.ceil",
}  # fmt: skip
_CASTS = frozenset({"float", "int", "bool"})
_INTEGRAL = frozenset({"floor", "ceil", "round", "trunc"})


def _common(kinds: list[str]) -> str:
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


def _paren(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def _horner(x: str, coefficients: list[float]) -> str:
    text = repr(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        text = f"({c!r} + {x} * {_paren(text)})"
    return text


def _as_int(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value == int(value) else None


def _fold(e: Op) -> bool | int | float | None:
    """The value of an operation on constants: Triton's functions do not take Python numbers. None if unknown."""
    values = [a.head for a in e.args]  # type: ignore[attr-defined]
    function: Callable[..., bool | int | float] | None = (
        _LITERAL.get(e.head) or FOLD.get(e.head) or getattr(math, e.head, None)
    )
    try:
        return function(*values) if function else None
    except OverflowError:
        return math.inf
    except ZeroDivisionError:
        return math.copysign(math.inf, values[0]) if values[0] and e.head == "div" else math.nan
    except ValueError:
        return math.nan


_LITERAL: dict[str, Callable[..., bool | int | float]] = {
    "where": lambda c, a, b: a if c else b,
    "isnan": math.isnan,
    "sign": lambda x: (x > 0) - (x < 0),
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "log": lambda x: math.log(x) if x else -math.inf,
    "log2": lambda x: math.log2(x) if x else -math.inf,
}


# *** parameters ***


def capture_parameters(spec: KernelSpec) -> list[str]:
    """One line per capture for a kernel's signature: the pointer and its strides."""
    names = [[f"C{i}", *(f"stride_c{i}_{d}" for d in range(c.ndim))] for i, c in enumerate(spec.captures)]
    return [", ".join(n) + "," for n in names]


def size_parameters(spec: KernelSpec) -> list[str]:
    return [", ".join(f"S{i}" for i in range(spec.num_sizes)) + ","] if spec.num_sizes else []


# *** loop bounds ***


def ends_lines(emitter: Emitter, region: Region, axis: str) -> list[str]:
    """Statements for the ends lo and hi of the loop over kv tiles (axis "n") or q tiles (axis "m").

    Tiles outside [lo, hi) are not visited. lo is a multiple of the block. Bounds may be negative before they are clipped,
    and `//` truncates: clip first.
    """
    block, length = f"BLOCK_{axis.upper()}", axis.upper()
    lo, hi = (None if e is None else emitter.value(e, "int") for e in (region.lo, region.hi))
    lines = emitter.take()
    lines.append(f"lo = tl.maximum({lo}, 0) // {block} * {block}" if lo else "lo = 0")
    lines.append(f"hi = tl.minimum({hi}, {length})" if hi else f"hi = {length}")
    return lines


def range_lines(emitter: Emitter, region: Region, axis: str) -> list[str]:
    """Statements for lo <= full_lo <= full_hi <= hi of a loop. Tiles in [full_lo, full_hi) need no mask.

    All but hi are multiples of the block. A SHORT loop has no such tiles: one loop is faster to start than two.
    """
    block, length = f"BLOCK_{axis.upper()}", axis.upper()
    lines = ends_lines(emitter, region, axis)
    full_lo, full_hi = (None if e is None else emitter.value(e, "int") for e in (region.full_lo, region.full_hi))
    lines += emitter.take()
    if full_lo:
        start = f"tl.maximum(tl.cdiv(tl.maximum({full_lo}, 0), {block}) * {block}, lo)"
        lines.append(f"full_lo = lo if SHORT else {start}")
    else:
        lines.append("full_lo = lo")
    end = f"tl.minimum({full_hi}, {length})" if full_hi else length
    lines.append(f"full_hi = full_lo if SHORT else tl.maximum({end} // {block} * {block}, full_lo)")
    return lines


def filled_lines(emitter: Emitter, region: Region, axis: str, inner: Region) -> tuple[list[str], str]:
    """Statements for the tiles that the region holds and `range_lines` of the inner one leaves out, and a tile's start.

    `left` is their number, before and after the loop; the start is that of number `step`. first <= lo, stop >= hi.
    """
    block, length = f"BLOCK_{axis.upper()}", axis.upper()
    first, stop = (None if e is None else emitter.value(e, "int") for e in (region.lo, region.hi))
    lines = emitter.take()
    lines.append(f"first = tl.maximum({first}, 0) // {block} * {block}" if first else "first = 0")
    lines.append(f"stop = tl.minimum({stop}, {length})" if stop else f"stop = {length}")
    lines.append(f"after = tl.maximum(tl.cdiv(tl.maximum(hi, 0), {block}) * {block}, lo)")
    lines.append(f"left = tl.cdiv(tl.maximum(stop - after, 0), {block})")
    if inner.lo is None:
        return lines, f"after + step * {block}"
    lines.append(f"before = tl.cdiv(tl.maximum(tl.minimum(lo, stop) - first, 0), {block})")
    lines.append("left += before")
    return lines, f"tl.where(step < before, first + step * {block}, after + (step - before) * {block})"
