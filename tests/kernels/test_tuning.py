"""The search for the fastest tile: what is tried, what is remembered, and that nothing that fails is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from flash_fx import compat
from flash_fx.kernels import tuning
from flash_fx.kernels.spec import KernelSpec
from flash_fx.kernels.tiles import HOPPER_SHARED, Tile, shared_bytes, tile_for

SPEC = KernelSpec("score = score * 0.125", (), "bfloat16", 64, 64)
KINDS = ("forward", "decode", "backward_dq", "backward_dkdv", "backward_capture", "backward_dq_matrix")
LENGTHS = (2, 4, 4, 1000, 1000)
TILES = [Tile(64, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 4)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASH_FX_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("limit", [HOPPER_SHARED, 99 * 1024])
def test_candidates_fit_and_begin_with_the_table(kind: str, d: int, dtype: str, limit: int) -> None:
    spec = KernelSpec("", (), dtype, d, d, precision="ieee" if dtype == "float32" else None)
    default = tile_for(kind, spec, limit)
    found = tuning.candidates(kind, spec, default, limit)
    assert found[0] == default and len(found) == len(set(found)) and all(shared_bytes(kind, spec, t) <= limit for t in found)
    assert dtype == "float32" or d == 256 or len(found) >= 4


def test_the_fastest_is_chosen_and_remembered() -> None:
    asked: list[Tile] = []

    def timer(tile: Tile) -> float:
        asked.append(tile)
        return {TILES[0]: 3.0, TILES[1]: 1.0, TILES[2]: 2.0}[tile]

    assert tuning.choose("forward", SPEC, LENGTHS, TILES, timer) == TILES[1] and asked == TILES
    assert tuning.choose("forward", SPEC, LENGTHS, TILES, timer) == TILES[1] and asked == TILES
    tuning.choose("backward_dq", SPEC, LENGTHS, TILES, timer)
    tuning.choose("forward", SPEC, (2, 4, 4, 1000, 999), TILES, timer)
    assert len(asked) == 9


def test_what_fails_is_not_chosen() -> None:
    def timer(tile: Tile) -> float:
        if tile == TILES[1]:
            raise RuntimeError("out of resources: shared memory")
        return float("nan") if tile == TILES[0] else 5.0

    assert tuning.choose("forward", SPEC, LENGTHS, TILES, timer) == TILES[2]


def test_the_default_stays_where_nothing_runs() -> None:
    def timer(tile: Tile) -> float:
        raise AssertionError

    assert tuning.choose("forward", SPEC, LENGTHS, TILES, timer) == TILES[0]


def test_a_damaged_file_is_written_anew(folder: Path) -> None:
    tuning.choose("forward", SPEC, LENGTHS, TILES, lambda t: -t.num_stages)
    (path,) = folder.glob("tiles_*.json")
    path.write_text(path.read_text()[:-3])
    assert tuning.choose("forward", SPEC, LENGTHS, TILES, lambda t: t.num_stages) == TILES[1]
    assert tuning.choose("forward", SPEC, LENGTHS, TILES, lambda t: 0.0) == TILES[1]


def test_all_ranks_take_what_the_first_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = distributed.HashStore()
    monkeypatch.setattr(compat, "default_store", lambda: store)
    found = []
    for rank, times in enumerate(([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])):  # machines with folders of their own
        monkeypatch.setenv("FLASH_FX_CACHE_DIR", str(tmp_path / str(rank)))
        found.append(tuning.choose("forward", SPEC, LENGTHS, TILES, dict(zip(TILES, times)).__getitem__))
    assert found == [TILES[0], TILES[0]]


def test_stand_ins_have_the_same_layout() -> None:
    base = torch.randn(3, 5, 8)
    given = [base.transpose(0, 2), base[:, :, :1].expand(3, 5, 4), torch.ones(2, 0), torch.rand(4) > 0.5, torch.arange(6)]
    for a, b in zip(tuning.stand_ins(given), given, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    *_, mask, positions = tuning.stand_ins(given)
    assert mask.all() and not positions.any()
