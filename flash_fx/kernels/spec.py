"""Everything about a kernel that is known before shapes are: whatever changes its text or its tile."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property

from ..limits import MAX_HEAD_DIM
from ..score.expr import Program
from ..score.text import parse

OPERAND_DTYPES = ("float16", "bfloat16", "float32")
PRECISIONS = (None, "ieee", "tf32", "tf32x3")


@dataclass(frozen=True)
class CaptureFact:
    """What the text of a load depends on: torch's name of the dtype, and the rank. Shapes and strides are run-time."""

    dtype: str
    ndim: int

    @property
    def kind(self) -> str:
        if self.dtype == "bool":
            return "bool"
        return "float" if self.dtype.startswith(("float", "bfloat")) else "int"


@dataclass(frozen=True)
class KernelSpec:
    """Static facts of the kernels of one attention.

    `program`    text of the Program
    `captures`   one fact per captured tensor c0, c1, ...
    `dtype`      of query, key, value and out
    `d`, `dv`    head dims of query and key, and of value
    `num_sizes`  how many run-time sizes s0, s1, ... the program may name
    `precision`  input_precision of float32 dots; None for 16-bit operands
    `interpret`  the kernel will run in Triton's interpreter
    `blocks`     the kernel walks the lists of a block map
    """

    program: str
    captures: tuple[CaptureFact, ...]
    dtype: str
    d: int
    dv: int
    num_sizes: int = 0
    precision: str | None = None
    interpret: bool = False
    blocks: bool = False

    def __post_init__(self) -> None:
        assert self.dtype in OPERAND_DTYPES, f"no kernels for operands of dtype {self.dtype}"
        assert self.precision in PRECISIONS, f"unknown input precision {self.precision!r}"
        heads = {self.d, self.dv}
        assert all(1 <= d <= MAX_HEAD_DIM for d in heads), f"head dims must be 1 to {MAX_HEAD_DIM}, got {heads}"

    @cached_property
    def parsed(self) -> Program:
        return parse(self.program)

    @property
    def capture_kinds(self) -> tuple[str, ...]:
        return tuple(c.kind for c in self.captures)

    @property
    def widen(self) -> bool:
        """The interpreter multiplies the raw bits of bfloat16 in tl.dot, so operands become float32 at the load."""
        return self.interpret and self.dtype == "bfloat16"

    def lines(self) -> list[str]:
        """One `field: value` per field, for the header of a rendered file."""
        return [f"{f.name}: {getattr(self, f.name)!r}" for f in fields(self)]

    def key(self) -> str:
        """Stable over processes and machines; equal exactly for equal specs."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:16]
