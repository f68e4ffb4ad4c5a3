"""Indices that count diagonals: `kv_idx - q_idx + x`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .expr import KV, Const, Expr, Name, Op, Q


def diagonal_offset(index: Expr, sizes: Mapping[str, Any]) -> Any:
    """x of the index `kv_idx - q_idx + x`, where x is a sum of `sizes` (by name; run-time ones too) and numbers; or None."""
    total: Any = 0
    signs = {KV: 0, Q: 0}
    terms = [(index, 1)]
    while terms:
        node, sign = terms.pop()
        if node in signs:
            signs[node] += sign
        elif isinstance(node, Op) and node.head in ("add", "sub"):
            terms += [(node.args[0], sign), (node.args[1], sign if node.head == "add" else -sign)]
        elif isinstance(node, Const) and type(node.head) is int:
            total = total + sign * node.head
        elif isinstance(node, Name) and node.head in sizes:
            total = total + sign * sizes[node.head]
        else:
            return None
    return total if (signs[KV], signs[Q]) == (1, -1) else None
