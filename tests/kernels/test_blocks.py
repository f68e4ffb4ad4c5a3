"""Block maps: their lists against a count in PyTorch, and kernels that walk them against kernels that walk everything."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: run `pytest tests/kernels` on its own", allow_module_level=True)
pytest.importorskip("triton")

from test_interpret import Shape, autograd, compare, keep, operands, randn

from flash_fx.kernels import launch, tiles
from flash_fx.kernels.blocks import block_map
from flash_fx.kernels.tiles import Tile
from flash_fx.score import blocks
from flash_fx.score.blocks import block_mask
from flash_fx.score.evaluate import evaluate
from flash_fx.score.text import parse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
SHAPE = Shape(b=2, h=2, hk=1, m=270, n=300)
IDS = torch.tensor([[0] * 130 + [1] * 40 + [2] * 130, [7] * 256 + [8] * 44])
CASES = {
    "documents": ("score = score * 0.25; keep = c0[b, q_idx] == c0[b, kv_idx]", [IDS]),
    "causal documents": ("score = score * 0.25; keep = (c0[b, q_idx] == c0[b, kv_idx]) & (kv_idx <= q_idx)", [IDS]),
    "padding": ("score = score * 0.25; keep = kv_idx < c0[b]", [torch.tensor([129, 300])]),
    "by head": ("score = score * 0.25; keep = q_idx - kv_idx < c0[h]; empty = 0.0", [torch.tensor([3, -150])]),
    "mask tensor": ("score = score * 0.25; keep = c0[q_idx, kv_idx]", [keep(0.5, 270, 300).tril(20)]),
    "periodic": ("score = score * 0.25; keep = q_idx // 128 % 2 == kv_idx // 128 % 2", []),
    "finite fill": ("score = where(kv_idx < c0[b], score * 0.25, -1e9)", [torch.tensor([100, 299])]),
    "filled rows": (
        "score = where(c0[b, q_idx] & (kv_idx < 260), score * 0.25, -1e9)",
        [torch.arange(270).expand(2, -1) < torch.tensor([[140], [0]])],
    ),
    "bias and sink": (
        "score = score * 0.25 + c1[h, q_idx, kv_idx]; keep = c0[b, q_idx] == c0[b, kv_idx]; sink = c2[h]",
        [IDS, randn(2, 270, 300), randn(2)],
    ),
}


def lists_of(program, captures: list[Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    """What `block_map` must give."""
    env = {"b": range(shape.b), "h": range(shape.h), "q_idx": range(shape.m), "kv_idx": range(shape.n)}
    held = evaluate(program.keep, {**env, "q_len": shape.m, "kv_len": shape.n}, captures)
    by = [size if name in str(program) else 1 for name, size in (("b]", shape.b), ("b,", shape.b), ("[h", shape.h))]
    held = held.expand(max(by[:2]), by[2], shape.m, shape.n)
    size = blocks.BLOCK
    rows, columns = -(-shape.m // size), -(-shape.n // size)
    kinds = torch.zeros(*held.shape[:2], rows, columns, dtype=torch.int64)
    for r in range(rows):
        for c in range(columns):
            part = held[..., r * size : (r + 1) * size, c * size : (c + 1) * size].flatten(2)
            kinds[..., r, c] = part.any(-1).long() + (part.all(-1) & (part.shape[-1] == size * size)).long()
    return _sorted(kinds), _sorted(kinds.mT)


def _sorted(kinds: Tensor) -> Tensor:
    order = kinds.argsort(dim=-1, descending=True, stable=True)
    counts = [(kinds == blocks.FULL).sum(-1, keepdim=True), (kinds > blocks.EMPTY).sum(-1, keepdim=True)]
    return torch.cat([*counts, order], -1).int()


@pytest.mark.parametrize("name", CASES)
def test_lists(name: str) -> None:
    text, captures = CASES[name]
    mask = block_mask(parse(text))
    assert mask is not None
    read = [captures[i] for i in mask.captures]
    query, key, *_ = operands(SHAPE, torch.float32)
    found = block_map(query, key, read, [], mask.program)
    for ours, expected in zip(found, lists_of(mask.program, read, SHAPE), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", CASES)
def test_kernels_that_walk_lists(name: str) -> None:
    """Forward and every gradient against float64, and the same bits as without a map where no block order differs."""
    text, captures = CASES[name]
    program, (q, k, v, g) = parse(text), operands(SHAPE, torch.float32)
    mask = block_mask(program)
    assert mask is not None
    needs = [True] * 3 + [c.is_floating_point() for c in captures]
    with tiles.override(Tile(64, 64, 4, 1)):
        maps = block_map(q, k, [captures[i] for i in mask.captures], [], mask.program)
        out, lse = launch.forward(q, k, v, captures, [], None, program, False, maps[0])
        grads = launch.backward(g, q, k, v, captures, [], None, out, lse, program, needs, *maps)
    tensors = (q, k, v, g)
    compare(
        [out, lse, *grads], autograd(tensors, captures, [], program, torch.float32),
        autograd(tensors, captures, [], program, torch.float64), torch.float32,
    )  # fmt: skip


def test_blocks_that_a_map_leaves_out_are_not_read() -> None:
    program, (q, k, v, _) = (
        parse("score = score * 0.25; keep = c0[b, q_idx] == c0[b, kv_idx]"),
        operands(SHAPE, torch.float32),
    )
    ids = (torch.arange(300) // 128).expand(2, -1).contiguous()
    mask = block_mask(program)
    assert mask is not None
    kv_blocks, _ = block_map(q, k, [ids], [], mask.program)
    k[:, :, 128:], v[:, :, 128:] = torch.nan, torch.nan
    out, _ = launch.forward(q, k, v, [ids], [], None, program, False, kv_blocks)
    assert out[:, :, :128].isfinite().all() and out[:, :, 128:].isnan().all()


@pytest.mark.parametrize(
    "text",
    [
        "keep = kv_idx <= q_idx", "score = score + c0[b, q_idx, kv_idx]", "keep = c0[b]",
        "score = where(kv_idx <= q_idx, score, -1e9)",
    ],
)  # fmt: skip
def test_masks_without_a_map(text: str) -> None:
    """Loop bounds are enough, or there is nothing to skip by."""
    assert block_mask(parse(text)) is None
