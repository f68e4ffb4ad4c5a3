"""Attention in plain PyTorch over tiles of query rows: any device, any program, never a tensor of M x N scores.

    out, lse = forward(query, key, value, [slopes], [], None, parse("score = score + c0[h] * (kv_idx - q_idx)"), False)

Computes in float32 (float64 for float64 operands). A tile holds whole rows, so its softmax needs no rescaling and the
backward repeats it instead of reading `lse`. Keys that `score/region.py` proves dropped for a tile are not touched, nor
those under a finite fill (`score/fill.py`) where all rows lie clear of it.
Deterministic. Dropout bits are a function of the seed and the tile, and the tiles one of shapes and program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import cpu_sdpa
from .scatter import add_by_index, sum_by_diagonal
from .score.evaluate import Evaluator, along, diagonals_read, evaluate_load, fill_top
from .score.expr import KV, SCORE, Expr, Load, Program, captures_in, const
from .score.fill import MARGIN, MARGIN64, Fill, fill_of
from .score.grad import derivative, loads_of
from .score.region import Region, bound_value, kv_region

TILE_ELEMENTS = 4 << 20  # scores of one tile: 16 MB in float32
MIN_ROWS = 16
BOUNDED_TILES = 8  # at least so many tiles where a region lets tiles skip keys
_ZERO = const(0.0)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    seed: Tensor | None,
    program: Program,
    bmhd: bool,
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, Dv] in the dtype of query and lse [B, H, M] float32, for query [B, H, M, D], key [B, Hk, N, D].

    out is contiguous, or with `bmhd` the transpose(1, 2) of a contiguous [B, M, H, Dv].
    """
    plain = cpu_sdpa.plain_attention(query, key, value, program)
    if plain is not None:
        return cpu_sdpa.forward(query, key, value, *plain, bmhd=bmhd)
    job = _Job(query, key, value, captures, sizes, seed, program)
    out = _empty_out(query, value.shape[-1], bmhd)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for part in job.batches():
        for tile in part.tiles():
            p, tile_lse = tile.softmax()
            w = tile.weights(p)
            if w.shape[-1] == 0 and not program.guarded:
                # no key in reach: the product over nothing is 0, the softmax over nothing NaN
                rows = torch.where(tile_lse.isnan(), torch.nan, 0.0)  # [B, H, m, 1]
            else:
                rows = part.unfold(part.fold(w) @ tile.v, tile.count)
            out[part.batch, :, tile.rows] = rows.to(out.dtype)
            lse[part.batch, :, tile.rows] = tile_lse.squeeze(-1)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    program: Program,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients of query, key, value and captures that `needs` asks for, in order, each like its input."""
    plain = cpu_sdpa.plain_attention(query, key, value, program)
    if plain is not None:
        unread = [c.new_zeros(c.shape) for c, n in zip(captures, needs[3:], strict=True) if n]
        return cpu_sdpa.backward(grad_out, query, key, value, out, lse, *plain, needs=needs) + unread
    job = _Job(query, key, value, captures, sizes, seed, program)
    inputs = [query, key, value, *captures]
    grads = [t.new_zeros(t.shape, dtype=job.dtype) if n else None for t, n in zip(inputs, needs, strict=True)]
    slopes = _Slopes(program, [i for i, n in enumerate(needs[3:]) if n])
    for part in job.batches():
        for tile in part.tiles():
            _backward_tile(job, part, tile, grad_out[part.batch, :, tile.rows].to(job.dtype), grads, slopes)
    if grads[2] is not None:
        _spread_nan(grads[2], lse)
    return [g.to(t.dtype) for g, t in zip(grads, inputs, strict=True) if g is not None]


def _empty_out(query: Tensor, value_dim: int, bmhd: bool) -> Tensor:
    batch, heads, rows, _ = query.shape
    if bmhd:
        return query.new_empty(batch, rows, heads, value_dim).transpose(1, 2)
    return query.new_empty(batch, heads, rows, value_dim)


# *** tiles ***


@dataclass(frozen=True)
class _Job:
    """The arguments of one call and how it is cut."""

    query: Tensor
    key: Tensor
    value: Tensor
    captures: Sequence[Tensor]
    sizes: Sequence[int]
    seed: Tensor | None
    program: Program

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @cached_property
    def near(self) -> Region:
        """The keys that are dropped by no mask and covered by no finite fill."""
        return kv_region(self.program if self.fill is None else self.fill.inner(self.program))

    @property
    def fill(self) -> Fill | None:
        return fill_of(self.program)

    @cached_property
    def clear(self) -> Tensor:
        """Where the maximum of a row is greater, no filled key has a weight. []"""
        assert self.fill is not None
        top = fill_top(self.fill.top, self.query, self.key, self.captures, self.sizes, self.dtype)
        return top + (MARGIN64 if self.dtype == torch.float64 else MARGIN)

    def batches(self) -> Iterator[_Part]:
        """Slices of the batch, one unless MIN_ROWS rows of the whole batch are more than a tile should hold."""
        batch, heads, rows, _ = self.query.shape
        row = max(1, heads * self.key.shape[2])
        size = min(max(1, batch), max(1, TILE_ELEMENTS // (row * MIN_ROWS)))
        height = max(MIN_ROWS, TILE_ELEMENTS // (row * size) // MIN_ROWS * MIN_ROWS)
        if self.near.is_bounded:
            height = min(height, max(4 * MIN_ROWS, -(-rows // BOUNDED_TILES)))
        for b in range(0, batch, size):
            yield _Part(self, slice(b, min(b + size, batch)), height)


class _Part:
    """A slice of the batch. Heads that share keys are folded into rows, [B, H, m, X] to [B, Hk, G * m, X]."""

    def __init__(self, job: _Job, batch: slice, height: int) -> None:
        self.job, self.batch, self.height = job, batch, height
        self.k, self.v = job.key[batch].to(job.dtype), job.value[batch].to(job.dtype)
        self.heads, self.kv_heads = job.query.shape[1], job.key.shape[1]

    def fold(self, rows: Tensor) -> Tensor:
        batch, heads, count, size = rows.shape
        return rows.reshape(batch, self.kv_heads, heads // self.kv_heads * count, size)

    def unfold(self, folded: Tensor, count: int) -> Tensor:
        return folded.view(folded.shape[0], self.heads, count, folded.shape[-1])

    def tiles(self) -> Iterator[_Tile]:
        job, total = self.job, self.job.query.shape[2]
        tiles_of_part = -(-total // self.height)
        for i, start in enumerate(range(0, total, self.height)):
            rows, number = slice(start, min(start + self.height, total)), self.batch.start * tiles_of_part + i
            tile = _Tile(self, rows, self._keys(job.near, rows), number)
            if job.fill is not None and not tile.is_clear():
                tile = _Tile(self, rows, self._keys(kv_region(job.program), rows), number)
            yield tile

    def _keys(self, region: Region, rows: slice) -> slice:
        """The keys of the region for these rows."""
        keys = self.k.shape[2]
        values = {"q0": rows.start, "q1": rows.stop - 1, "q_len": self.job.query.shape[2], "kv_len": keys}
        values |= {f"s{j}": int(s) for j, s in enumerate(self.job.sizes)}
        lo = 0 if region.lo is None else bound_value(region.lo, values)
        hi = keys if region.hi is None else bound_value(region.hi, values)
        lo = min(max(lo, 0), keys)
        return slice(lo, max(lo, min(hi, keys)))


class _Tile:
    """Rows of queries against the keys they can reach: count = m rows and n keys."""

    def __init__(self, part: _Part, rows: slice, keys: slice, number: int) -> None:
        job = part.job
        self.part, self.program, self.rows, self.keys, self.number = part, job.program, rows, keys, number
        self.count = rows.stop - rows.start
        self.q = part.fold(job.query[part.batch, :, rows].to(job.dtype))
        self.k, self.v = part.k[:, :, keys], part.v[:, :, keys]
        x = part.unfold(self.q @ self.k.transpose(-1, -2), self.count)
        self.shape = x.shape  # [B, H, m, n]
        self.env = {
            "score": x,
            "b": range(part.batch.start, part.batch.stop),
            "h": range(part.heads),
            "q_idx": range(rows.start, rows.stop),
            "kv_idx": range(keys.start, keys.stop),
            "q_len": job.query.shape[2],
            "kv_len": part.k.shape[2],
        }
        self._evaluator = Evaluator(self.env, job.captures, job.sizes, job.dtype)

    def run(self, expr: Expr) -> Tensor:
        """The value, broadcastable to [B, H, m, n]; nodes shared between expressions are computed once."""
        return self._evaluator.run(expr)

    def scores(self) -> Tensor:
        """[B, H, m, n], -inf where not kept"""
        s = self.run(self.program.score).to(self.q.dtype).expand(self.shape)
        return s if self.program.keep is None else torch.where(self.run(self.program.keep), s, -torch.inf)

    def is_clear(self) -> bool:
        """Whether filled keys that the tile leaves out have no weight in any row."""
        job, keys = self.part.job, self.part.k.shape[2]
        if self.keys == slice(0, keys):
            return True
        return self.shape[-1] > 0 and bool((self.scores().amax(-1) > job.clear).all())

    def softmax(self) -> tuple[Tensor, Tensor]:
        """p [B, H, m, n] before dropout and weight, and lse [B, H, m, 1]."""
        s = self.scores()
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
        sink = self.sink()
        no_key = top == -torch.inf
        if sink is not None:
            top = torch.maximum(top, sink)
        if not self.program.unsaved:
            no_key = top == -torch.inf
        top.masked_fill_(no_key, 0.0)  # keeps NaN out where a row without keys is asked to be 0
        p = torch.sub(s, top).exp_()
        total = p.sum(-1, keepdim=True)
        if sink is not None:
            total += torch.exp(sink - top)
        lse = top + total.log()
        # without keys total is 0; 0 / NaN is NaN and 0 / 1 is 0
        return p.div_(total.masked_fill_(no_key, 1.0 if self.program.guarded else torch.nan)), (
            lse.masked_fill_(no_key, -torch.inf if self.program.guarded else torch.nan)
        )

    def sink(self) -> Tensor | None:
        """[B, H, m, 1]"""
        if self.program.sink is None:
            return None
        return self.run(self.program.sink).to(self.q.dtype).expand(*self.shape[:-1], 1)

    def weights(self, p: Tensor) -> Tensor:
        """What multiplies the value rows. [B, H, m, n]"""
        dropped = self.dropout(p)
        return dropped if self.program.weight is None else dropped * self.run(self.program.weight)

    def dropout(self, values: Tensor) -> Tensor:
        """Zero or scaled up, the same elements each time for one seed. [B, H, m, n]"""
        if not self.program.drop:
            return values
        if self.program.drop >= 1.0:
            return values * 0.0
        return values * self._drop_mask().to(values.dtype).mul_(1.0 / (1.0 - self.program.drop))

    def _drop_mask(self) -> Tensor:
        seed = self.part.job.seed
        assert seed is not None, "dropout needs a seed"
        generator = torch.Generator(seed.device)
        generator.manual_seed(_mix(*seed.tolist(), self.number))
        return torch.rand(self.shape, generator=generator, device=seed.device) >= self.program.drop


def _mix(*words: int) -> int:
    """One non-negative 63-bit number of several: an FNV-like chain, then a finaliser against nearby seeds."""
    mixed = 0xCBF29CE484222325
    for w in words:
        mixed = ((mixed ^ (w & (2**64 - 1))) * 0x9E3779B97F4A7C15 + 1) & (2**64 - 1)
        mixed ^= mixed >> 29
    return mixed >> 1


# *** gradients ***


class _Slopes:
    """The derivatives that a backward needs, found once. Each table maps a load to d part / d load."""

    def __init__(self, program: Program, captures: list[int]) -> None:
        self.score = derivative(program.score, SCORE)
        self.of_score = self._by_load(program, "score", captures)
        self.of_weight = self._by_load(program, "weight", captures)
        self.of_sink = self._by_load(program, "sink", captures)

    @staticmethod
    def _by_load(program: Program, part: str, captures: list[int]) -> dict[Load, Expr]:
        root = getattr(program, part)
        if root is None:
            return {}
        found = {n: derivative(root, n) for c in captures if c in captures_in(root) for n in loads_of(program, c)}
        return {n: d for n, d in found.items() if d is not _ZERO}


def _backward_tile(
    job: _Job, part: _Part, tile: _Tile, grad: Tensor, grads: list[Tensor | None], slopes: _Slopes
) -> None:
    """Adds one tile's gradients. grad [B, H, m, Dv]"""
    program, grad = job.program, part.fold(grad)
    p, lse = tile.softmax()
    if grads[2] is not None:
        grads[2][part.batch, :, tile.keys] += part.fold(tile.weights(p)).transpose(-1, -2) @ grad
    dw = part.unfold(grad @ tile.v.transpose(-1, -2), tile.count)
    dp = tile.dropout(dw if program.weight is None else dw * tile.run(program.weight))
    pdp = p * dp
    delta = pdp.sum(-1, keepdim=True)
    ds = pdp.sub_(p * delta)
    by_load = {n: _kept(tile, ds * tile.run(d)) for n, d in slopes.of_score.items()}
    for n, d in slopes.of_weight.items():
        # where keep is false p is 0, but a row without keys is NaN throughout
        dropped = tile.dropout(p) * dw * tile.run(d)
        by_load[n] = by_load[n] + dropped if n in by_load else dropped
    for n, g in by_load.items():
        _scatter_load(tile, n, g, grads[3 + n.head])
    sink = tile.sink()
    for n, d in slopes.of_sink.items():
        share = torch.exp(sink - lse).masked_fill_(lse == -torch.inf, 0.0)
        _scatter_load(tile, n, -share * delta * tile.run(d), grads[3 + n.head])
    if grads[0] is None and grads[1] is None:
        return
    dx = part.fold(_kept(tile, ds * tile.run(slopes.score)))
    if grads[0] is not None:
        grads[0][part.batch, :, tile.rows] = part.unfold(dx @ tile.k, tile.count)
    if grads[1] is not None:
        grads[1][part.batch, :, tile.keys] += dx.transpose(-1, -2) @ tile.q


def _kept(tile: _Tile, values: Tensor) -> Tensor:
    """0 where keep is false, also for rows without keys, whose softmax is NaN, and for slopes that are not finite."""
    return values if tile.program.keep is None else torch.where(tile.run(tile.program.keep), values, 0.0)


def _scatter_load(tile: _Tile, node: Load, values: Tensor, grad: Tensor | None) -> None:
    """Adds values, broadcastable to [B, H, m, n], to the elements of `grad` that the load reads."""
    assert grad is not None
    target = evaluate_load(node, tile.env, grad)
    if target is not None:
        target += values.sum_to_size(target.shape)
        return
    found = diagonals_read(node, tile.env, tile.part.job.sizes, grad)
    if found is not None:
        dim, positions = found
        target = evaluate_load(along(node, dim, KV), {**tile.env, "kv_idx": positions}, grad)
        assert target is not None
        target += sum_by_diagonal(values.sum_to_size(*target.shape[:2], *tile.shape[2:])).unsqueeze(2)
        return
    flat = torch.zeros((), dtype=torch.int64, device=grad.device)
    for i, stride in zip(node.args, grad.stride(), strict=True):
        flat = flat + tile.run(i).to(torch.int64) * stride
    flat = flat.expand(torch.broadcast_shapes(flat.shape, (1, 1, 1, 1)))
    # the sum over what the index does not depend on first; a value that does not depend on it counts once per reader
    values = values.expand(torch.broadcast_shapes(values.shape, flat.shape)).sum_to_size(flat.shape)
    add_by_index(grad.view(-1), flat.reshape(-1), values.reshape(-1))


def _spread_nan(grad_value: Tensor, lse: Tensor) -> None:
    """A NaN row has NaN weights for every key, also for those the tile did not touch. grad_value [B, Hk, N, Dv]"""
    batch, kv_heads = grad_value.shape[:2]
    if lse.numel():
        bad = lse.reshape(batch, kv_heads, -1).isnan().any(-1)
        grad_value.masked_fill_(bad[:, :, None, None], torch.nan)
