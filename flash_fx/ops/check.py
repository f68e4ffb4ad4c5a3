"""Operand checks, in the order type, rank, dtype, device, shape, program. Every message says what was expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import OperandError, ProgramError
from ..limits import max_head_dim
from ..score.expr import Load, Name, Program, walk
from ..score.text import parse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captures: Sequence[torch.Tensor],
    sizes: Sequence[int],
    text: str,
) -> Program:
    """The parsed program. Raises OperandError or ProgramError."""
    named = {"query": query, "key": key, "value": value}
    for what, t in [*named.items(), *((f"captures[{i}]", c) for i, c in enumerate(captures))]:
        if not isinstance(t, torch.Tensor):
            raise OperandError(f"{what} must be a tensor, got {type(t).__name__}")
    for what, t in named.items():
        if t.dim() != 4:
            raise OperandError(
                f"{what} must be [batch, heads, length, head_dim], got {t.dim()} dimensions: {_shape(t)}"
            )
    _check_dtypes(query, key, value)
    for what, t in [*named.items(), *((f"captures[{i}]", c) for i, c in enumerate(captures))]:
        if t.device != query.device:
            raise OperandError(f"{what} must be on the query's device {query.device}, got {t.device}")
    _check_shapes(query, key, value)
    program = parse(text)
    _check_program(program, captures, sizes, text)
    return program


def _check_dtypes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.dtype not in DTYPES or (query.dtype is torch.float64 and query.device.type != "cpu"):
        raise OperandError(f"query must be float32, bfloat16 or float16 (float64 on the CPU), got {query.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise OperandError(f"query, key and value must share one dtype, got {query.dtype}, {key.dtype}, {value.dtype}")


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    b, h, _, d = query.shape
    if key.shape[0] != b or value.shape[0] != b:
        raise OperandError(
            f"query, key and value must share the batch, got {_shape(query)}, {_shape(key)}, {_shape(value)}"
        )
    if key.shape[-1] != d:
        raise OperandError(f"query and key must share head_dim, got {_shape(query)} and {_shape(key)}")
    if value.shape[1:3] != key.shape[1:3]:
        raise OperandError(f"key and value must share heads and length, got {_shape(key)} and {_shape(value)}")
    if key.shape[1] == 0 != h or (key.shape[1] and h % key.shape[1] != 0):
        raise OperandError(f"query heads must be a multiple of key heads, got {h} and {key.shape[1]}")
    greatest = max_head_dim(query.dtype, query.device)
    for what, size in (("query", d), ("value", value.shape[-1])):
        if not 1 <= size <= greatest:
            raise OperandError(f"head_dim must be 1 to {greatest}, got {size} for {what}")


def _check_program(program: Program, captures: Sequence[torch.Tensor], sizes: Sequence[int], text: str) -> None:
    for _, e in program.parts():
        for node in walk(e):
            if isinstance(node, Load):
                _check_load(node, captures, text)
            elif (
                isinstance(node, Name)
                and node.head[0] == "s"
                and node.head[1:].isdigit()
                and int(node.head[1:]) >= len(sizes)
            ):
                raise ProgramError(
                    f"the score program {text!r} reads size {node.head}, but {len(sizes)} sizes were given"
                )


def _check_load(node: Load, captures: Sequence[torch.Tensor], text: str) -> None:
    if node.head >= len(captures):
        raise ProgramError(
            f"the score program {text!r} reads capture c{node.head}, but {len(captures)} captures were given"
        )
    rank = captures[node.head].dim()
    if len(node.args) != rank:
        raise ProgramError(
            f"capture c{node.head} has {rank} dimensions, but the score program {text!r} indexes {len(node.args)}"
        )


def _shape(t: torch.Tensor) -> str:
    return str(list(t.shape))
