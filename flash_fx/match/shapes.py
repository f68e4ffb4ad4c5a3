"""Tensor shapes of the twin as `Expr`s: numbers, and symbols for run-time sizes."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..score.expr import Expr, const, name
from . import index as ix


class Shapes:
    """Turns sizes into `Expr`s. `symbols` maps each symbol to the SymInt it stands for, `hints` to a likely value."""

    def __init__(self) -> None:
        self.symbols: dict[Expr, Any] = {}
        self.hints: dict[Expr, int] = {}

    def dim(self, size: int | torch.SymInt) -> Expr:
        if isinstance(size, int):
            return const(int(size))
        expr = compat.sym_expr(size)
        self._remember(expr, size)
        return self._convert(expr)

    def of(self, node: Node) -> tuple[Expr, ...]:
        return tuple(self.dim(s) for s in node.meta["val"].shape)

    def _remember(self, expr: Any, size: torch.SymInt) -> None:
        """Give every symbol of the expression a value; a compound one only stands for itself."""
        symbol = name(f"${expr}")
        if expr.is_symbol and symbol not in self.symbols:
            self.symbols[symbol], self.hints[symbol] = size, compat.sym_hint(size)
            return
        for s in expr.free_symbols:
            if name(f"${s}") not in self.symbols:
                atom = compat.symbol_value(size, s)
                self.symbols[name(f"${s}")], self.hints[name(f"${s}")] = atom, compat.sym_hint(atom)

    def _convert(self, e: Any) -> Expr:
        if e.is_Integer:
            return const(int(e))
        if e.is_symbol:
            return name(f"${e}")
        if isinstance(e, sympy.Add):
            result: Expr = ix.ZERO
            for a in e.args:
                result = ix.add(result, self._convert(a))
            return result
        if isinstance(e, sympy.Mul):
            result = ix.ONE
            for a in e.args:
                result = ix.mul(result, self._convert(a))
            return result
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0:
            return ix.product([self._convert(e.base)] * int(e.exp))
        if type(e).__name__ == "FloorDiv":
            return ix.Indexer({}, self.hints).floordiv(self._convert(e.args[0]), self._convert(e.args[1]))
        if type(e).__name__ in ("Mod", "PythonMod"):
            return ix.Indexer({}, self.hints).mod(self._convert(e.args[0]), self._convert(e.args[1]))
        raise UnknownSizeError(str(e))


class UnknownSizeError(ValueError):
    """A size is computed in a way the index arithmetic does not follow."""
