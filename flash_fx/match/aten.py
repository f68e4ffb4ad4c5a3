"""The only list of ATen operators the matcher knows, by what they mean to a score.

Three tables: views (the same element elsewhere), generators (a value from the index alone) and pointwise operations
(a value from the same element of the operands). Everything else is opaque.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..score.expr import Const, Expr, Load, const, op, walk, where

aten = torch.ops.aten

SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default})
BMM = aten.bmm.default
DETACH = aten.detach.default

# Used only for the shape, dtype or device of their argument: no value flows.
SHAPE_ONLY = frozenset(
    {
        "ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like", "new_ones", "new_zeros", "new_full",
        "new_empty", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride",
    }
)  # fmt: skip

VIEWS = frozenset(
    {
        "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze",
        "slice", "select", "alias", "clone", "contiguous", "detach", "split", "split_with_sizes", "unbind", "chunk",
        "lift_fresh", "lift_fresh_copy", "repeat", "flip", "view_as", "expand_as",
    }
)  # fmt: skip

CASTS = frozenset({"_to_copy", "to"})

_UNARY = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos",
    "abs", "sign", "floor", "ceil", "round", "trunc", "neg", "isnan",
)  # fmt: skip
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


def name_of(node: Node) -> str:
    """`add` for aten.add.Tensor; empty for what is no ATen operator."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return node.target.overloadpacket.__name__
    return "getitem" if node.target is operator.getitem else ""


def kind_of_dtype(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _scaled(sign: str) -> Callable[..., Expr]:
    def build(x: Expr, y: Expr, alpha: Any = 1) -> Expr:
        return op(sign, x, y if alpha == 1 else op("mul", y, alpha))

    return build


def _clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    if low is not None:
        x = where(op("lt", x, low), low, x) if _is_score_bound(low) else op("maximum", x, low)
    if high is not None:
        x = where(op("gt", x, high), high, x) if _is_score_bound(high) else op("minimum", x, high)
    return x


def _is_score_bound(bound: Expr) -> bool:
    """May it bound scores, whose gradient passes where they equal it (those of zeroed rows are exactly 0)?

    A maximum, which is easier to reason about for positions, gives half of it to either side.
    """
    if isinstance(bound, Const):
        return bound.head == 0 or isinstance(bound.head, float)
    return any(isinstance(n, Load) for n in walk(bound))


def _hardtanh(x: Expr, low: Expr | float = -1.0, high: Expr | float = 1.0) -> Expr:
    return where(op("le", x, low), low, where(op("ge", x, high), high, x))


def _div(x: Expr, y: Expr, rounding_mode: str | None = None) -> Expr | None:
    if rounding_mode is None:
        return op("div", x, y)
    return op("floordiv", x, y) if rounding_mode == "floor" else None


def _leaky_relu(x: Expr, slope: Expr | float = 0.01) -> Expr:
    return where(op("gt", x, 0.0), x, op("mul", x, slope))


def _hardsigmoid(x: Expr) -> Expr:
    return _hardtanh(op("add", op("div", x, 6.0), 0.5), 0.0, 1.0)


def _threshold(x: Expr, least: Expr, value: Expr) -> Expr:
    return where(op("le", x, least), value, x)


def _celu(x: Expr, alpha: Expr | float = 1.0) -> Expr:
    return _elu(x, alpha, 1.0, op("div", 1.0, alpha))


def _lerp(x: Expr, y: Expr, weight: Expr) -> Expr:
    return op("add", x, op("mul", weight, op("sub", y, x)))


def _fused(combine: str) -> Callable[..., Expr]:
    """x + value * (y combined with z)"""

    def build(x: Expr, y: Expr, z: Expr, value: Any = 1) -> Expr:
        both = op(combine, y, z)
        return op("add", x, both if value == 1 else op("mul", both, value))

    return build


def _elu(x: Expr, alpha: Expr | float = 1.0, scale: Expr | float = 1.0, inner: Expr | float = 1.0) -> Expr:
    below = op("mul", op("expm1", op("mul", where(op("gt", x, 0.0), 0.0, x), inner)), alpha)
    return op("mul", where(op("gt", x, 0.0), x, below), scale)


def _gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "none":
        inner = op("erf", op("mul", x, math.sqrt(0.5)))
    else:
        cube = op("mul", op("mul", x, x), x)
        inner = op("tanh", op("mul", op("add", x, op("mul", cube, 0.044715)), math.sqrt(2 / math.pi)))
    return op("mul", op("mul", x, 0.5), op("add", inner, 1.0))


def _softplus(x: Expr, beta: Expr | float = 1.0, threshold: Expr | float = 20.0) -> Expr | None:
    """Above the threshold PyTorch takes x itself, which from 20 on is the same to float32's precision."""
    least = threshold.head if isinstance(threshold, Const) else threshold
    if not isinstance(least, (int, float)):
        return None
    scaled = op("mul", x, beta)
    smooth = op("div", op("add", op("maximum", scaled, 0.0), op("log1p", op("exp", op("neg", op("abs", scaled))))), beta)
    return smooth if least >= 20 else where(op("gt", scaled, float(least)), x, smooth)


def _logaddexp(x: Expr, y: Expr) -> Expr:
    least_and_most = op("log1p", op("exp", op("neg", op("abs", op("sub", x, y)))))
    return where(op("eq", x, y), op("add", x, math.log(2.0)), op("add", op("maximum", x, y), least_and_most))


def _logit(x: Expr, eps: Expr | None = None) -> Expr:
    if isinstance(eps, Const):
        x = _clamp(x, eps, const(1.0 - eps.head))
    return op("log", op("div", x, op("sub", 1.0, x)))


# name -> (how operands are brought to one kind, builder). Kinds: "result" casts to the node's own kind, "common" to the
# widest of the operands, "bool" to bool, "float" to float.
POINTWISE: dict[str, tuple[str, Callable[..., Expr | None]]] = {
    "add": ("result", _scaled("add")),
    "sub": ("result", _scaled("sub")),
    "rsub": ("result", lambda x, y, alpha=1: _scaled("sub")(y, x, alpha)),
    "mul": ("result", lambda x, y: op("mul", x, y)),
    "div": ("result", _div),
    "true_divide": ("result", _div),
    "floor_divide": ("result", lambda x, y: op("floordiv", x, y)),
    "remainder": ("result", lambda x, y: op("mod", x, y)),
    "pow": ("result", lambda x, y: op("pow", x, y)),
    "reciprocal": ("result", lambda x: op("div", 1.0, x)),
    "square": ("result", lambda x: op("mul", x, x)),
    "maximum": ("result", lambda x, y: op("maximum", x, y)),
    "minimum": ("result", lambda x, y: op("minimum", x, y)),
    "clamp": ("result", _clamp),
    "clamp_min": ("result", _clamp),
    "clamp_max": ("result", lambda x, high: _clamp(x, None, high)),
    "relu": ("result", lambda x: where(op("le", x, 0), 0, x)),
    "hardtanh": ("result", _hardtanh),
    "leaky_relu": ("result", _leaky_relu),
    "elu": ("result", _elu),
    "celu": ("result", _celu),
    "hardsigmoid": ("result", _hardsigmoid),
    "hardswish": ("result", lambda x: op("mul", x, _hardsigmoid(x))),
    "threshold": ("result", _threshold),
    "_prelu_kernel": ("result", _leaky_relu),
    "lerp": ("result", _lerp),
    "addcmul": ("result", _fused("mul")),
    "addcdiv": ("result", _fused("div")),
    "frac": ("result", lambda x: op("sub", x, op("trunc", x))),
    "sgn": ("result", lambda x: op("sign", x)),
    "gelu": ("result", _gelu),
    "silu": ("result", lambda x: op("mul", x, op("sigmoid", x))),
    "softplus": ("result", _softplus),
    "logaddexp": ("result", _logaddexp),
    "logit": ("result", _logit),
    "mish": ("result", lambda x: op("mul", x, op("tanh", _softplus(x)))),  # type: ignore[arg-type]
    "logical_and": ("bool", lambda x, y: op("and", x, y)),
    "logical_or": ("bool", lambda x, y: op("or", x, y)),
    "logical_xor": ("bool", lambda x, y: op("xor", x, y)),
    "logical_not": ("bool", lambda x: op("not", x)),
    "bitwise_and": ("only-bool", lambda x, y: op("and", x, y)),
    "bitwise_or": ("only-bool", lambda x, y: op("or", x, y)),
    "bitwise_xor": ("only-bool", lambda x, y: op("xor", x, y)),
    "bitwise_not": ("only-bool", lambda x: op("not", x)),
    "__and__": ("only-bool", lambda x, y: op("and", x, y)),
    "__or__": ("only-bool", lambda x, y: op("or", x, y)),
    "isinf": ("common", lambda x: op("eq", op("abs", x), const(float("inf")))),
    **{u: ("result" if u != "isnan" else "common", lambda x, u=u: op(u, x)) for u in _UNARY},
    **{c: ("common", lambda x, y, c=c: op(c, x, y)) for c in _COMPARE},
}

GENERATORS = frozenset(
    {
        "full", "zeros", "ones", "scalar_tensor", "arange", "eye", "full_like", "zeros_like", "ones_like",
        "new_full", "new_zeros", "new_ones",
    }
)  # fmt: skip

# Rows of a table at positions that a tensor holds.
LOOKUPS = frozenset({"embedding", "index", "index_select"})

# Pieces side by side, one of which may be zeros.
JOINS = frozenset({"cat", "constant_pad_nd"})

# In-place writes into part of a tensor, as the twin shows them.
WRITES = frozenset({"index_put", "slice_scatter", "select_scatter", "diagonal_scatter"})

# What may stand between the softmax and the products on either side; used to find candidates, not to judge them.
TRANSPARENT = (
    VIEWS | CASTS | WRITES | JOINS | frozenset(POINTWISE)
    | {"where", "masked_fill", "tril", "triu", "getitem", "native_dropout", "nan_to_num", "index"}
)  # fmt: skip
# operations whose numbers become values, not shapes
WITH_NUMBERS = frozenset(POINTWISE) | {"masked_fill", "full", "scalar_tensor", "full_like", "new_full"}
