"""Programs as one line of ASCII, and back: `parse(str(p)) == p`.

The text is a subset of Python, so it is parsed by `ast`: assignments separated by `;`, to the parts `score`, `keep`,
`sink`, `weight`, `drop`, `empty`, or to temporaries `t0`, `t1`, ... that hold an expression used more than once.

    t0 = c0[b, kv_idx]; score = score * 0.125 + t0; keep = (kv_idx <= q_idx) & (t0 > -1.0)

The empty text is plain `softmax(q k^T) v`.
"""

from __future__ import annotations

import ast
import math
import re

from ..errors import ProgramError
from .expr import CALLS, NAMES, OPERATORS, PREFIX, Const, Expr, Load, Name, Op, Program, const, load, name, op, walk

# *** print ***

_LEVEL = {"or": 1, "xor": 2, "and": 3, "add": 5, "sub": 5, "mul": 6, "div": 6, "floordiv": 6, "mod": 6}
_COMPARE, _PREFIX, _ATOM = 0, 7, 9  # Python puts comparisons below the bitwise operators
_LEFT_ASSOCIATIVE = frozenset({"add", "sub", "mul", "div", "floordiv", "mod", "and", "or", "xor"})


def format_program(program: Program) -> str:
    """One line; temporaries for what is used more than once; empty for the identity program."""
    parts = [(f, e) for f, e in program.parts() if not (f == "score" and e is Program().score)]
    shared = _shared([e for _, e in parts])
    names: dict[int, str] = {}
    lines = []
    for node in shared:
        text = _format(node, names)[0]
        names[id(node)] = f"t{len(names)}"
        lines.append(f"{names[id(node)]} = {text}")
    lines += [f"{field} = {_format(e, names)[0]}" for field, e in parts]
    lines += [f"{f} = {_number(v)}" for f in ("drop", "empty") if (v := getattr(program, f)) is not None]
    return "; ".join(lines)


def format_expr(root: Expr) -> str:
    """The expression alone, nothing shared."""
    return _format(root, {})[0]


def _shared(roots: list[Expr]) -> list[Expr]:
    """Operations and loads with more than one user, in dependency order; casts of a name stay inline."""
    uses: dict[int, int] = {}
    for node in walk(*roots):
        for a in node.args:
            uses[id(a)] = uses.get(id(a), 0) + 1
    for r in roots:
        uses[id(r)] = uses.get(id(r), 0) + 1
    return [n for n in walk(*roots) if isinstance(n, (Op, Load)) and uses[id(n)] > 1 and _weight(n) > 2]


def _weight(node: Expr) -> int:
    return sum(1 for _ in walk(node))


def _format(node: Expr, names: dict[int, str]) -> tuple[str, int]:
    """Text and binding level."""
    if id(node) in names:
        return names[id(node)], _ATOM
    if isinstance(node, Const):
        text = _number(node.head)
        return text, (_PREFIX if text.startswith("-") else _ATOM)
    if isinstance(node, Name):
        return node.head, _ATOM
    args = [_format(a, names) for a in node.args]
    if isinstance(node, Load):
        return (f"c{node.head}[{', '.join(t for t, _ in args)}]" if args else f"c{node.head}"), _ATOM
    return _format_op(node.head, args)


def _format_op(operation: str, args: list[tuple[str, int]]) -> tuple[str, int]:
    if operation in PREFIX:
        return PREFIX[operation] + _paren(args[0], _PREFIX + 1), _PREFIX
    if operation in CALLS:
        return f"{operation}({', '.join(t for t, _ in args)})", _ATOM
    level = _LEVEL.get(operation, _COMPARE)
    left = _paren(args[0], level if operation in _LEFT_ASSOCIATIVE else level + 1)
    right = _paren(args[1], level + 1)
    return f"{left} {OPERATORS[operation]} {right}", level


def _paren(arg: tuple[str, int], needed: int) -> str:
    return arg[0] if arg[1] >= needed else f"({arg[0]})"


def _number(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return repr(value)


# *** parse ***

_OPERATOR_OF = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.USub: "neg", ast.Invert: "not", ast.Pow: "pow",
}  # fmt: skip
_PARTS = ("score", "keep", "sink", "weight", "drop", "empty")


def parse(text: str) -> Program:
    """The program a text stands for.

    Raises ProgramError with the place and what was expected.
    """
    if not isinstance(text, str):
        raise ProgramError(f"a score program is a str, got {type(text).__name__}")
    try:
        module = ast.parse(text.strip())
    except SyntaxError as e:
        raise ProgramError(f"cannot parse the score program {text!r}: {e.msg} at column {e.offset}") from None
    parts: dict[str, Expr] = {}
    temporaries: dict[str, Expr] = {}
    for statement in module.body:
        target = _target(statement, text)
        value = _Reader(text, temporaries).read(statement.value)  # type: ignore[attr-defined]
        table = parts if target in _PARTS else temporaries
        if target in table:
            raise ProgramError(f"{target!r} is assigned twice in the score program {text!r}")
        table[target] = value
    return Program(**{k: _plain(k, v) if k in ("drop", "empty") else v for k, v in parts.items()})  # type: ignore[arg-type]


def _target(statement: ast.stmt, text: str) -> str:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        target = statement.targets[0].id
        if target in _PARTS or re.fullmatch(r"t\d+", target):
            return target
    raise ProgramError(
        f"a score program is a list of assignments to {', '.join(_PARTS)} or temporaries t0, t1, ..., "
        f"got {ast.unparse(statement)!r} in {text!r}"
    )


def _plain(part: str, value: Expr) -> float:
    number = value.head if isinstance(value, Const) else None
    known = isinstance(number, (int, float)) and not isinstance(number, bool)
    fits = known and (0.0 <= number <= 1.0 if part == "drop" else number == 0.0 or math.isnan(number))  # type: ignore[operator, arg-type]
    if not fits:
        wanted = "a probability from 0 to 1" if part == "drop" else "0.0 or nan"
        raise ProgramError(f"{part!r} must be {wanted}, got {value!r}")
    return float(number)  # type: ignore[arg-type]


class _Reader:
    """Turns one `ast` expression into an `Expr`."""

    def __init__(self, text: str, temporaries: dict[str, Expr]) -> None:
        self.text, self.temporaries = text, temporaries

    def read(self, node: ast.AST) -> Expr:
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            return const(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATOR_OF:
            return self._prefix(_OPERATOR_OF[type(node.op)], self.read(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATOR_OF:
            return op(_OPERATOR_OF[type(node.op)], self.read(node.left), self.read(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATOR_OF:
            return op(_OPERATOR_OF[type(node.ops[0])], self.read(node.left), self.read(node.comparators[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node.func.id, [self.read(a) for a in node.args])
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self._load(node.value.id, node.slice)
        raise self._error(f"{ast.unparse(node)!r} is not part of the score language")

    def _prefix(self, operation: str, operand: Expr) -> Expr:
        if operation == "neg" and isinstance(operand, Const) and not isinstance(operand.head, bool):
            return const(-operand.head)
        return op(operation, operand)

    def _name(self, text: str) -> Expr:
        if text in self.temporaries:
            return self.temporaries[text]
        if text in NAMES or re.fullmatch(r"s\d+", text):
            return name(text)
        if text in ("inf", "nan"):
            return const(float(text))
        if re.fullmatch(r"c\d+", text):
            return load(int(text[1:]))  # a 0-d capture may be written without brackets
        raise self._error(f"unknown name {text!r}; known are {', '.join(NAMES)}, c0, c1, ..., s0, s1, ...")

    def _call(self, function: str, args: list[Expr]) -> Expr:
        if function not in CALLS:
            raise self._error(f"unknown function {function!r}; known are {', '.join(CALLS)}")
        if len(args) != CALLS[function]:
            raise self._error(f"{function} takes {CALLS[function]} arguments, got {len(args)}")
        return op(function, *args)

    def _load(self, text: str, index: ast.AST) -> Expr:
        if not re.fullmatch(r"c\d+", text):
            raise self._error(f"only captures c0, c1, ... can be indexed, got {text!r}")
        items = index.elts if isinstance(index, ast.Tuple) else [index]
        return load(int(text[1:]), *(self.read(i) for i in items))

    def _error(self, what: str) -> ProgramError:
        return ProgramError(f"cannot parse the score program {self.text!r}: {what}")
