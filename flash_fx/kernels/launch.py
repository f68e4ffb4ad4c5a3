"""Runs the kernels of a program: forward and backward, the same two functions as in tiled.py.

Works on CUDA/HIP/XPU tensors, on CPU tensors in Triton's interpreter, and under tracing with SymInt shapes, where each
launch becomes a node of the traced graph (torch.library.wrap_triton).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..layout import gradient_like
from ..limits import float32_precision
from ..scatter import sum_by_diagonal, sum_by_position
from ..score.diagonal import affine, diagonal_offset
from ..score.evaluate import Evaluator, fill_top
from ..score.expr import INDEX_NAMES, Const, Load, Program, captures_in, names_in
from ..score.fill import fill_of
from ..score.grad import derivative, loads_of
from . import tuning
from .facts import batches_share_tiles, needs_residual
from .matrix import matrix_beside_dq
from .plan import Gradient, gradients_of
from .render import is_rendered, load_kernel
from .small import chunks_of_batches, is_small, sums_of, tile_of
from .spec import CaptureFact, KernelSpec
from .tables import gather, gathered, tables_of
from .tiles import HOPPER_MULTIPROCESSORS, HOPPER_SHARED, UNKNOWN, Tile, is_overridden, override, padded, tile_for

Size = Any  # int or torch.SymInt
MOST_ROWS = 64  # of a tile that holds the queries of several heads
LEAST_KEYS = 512  # fewer are not worth a second kernel
SHORT = 512  # below, a loop is over before the second of two loops has its first loads
INT32_MAX = 2**31 - 1
SUMMING = 512  # programs that sum the gradient of a matrix
GROUP = 8  # batch-heads whose tiles alternate in a launch, where early tiles are heavier or captures are shared


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1 at import)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def make_spec(
    query: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    num_sizes: int,
    program: Program,
    precision: str | None = None,
) -> KernelSpec:
    """The spec of the kernels for these operands. `precision` is for float32 and follows torch's switch by default."""
    dtype = _name(query.dtype)
    return KernelSpec(
        program=_text(program),
        captures=capture_facts(captures),
        dtype=dtype,
        d=int(query.shape[-1]),
        dv=int(value.shape[-1]),
        num_sizes=num_sizes,
        precision=(precision or float32_precision(query.device)) if dtype == "float32" else None,
        interpret=interpreting(),
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[Size],
    seed: Tensor | None,
    program: Program,
    bmhd: bool = False,
    kv_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, Dv] in the dtype of query, and lse [B, H, M] float32.

    query [B, H, M, D], key [B, Hk, N, D], value [B, Hk, N, Dv], any strides; seed int64 [2] where the program drops.
    out is contiguous, or with `bmhd` the transpose(1, 2) view of a contiguous [B, M, H, Dv]. kv_blocks is the first
    result of `block_map` for this program, if it has one.
    """
    return _Run(query, key, value, captures, sizes, seed, program, kv_blocks).forward(bmhd)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[Size],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    program: Program,
    needs: Sequence[bool],
    kv_blocks: Tensor | None = None,
    q_blocks: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of query, key, value and captures where `needs` is true, in order, in the input's dtype and shape.

    Those of query, key and value are laid out as `gradient_like` says.

    grad_out [B, H, M, Dv] may have any strides, zeros included. kv_blocks and q_blocks are those of `block_map`.
    """
    run = _Run(query, key, value, captures, sizes, seed, program, kv_blocks, q_blocks)
    found: dict[int, Tensor] = {}
    rows: dict[str, Any] = {}
    sums = run.sums_in_one_tile(needs)
    if sums is not None:
        found[0], found[1], found[2] = run.small(grad_out, sums)
    else:
        beside = run.beside_dq(needs)
        made = beside is None and run.makes_delta(needs)
        rows = run.rows(grad_out, out, lse, known=not made)
        if beside is not None:
            found[0] = run.dq_and_matrix(rows, *beside)
        elif needs[0]:
            found[0] = run.dq(rows, out if made else None)
        if needs[1] or needs[2]:
            found[1], found[2] = run.dkdv(rows)
    for c, capture in enumerate(captures):
        if needs[3 + c]:
            found[3 + c] = run.capture_gradient(c, capture, rows, lse)
    return [found[i] for i, needed in enumerate(needs) if needed]


class _Run:
    """The operands of one call as keyword arguments of the kernels."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        captures: Sequence[Tensor],
        sizes: Sequence[Size],
        seed: Tensor | None,
        program: Program,
        kv_blocks: Tensor | None = None,
        q_blocks: Tensor | None = None,
    ) -> None:
        self.query, self.key, self.value, self.sizes = query, key, value, sizes
        self.b, self.h, self.m, _ = query.shape
        self.hk, self.n = key.shape[1], key.shape[2]
        self.captures, self.program, self.tables = captures, program, tables_of(program)
        if self.tables:
            read = self._evaluator()
            self.program = program = gathered(program, len(captures))
            self.captures = captures = [*captures, *(gather(n, read) for n in self.tables)]
        self.spec = _checked(make_spec(query, value, captures, len(sizes), program))
        self.exact = not needs_residual(self.spec)
        self.alternates = program.keep is not None or fill_of(program) is not None or batches_share_tiles(program)
        self.operands = {
            "Q": query, "K": key, "V": value,
            **strides("q", "bhmd", query), **strides("k", "bhnd", key), **strides("v", "bhnd", value),
        }  # fmt: skip
        self.captured = capture_arguments([along_keys(i, c, program) for i, c in enumerate(captures)])
        self.lengths = {f"S{i}": s for i, s in enumerate(sizes)}
        self.lengths |= {"H": self.h, "G": self.h // self.hk, "M": self.m, "N": self.n, "NUM_BH": self.b * self.h}
        self.seeded = {"SEED": seed} if program.drop else {}
        self.longest = max(self.m, self.n) if isinstance(self.m, int) and isinstance(self.n, int) else UNKNOWN
        self.mapped = kv_blocks is not None
        self.sums: dict[Gradient, Tensor] = {}  # gradients that a kernel computed beside others
        self.searches = compat.searches_for_the_fastest() and not (self.spec.interpret or is_overridden())
        self.filling = self._filling()
        self.blocks = {"forward": kv_blocks, "delta": kv_blocks, "backward_dq": kv_blocks, "backward_dkdv": q_blocks}

    def _filling(self) -> dict[str, Tensor]:
        """TOP where a finite fill adds to scores, so that only these can tell how large the sum gets."""
        fill = fill_of(self.program, self.mapped)
        if fill is None or isinstance(fill.top, Const) or _is_empty(self.b, self.h, self.m, self.n):
            return {}
        return {"TOP": fill_top(fill.top, self.query, self.key, self.captures, self.sizes)}

    def tile(self, kind: str, batches: int = 1) -> Tile:
        limit = shared_memory(self.query.device)
        tile = tile_for(kind, self.spec, limit, self.longest, batches)
        if kind == "delta" or not self.searches:
            return tile
        lengths = (self.b, self.h, self.hk, self.m, self.n)
        tiles = tuning.candidates(kind, self.spec, tile, limit, batches)
        return tuning.choose(kind, self.spec, lengths, tiles, self._timer(kind))

    def dims(self, tile: Tile) -> dict[str, Any]:
        even_m, even_n = divides(tile.block_m, self.m), divides(tile.block_n, self.n)
        short = self.longest < SHORT and (self.alternates or not (even_m and even_n))
        return {
            "D": self.spec.d, "D_V": self.spec.dv, "BLOCK_D": padded(self.spec.d), "BLOCK_DV": padded(self.spec.dv),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP": GROUP if self.alternates else 1,
            "EVEN_M": even_m, "EVEN_N": even_n, "SHORT": short,
        }  # fmt: skip

    def launch(self, template: str, tile: Tile, programs: Size, *context: Any, **arguments: Any) -> None:
        blocks = self.blocks.get(template)
        spec = self.spec if blocks is None else _checked(replace(self.spec, blocks=True))
        kernel = load_kernel(template, spec, *context)
        arguments |= {name: value for name, value in self.filling.items() if name in kernel.arg_names}
        if blocks is not None and "BLOCKS" in kernel.arg_names:  # not in a delta kernel without a loop
            arguments |= {"BLOCKS": blocks, "stride_lb": blocks.stride(0), "stride_lh": blocks.stride(1)}
        launch_kernel(kernel, tile, programs, spec.interpret, **arguments)

    # *** forward ***

    def forward(self, bmhd: bool) -> tuple[Tensor, Tensor]:
        shape = (self.b, self.h, self.m, self.spec.dv)
        new = self.query.new_empty
        out = new((self.b, self.m, self.h, self.spec.dv)).transpose(1, 2) if bmhd else new(shape)
        lse = new(shape[:3], dtype=torch.float32)
        if not _is_empty(self.b, self.h, self.m):
            (self.decode if self.is_decoding() else self.one_pass)(out, lse)
        return out, lse

    def one_pass(self, out: Tensor, lse: Tensor) -> None:
        tile = self.tile("forward")
        self.launch(
            "forward", tile, self.b * self.h * cdiv(self.m, tile.block_m),
            **self.operands, **self.captured, **self.lengths, **self.dims(tile), **self.seeded,
            OUT=out, **strides("o", "bhmd", out), LSE=lse,
        )  # fmt: skip

    # *** few queries, many keys ***

    def is_decoding(self) -> bool:
        """Whether keys are split over programs: the queries of all heads that share a key head fit in one small tile."""
        m, g = self.m, self.lengths["G"]
        few = isinstance(m, int) and isinstance(g, int) and m * g <= MOST_ROWS
        return few and not self.program.drop and (not isinstance(self.n, int) or self.n >= LEAST_KEYS)

    def decode(self, out: Tensor, lse: Tensor) -> None:
        rows = self.m * self.lengths["G"]
        tile = self.tile("decode")
        dims = self.dims(replace(tile, block_m=max(16, 1 << (rows - 1).bit_length())))
        resident = 2 * multiprocessors(self.query.device)
        split = split_length(self.b * self.hk, self.n, tile.block_n, resident)
        splits = cdiv(self.n, split)
        part = self.query.new_empty((splits, *out.shape), dtype=torch.float32)
        tops, sums = (self.query.new_empty((splits, *lse.shape), dtype=torch.float32) for _ in range(2))
        shared = {**self.captured, **self.lengths, "PART": part, "TOPS": tops, "SUMS": sums, "SPLITS": splits}
        self.launch(
            "decode", tile, self.b * self.hk * splits, **self.operands, **shared, SPLIT=split,
            **{k: dims[k] for k in ("D", "D_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N")},
        )  # fmt: skip
        del shared["G"]
        self.launch(
            "combine", tile, self.b * self.h * self.m, **shared, OUT=out, **strides("o", "bhmd", out), LSE=lse,
            **{k: dims[k] for k in ("D_V", "BLOCK_DV")}, BLOCK_S=16,
        )  # fmt: skip

    # *** the search for a tile ***

    def _timer(self, kind: str) -> tuning.Timer:
        """Milliseconds of a kernel with a tile, on operands like these. A block map is left out: it makes no tile faster."""

        def timed(tile: Tile) -> float:
            with compat.real_execution(), override(tile, kind):
                return compat.milliseconds(self._stand_in()._only(kind))

        return timed

    def _stand_in(self) -> _Run:
        query, key, value, *captures = tuning.stand_ins([self.query, self.key, self.value, *self.captures])
        sizes = [compat.sym_hint(s) for s in self.sizes]
        seed = torch.zeros(2, dtype=torch.int64, device=query.device) if self.program.drop else None
        return _Run(query, key, value, captures, sizes, seed, self.program)

    def _only(self, kind: str) -> Callable[[], Any]:
        """A call of this kernel, and of what cannot be told from it."""
        out, lse = self.forward(bmhd=False)
        if kind in ("forward", "decode"):
            return lambda: (self.decode if kind == "decode" else self.one_pass)(out, lse)
        rows = self.rows(torch.randn_like(out), out, lse, known=True)
        if kind == "backward_capture":
            floats = [(i, c) for i, c in enumerate(self.captures) if c.is_floating_point()]
            return lambda: [self.capture_gradient(i, c, rows, lse) for i, c in floats]
        if kind == "backward_dq_matrix":
            beside = self.beside_dq([True] * 3 + [c.is_floating_point() for c in self.captures])
            assert beside is not None
            return lambda: self.dq_and_matrix(rows, *beside)
        return lambda: (self.dq if kind == "backward_dq" else self.dkdv)(rows)

    # *** backward passes ***

    def makes_delta(self, needs: Sequence[bool]) -> bool:
        """Whether the kernel of dQ, which has a row's DO at hand, computes DELTA for those that follow."""
        return needs[0] and self.exact and not _is_empty(self.b, self.h, self.m)

    def rows(self, grad_out: Tensor, out: Tensor, lse: Tensor, *, known: bool) -> dict[str, Any]:
        """Arguments that all backward kernels share: grad_out, and what is known of rows. DELTA is empty if not `known`."""
        lse = lse.contiguous()
        loses = self.mapped and not self.program.guarded  # rows without a key
        if (loses or fill_of(self.program, self.mapped) is not None) and not _is_empty(self.m):
            self.filling["LOW"] = lse.amin(-1)
        delta = torch.empty_like(lse)
        rows = {"DO": grad_out, **strides("g", "bhmd", grad_out), "DELTA": delta}
        more: dict[str, Any] = {}
        tile = self.tile("delta")
        dims = self.dims(tile)
        arguments = {k: dims[k] for k in ("D_V", "BLOCK_DV", "BLOCK_M", "EVEN_M")}
        arguments |= {k: self.lengths[k] for k in ("H", "M", "NUM_BH")}
        if not self.exact:
            more = {"LSE": lse, "RESIDUAL": torch.empty_like(lse), **self.captured}
            arguments |= {
                k: v for k, v in self.operands.items() if k in ("Q", "K") or k.startswith(("stride_q", "stride_k"))
            }
            arguments |= {k: dims[k] for k in ("D", "BLOCK_D", "BLOCK_N", "EVEN_N", "SHORT")} | self.lengths
        if known and not _is_empty(self.b, self.h, self.m):
            self.launch(
                "delta", tile, self.b * self.h * cdiv(self.m, tile.block_m),
                **rows, **more, **arguments, OUT=out, **strides("o", "bhmd", out),
            )  # fmt: skip
        return {**rows, **self.operands, **self.captured, **self.lengths, **self.seeded, **more, "LSE": lse}

    def dq(self, rows: dict[str, Any], out: Tensor | None = None) -> Tensor:
        """With `out` DELTA of the rows is computed too."""
        dq = gradient_like(self.query)
        if _is_empty(self.b, self.h, self.m):
            return dq
        tile = self.tile("backward_dq")
        made = {} if out is None else {"OUT": out, **strides("o", "bhmd", out)}
        self.launch(
            "backward_dq", tile, self.b * self.h * cdiv(self.m, tile.block_m), out is not None,
            **rows, **made, **self.dims(tile), DQ=dq, **strides("dq", "bhmd", dq),
        )  # fmt: skip
        return dq

    def beside_dq(self, needs: Sequence[bool]) -> tuple[Gradient, int] | None:
        """The gradient of a matrix that is summed where dQ is, and the batches it is a sum of."""
        if self.mapped or not needs[0] or _is_empty(self.b, self.h, self.m, self.n):
            return None
        numbers = [c for c, needed in enumerate(needs[3:]) if needed]
        numbers += [i for i, n in self._looked_up() if n.head in numbers]
        return matrix_beside_dq(self.spec, numbers, self.b, self.h, self.m, shared_memory(self.query.device))

    def dq_and_matrix(self, rows: dict[str, Any], gradient: Gradient, batches: int) -> Tensor:
        """dQ; the other gradient is kept in `sums`."""
        dq, capture = gradient_like(self.query), self.captures[gradient.load.head]
        whole = self._is_whole(gradient, capture)
        new = self.query.new_empty if self.program.keep is None else self.query.new_zeros  # some tiles are not visited
        grad = new((self.b // batches, self.h, self.m, self.n), dtype=capture.dtype if whole else torch.float32)
        tile = self.tile("backward_dq_matrix", batches)
        self.launch(
            "backward_dq_matrix", tile, self.b // batches * self.h * cdiv(self.m, tile.block_m), gradient, batches,
            **rows, **self.dims(tile), DQ=dq, **strides("dq", "bhmd", dq), GRAD=grad,
        )  # fmt: skip
        self.sums[gradient] = grad
        return dq

    def _is_whole(self, gradient: Gradient, capture: Tensor) -> bool:
        """Is it all of the capture's gradient, element by element?"""
        number = gradient.load.head
        in_sink = self.program.sink is not None and number in captures_in(self.program.sink)
        elsewhere = in_sink or any(n.head == number for _, n in self._looked_up())
        return len(gradients_of(self.program, number)) == 1 and not elsewhere and self._covers(gradient, capture)

    def dkdv(self, rows: dict[str, Any]) -> tuple[Tensor, Tensor]:
        dk, dv = gradient_like(self.key), gradient_like(self.value)
        if _is_empty(self.b, self.h, self.n):
            return dk, dv
        tile = self.tile("backward_dkdv")
        rows = {**rows, "NUM_BK": self.b * self.hk}
        del rows["NUM_BH"]
        self.launch(
            "backward_dkdv", tile, self.b * self.hk * cdiv(self.n, tile.block_n),
            **rows, **self.dims(tile), DK=dk, **strides("dk", "bhnd", dk), DV=dv, **strides("dv", "bhnd", dv),
        )  # fmt: skip
        return dk, dv

    def sums_in_one_tile(self, needs: Sequence[bool]) -> tuple[Gradient, ...] | None:
        """The sums that `small` computes beside dQ, dK and dV; None where it cannot compute all that is needed."""
        if self.mapped or not all(needs[:3]) or not is_small(self.spec, self.m, self.n, self.lengths["G"]):
            return None
        numbers = [c for c, needed in enumerate(needs[3:]) if needed]
        return sums_of(self.program, [*numbers, *(i for i, n in self._looked_up() if n.head in numbers)])

    def small(self, grad_out: Tensor, gradients: tuple[Gradient, ...]) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (gradient_like(t) for t in (self.query, self.key, self.value))
        chunks = chunks_of_batches(self.b, self.h, bool(gradients))
        totals = [self.query.new_empty((chunks, self.h, self.m, self.n), dtype=torch.float32) for _ in gradients]
        tile = tile_of(self.m, self.n, bool(gradients))
        if not _is_empty(self.b, self.h):
            lengths = {k: v for k, v in self.lengths.items() if k != "NUM_BH"}
            dims = {k: v for k, v in self.dims(tile).items() if k not in ("GROUP", "SHORT")}
            self.launch(
                "backward_small", tile, self.h * chunks, *gradients,
                **self.operands, **self.captured, **self.seeded, **lengths, **dims, B=self.b, CHUNKS=chunks,
                DO=grad_out, **strides("g", "bhmd", grad_out), DQ=dq, **strides("dq", "bhmd", dq),
                DK=dk, **strides("dk", "bhnd", dk), DV=dv, **strides("dv", "bhnd", dv),
                **{f"GRAD{i}": t for i, t in enumerate(totals)},
            )  # fmt: skip
        for gradient, total in zip(gradients, totals):
            self.sums[gradient] = total.sum((0,) if "h" in gradient.axes else (0, 1), keepdim=True)
        return dq, dk, dv

    def _looked_up(self) -> list[tuple[int, Load]]:
        """The captures that were gathered from tables, and the load each stands for."""
        return list(enumerate(self.tables, len(self.captures) - len(self.tables)))

    def capture_gradient(self, number: int, capture: Tensor, rows: dict[str, Any], lse: Tensor) -> Tensor:
        """The sum over all places where the capture is read, in its dtype."""
        gradients = gradients_of(self.program, number)
        looked_up = [(i, n) for i, n in self._looked_up() if n.head == number]
        in_sink = self.program.sink is not None and number in captures_in(self.program.sink)
        if gradients and self._is_whole(gradients[0], capture):
            return self._place_gradient(gradients[0], rows, capture, capture.dtype).to(capture.dtype)
        total = capture.new_zeros(capture.shape, dtype=torch.float32)
        for gradient in gradients:
            found = self._place_gradient(gradient, rows, capture, torch.float32)
            _place(total, gradient, found).add_(found)
        for made, node in looked_up:
            gradient = Gradient(node, tuple(n for n in INDEX_NAMES if n in names_in(*node.args)))
            partial = self.capture_gradient(made, self.captures[made], rows, lse).to(torch.float32)
            found = self._by_position(partial, gradient, capture)
            _place(total, gradient, found).add_(found)
        if in_sink:
            self._add_sink_gradient(total, number, rows["DELTA"], lse)
        return total.to(capture.dtype)

    def _place_gradient(self, gradient: Gradient, rows: dict[str, Any], capture: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of one place: the dimensions of the capture that are not indexed by a constant, in order."""
        return self._by_position(self._partial(gradient, rows, capture, dtype), gradient, capture)

    def _by_position(self, partial: Tensor, gradient: Gradient, capture: Tensor) -> Tensor:
        values, axes = _reduce(partial, gradient)
        if gradient.scattered:
            searched = [a for a in axes if isinstance(a, str)]
            rest = [a for a in axes if not isinstance(a, str)]
            values = values.permute([axes.index(a) for a in searched + rest])
            if self._counts_diagonals(gradient, capture):
                values = sum_by_diagonal(values.movedim((0, 1), (-2, -1)))
                axes = [*rest, *gradient.scattered]
                return values.permute([axes.index(d) for d in sorted(axes)])  # type: ignore[type-var]
            index, size = self._positions(gradient.scattered, gradient.load, searched, capture)
            shape = values.shape[len(searched) :]
            values = sum_by_position(values.reshape(index.shape[0], *shape), index, size)
            values = values.reshape([capture.shape[d] for d in gradient.scattered] + list(shape))
            axes = [*gradient.scattered, *rest]
        return values.permute([axes.index(d) for d in sorted(axes)])  # type: ignore[type-var]

    def _counts_diagonals(self, gradient: Gradient, capture: Tensor) -> bool:
        """Is the scattered dimension indexed by `kv_idx - q_idx + (q_len - 1)`, and as long as there are diagonals?"""
        sizes = {"q_len": self.m, "kv_len": self.n, **{f"s{i}": s for i, s in enumerate(self.sizes)}}
        dim, *others = gradient.scattered
        offset = None if others else diagonal_offset(gradient.load.args[dim], sizes)
        return offset is not None and bool(offset == self.m - 1 and capture.shape[dim] == self.m + self.n - 1)

    def _covers(self, gradient: Gradient, capture: Tensor) -> bool:
        """Every element of the capture is read, each by a point of its own."""
        lengths = self._lengths()
        whole = all(capture.shape[d] == lengths[axis] for d, axis in gradient.plain.items())
        return whole and len(gradient.plain) + len(gradient.grouped) == capture.dim()

    def _positions(
        self, dims: Sequence[int], load: Load, searched: Sequence[str], capture: Tensor
    ) -> tuple[Tensor, Size]:
        """The flat position in these dimensions for every point of the searched axes, and how many positions exist."""
        run = self._evaluator().run
        flat = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=capture.device)
        size: Size = 1
        for d in dims:
            # a position beyond the end is read by a branch that is not taken, and has no gradient
            at = run(load.args[d]).clamp(torch.zeros_like(flat), torch.zeros_like(flat) + (capture.shape[d] - 1))
            flat, size = flat * capture.shape[d] + at, size * capture.shape[d]
        shape = [length if n in searched else 1 for n, length in self._lengths().items()]
        return flat.expand(shape).reshape(-1), size

    def _lengths(self) -> dict[str, Size]:
        return dict(zip(INDEX_NAMES, (self.b, self.h, self.m, self.n)))

    def _evaluator(self) -> Evaluator:
        return Evaluator(self._env(), self.captures, self.sizes, torch.float32)

    def _env(self) -> dict[str, Any]:
        """The index names as tensors along their own axes, so that symbolic lengths stay symbols."""
        env: dict[str, Any] = {"q_len": self.m, "kv_len": self.n}
        for axis, (name, length) in enumerate(self._lengths().items()):
            shape = [1, 1, 1, 1]
            shape[axis] = length
            env[name] = torch.arange(length, device=self.query.device).view(shape)
        return env

    def _partial(self, gradient: Gradient, rows: dict[str, Any], capture: Tensor, dtype: torch.dtype) -> Tensor:
        """[groups, B, H, M, N] with size 1 where summed: b and h are left for `_reduce` unless q_idx and kv_idx vary.

        A tile's sum over batches and heads is cut into chunks where there are few tiles; their sum has a fixed order too.
        """
        if gradient in self.sums:
            return self.sums[gradient]
        tile = self.tile("backward_capture")
        tiles_m, tiles_n = cdiv(self.m, tile.block_m), cdiv(self.n, tile.block_n)
        groups, chunks = [capture.shape[d] for d in gradient.grouped], 1
        shape = [*groups, self.b, self.h, self.m, self.n]
        if gradient.mode == "tile":
            shape[-4:-2] = (size if n in gradient.axes else 1 for n, size in (("b", self.b), ("h", self.h)))
            programs = math.prod(shape[:-2]) * tiles_m * tiles_n
            chunks = chunks_of(programs, self.b * self.h)
            if chunks > 1:
                shape.insert(-2, chunks)
                dtype, programs = torch.float32, programs * chunks
        elif gradient.mode == "row":
            shape[-1], dtype = 1, torch.float32
            programs = self.b * self.h * tiles_m
        else:
            shape[-2], dtype = 1, torch.float32
            programs = self.b * self.h * tiles_n
        grad = self.query.new_empty(shape, dtype=dtype)
        if _is_empty(*groups, self.b, self.h, self.m, self.n):
            return grad.zero_()
        sizes = {f"SIZE_{d}": size for d, size in zip(gradient.grouped, groups)}
        sizes |= {"CHUNKS": chunks} if gradient.mode == "tile" else {}
        self.launch("backward_capture", tile, programs, gradient, **rows, **sizes, **self.dims(tile), GRAD=grad)
        return grad.sum(-3) if chunks > 1 else grad

    def _add_sink_gradient(self, total: Tensor, number: int, delta: Tensor, lse: Tensor) -> None:
        """dsink = -exp(sink - lse) * delta, [B, H, M], summed over all places where the sink reads the capture."""
        sink = self.program.sink
        assert sink is not None
        run = self._evaluator().run
        slope = -torch.exp(run(sink) - lse.unsqueeze(-1)) * delta.unsqueeze(-1)
        if self.program.guarded:
            slope = torch.where(lse.unsqueeze(-1) == -torch.inf, 0.0, slope)
        for gradient in gradients_of(self.program, number, ("sink",)):
            found = self._by_position(slope * run(derivative(sink, gradient.load)), gradient, total)
            _place(total, gradient, found).add_(found)


def _reduce(partial: Tensor, gradient: Gradient) -> tuple[Tensor, list[int | str]]:
    """From [groups, B, H, M, N] to what the element depends on, and what each axis is: a dimension or a searched name."""
    first = len(gradient.grouped)
    unread = [first + i for i, n in enumerate(INDEX_NAMES) if n not in gradient.axes]
    if unread:  # a tile's b and h are summed already
        partial = partial.sum(unread) if gradient.mode != "tile" else partial.squeeze(tuple(unread))
    dims = {axis: d for d, axis in gradient.plain.items()}
    return partial, [*gradient.grouped, *(dims.get(axis, axis) for axis in gradient.axes)]


def _place(total: Tensor, gradient: Gradient, found: Tensor) -> Tensor:
    """The part of the capture's gradient that `found` belongs to, as a view: loads may read a slice from the start."""
    axis = found.dim()
    for dim in reversed(range(len(gradient.load.args))):
        index = gradient.load.args[dim]
        if isinstance(index, Const):
            total = total.select(dim, index.head)
        else:
            axis -= 1
            total = total.narrow(dim, 0, found.shape[axis])
    return total


def split_length(batches: Size, n: Size, block: int, resident: int) -> int:
    """Keys for each program, a multiple of the block, so that programs come in full waves of `resident`.

    The longest parts that leave little of the last wave idle: every part starts its loads anew.
    """
    if not (isinstance(batches, int) and isinstance(n, int)):
        return 512
    most = max(1, min(cdiv(4 * resident, batches), cdiv(n, 256)))
    busy = {s: batches * s / (cdiv(batches * s, resident) * resident) for s in range(1, most + 1)}
    splits = next(s for s, share in busy.items() if share >= 0.85 * max(busy.values()))
    return cdiv(cdiv(n, splits), block) * block


def chunks_of(programs: Size, terms: Size) -> int:
    """Into how many parts a sum of at most `terms` is cut, so that enough programs run at the same time."""
    if not isinstance(programs, int) or programs == 0:
        return 1
    wanted = cdiv(SUMMING, programs)
    return max(1, min(wanted, terms) if isinstance(terms, int) else wanted)


@cache
def _remember_accesses() -> None:
    compat.remember_kernel_accesses(is_rendered)


@cache
def _with_options(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """The kernel with one configuration.

    Options given at a launch would make a new kernel object of each, and PyTorch parses the source of every object.
    """
    import triton

    return triton.autotune([triton.Config({}, num_warps=num_warps, num_stages=num_stages)], key=[])(kernel)


def launch_kernel(kernel: Any, tile: Tile, programs: Size, interpret: bool, **arguments: Any) -> None:
    if interpret:
        kernel[(programs,)](**arguments)
    else:
        _remember_accesses()
        traceable = torch.library.wrap_triton(_with_options(kernel, tile.num_warps, tile.num_stages))
        traceable[(programs,)](**arguments)


def strides(letter: str, axes: str, tensor: Tensor) -> dict[str, Size]:
    """{"stride_qb": ..., ...}"""
    return {f"stride_{letter}{a}": _stride(tensor, d) for d, a in enumerate(axes)}


def capture_facts(captures: Sequence[Tensor]) -> tuple[CaptureFact, ...]:
    return tuple(CaptureFact(_name(c.dtype), c.dim()) for c in captures)


def capture_arguments(captures: Sequence[Tensor]) -> dict[str, Any]:
    """{"C0": ..., "stride_c0_0": ..., ...}"""
    arguments: dict[str, Any] = {}
    for i, c in enumerate(captures):
        arguments |= {f"C{i}": c, **{f"stride_c{i}_{d}": _stride(c, d) for d in range(c.dim())}}
    return arguments


def along_keys(number: int, capture: Tensor, program: Program) -> Tensor:
    """A matrix with gaps between neighbours in both directions, such as [M, N, H] read as [H, M, N], without them.

    Its tiles are read many times: each element from a sector of its own, if it were left as it is.
    """
    loads = loads_of(program, number)
    index = loads[0].args if len(loads) == 1 else ()
    steps = [found[:2] if (found := affine(i)) is not None else (0, 0) for i in index]
    rows, keys = ([d for d, step in enumerate(steps) if abs(step[axis]) == 1] for axis in (0, 1))
    if len(keys) != 1 or not {"q_idx", "kv_idx"} <= names_in(*index):
        return capture
    beside = [capture.stride(d) for d in {*rows, *keys}]
    if any(isinstance(s, int) and s < 2 for s in beside) or not isinstance(capture.stride(keys[0]), int):
        return capture
    held = capture
    for d in range(capture.dim()):
        if isinstance(capture.stride(d), int) and capture.stride(d) == 0:
            held = held.narrow(d, 0, 1)  # broadcast: once is enough
    return held.movedim(keys[0], -1).contiguous().movedim(-1, keys[0]).expand(capture.shape)


def _stride(tensor: Tensor, dim: int) -> Size:
    """0 where it does not matter and is beyond int32: Inductor of torch 2.11 fails on such a number."""
    stride, size = tensor.stride(dim), tensor.shape[dim]
    unread = isinstance(stride, int) and isinstance(size, int) and size == 1 and stride > INT32_MAX
    return 0 if unread else stride


def cdiv(a: Size, b: int) -> Size:
    return (a + b - 1) // b


def divides(block: int, length: Size) -> bool:
    """Known to divide; a symbolic length counts as ragged, which is right for every length."""
    return isinstance(length, int) and length % block == 0


def _is_empty(*sizes: Size) -> bool:
    return any(isinstance(s, int) and s == 0 for s in sizes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _text(program: Program) -> str:
    return str(program)


@cache
def _checked(spec: KernelSpec) -> KernelSpec:
    """One object per distinct spec, so that its parsed program is shared."""
    return replace(spec)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_SHARED
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or (64 * 1024 if torch.version.hip else 99 * 1024)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
