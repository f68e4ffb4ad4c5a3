"""Few queries over many keys: keys split over programs, heads of a group packed into one tile. And short loops."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: run `pytest tests/kernels` on its own", allow_module_level=True)
pytest.importorskip("triton")

from test_interpret import Shape, autograd, check, compare, keep, kernels, operands, randn

from flash_fx.kernels import launch, tiles
from flash_fx.kernels.tiles import Tile
from flash_fx.score.text import parse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
ONE = Shape(b=1, h=4, hk=2, m=1, n=520)
CASES = {
    "plain": ("score = score * 0.25", [], ONE),
    "several rows": ("score = score * 0.25; keep = kv_idx <= q_idx + 400", [], Shape(b=1, h=4, hk=2, m=3, n=521)),
    "window": ("score = score * 0.25; keep = kv_idx > q_idx + 450", [], ONE),
    "padding": ("score = score * 0.25; keep = c0[b, kv_idx]", [keep(0.5, 1, 520)], ONE),
    "bias": ("score = score * 0.25 + c0[h, q_idx, kv_idx]", [randn(4, 3, 520)], Shape(b=1, h=4, hk=1, m=3, n=520)),
    "ALiBi": ("score = score * 0.25 + c0[h] * float(kv_idx - q_idx)", [randn(4) * 0.01], ONE),
    "sink": ("score = score * 0.25; sink = c0[h, q_idx]", [randn(4, 2)], Shape(b=1, h=4, hk=4, m=2, n=520)),
    "weight": ("score = score * 0.25; weight = c0[h, kv_idx]", [randn(4, 520)], ONE),
    "softcap": ("score = tanh(score * 0.25 / 5.0) * 5.0", [], ONE),
    "filled": ("score = where(c0[b, kv_idx], score, -1e9)", [torch.zeros(1, 520, dtype=torch.bool)], ONE),
    "no key": ("score = score * 0.25; keep = c0[b, kv_idx]", [torch.zeros(1, 520, dtype=torch.bool)], ONE),
    "no key, sink": ("keep = kv_idx < c0[b]; sink = 0.5", [torch.tensor([0, 513])], Shape(b=2, h=2, hk=2, m=1, n=520)),
    "no key, sink is no help": (
        "keep = kv_idx < c0[b]; sink = c1[h]; empty = nan", [torch.tensor([0, 513]), randn(2)],
        Shape(b=2, h=2, hk=2, m=1, n=520),
    ),
    "no key, guarded": ("keep = kv_idx < c0[b]; empty = 0.0", [torch.tensor([0, 513])], Shape(b=2, h=2, hk=2, m=1, n=520)),
    "head dims": ("score = score * 0.2", [], Shape(b=1, h=2, hk=2, m=1, n=530, d=24, dv=40)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, torch.float32) for n in CASES), *((n, torch.bfloat16) for n in ("plain", "bias", "sink"))],
    ids=str,
)
def test_decode(name: str, dtype: torch.dtype) -> None:
    text, captures, shape = CASES[name]
    program, tensors = parse(text), operands(shape, dtype)
    assert launch._Run(*tensors[:3], captures, [], None, program).is_decoding()
    captures = [c.to(dtype) if c.is_floating_point() else c for c in captures]
    compare(
        kernels(tensors, captures, [], program), autograd(tensors, captures, [], program, dtype),
        autograd(tensors, captures, [], program, torch.float64), dtype,
    )  # fmt: skip


def test_more_parts_than_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The greatest scores come last, so that every step of the joining rescales what it has."""
    monkeypatch.setattr(launch, "split_length", lambda batches, n, block, resident: block)
    program, tensors = parse("score = score * 0.25 + float(kv_idx) * 0.05"), operands(ONE, torch.float32)
    assert ONE.n > 16 * launch._Run(*tensors[:3], [], [], None, program).tile("decode").block_n
    compare(
        kernels(tensors, [], [], program), autograd(tensors, [], [], program, torch.float32),
        autograd(tensors, [], [], program, torch.float64), torch.float32,
    )  # fmt: skip


def test_the_result_is_written_in_the_order_that_was_asked_for() -> None:
    program, (q, k, v, _) = parse("score = score * 0.25"), operands(ONE, torch.float32)
    plain, _ = launch.forward(q, k, v, [], [], None, program)
    swapped, _ = launch.forward(q, k, v, [], [], None, program, bmhd=True)
    assert torch.equal(plain, swapped) and swapped.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("batches", "n"), [(1, 512), (1, 65536), (64, 4096), (5000, 700), (3, 100000)])
def test_splits_cover_every_key_once(batches: int, n: int) -> None:
    split = launch.split_length(batches, n, 64, 264)
    assert split % 64 == 0 and split >= 64
    assert -(-n // split) * split >= n > (-(-n // split) - 1) * split


@pytest.mark.parametrize(("batches", "n", "splits"), [(64, 4096, 4), (100, 4096, 5), (264, 4096, 1), (8, 65536, 29)])
def test_splits_fill_waves_of_programs(batches: int, n: int, splits: int) -> None:
    split = launch.split_length(batches, n, 64, 264)
    assert -(-n // split) == splits


@pytest.mark.parametrize(
    "text",
    [
        "score = score * 0.25",
        "score = score * 0.25; keep = kv_idx <= q_idx",
        "score = where(kv_idx <= q_idx, score, -1e9)",
    ],
)
@pytest.mark.parametrize(("m", "n"), [(33, 33), (48, 48), (7, 40)])
def test_short_loops(text: str, m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHORT", 512)
    check(text, shape=Shape(m=m, n=n), tile=Tile(16, 16, 4, 1))
    with tiles.override(Tile(16, 16, 4, 1)):
        run = launch._Run(*operands(Shape(m=m, n=n), torch.float32)[:3], [], [], None, parse(text))
        assert run.dims(run.tile("forward"))["SHORT"] == (m % 16 != 0 or n % 16 != 0 or "kv_idx" in text)
