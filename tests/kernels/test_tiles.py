"""Every kernel gets a tile that fits the shared memory of every device, decided before anything runs."""

from __future__ import annotations

import pytest

from flash_fx.kernels.spec import CaptureFact, KernelSpec
from flash_fx.kernels.tiles import HOPPER_SHARED, shared_bytes, tile_for

KINDS = ["forward", "delta", "backward_dkdv", "backward_dq", "backward_capture"]
BIASED = "score = score * 0.125 + c0[h, q_idx, kv_idx]; drop = 0.1"


@pytest.mark.parametrize("limit", [48 * 1024, 64 * 1024, 99 * 1024, HOPPER_SHARED])
@pytest.mark.parametrize("d", [16, 64, 128, 160, 192, 256, 512])
@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", None), ("float32", "ieee"), ("float32", "tf32"), ("float32", "tf32x3")]
)
def test_every_kernel_fits_every_device(dtype: str, precision: str | None, d: int, limit: int) -> None:
    if d > 256 and dtype == "float32":
        pytest.skip("left alone")
    if limit < 99 * 1024 and d > (64 if precision == "tf32x3" else 128 if precision else 256):
        pytest.skip("the smallest tile of tl.dot is larger; every NVIDIA GPU that Triton supports has 99 KB")
    for program, captures in (("score = score * 0.125", ()), (BIASED, (CaptureFact("float32", 3),))):
        spec = KernelSpec(program, captures, dtype, d, d, precision=precision)
        if d <= 64 and limit >= 99 * 1024:  # with less it stays apart
            of_four = tile_for("backward_dq_matrix", spec, limit, batches=4)
            assert shared_bytes("backward_dq_matrix", spec, of_four, 4) <= limit
        for kind in KINDS if d > 256 else [*KINDS, "backward_dq_matrix"]:
            tile = tile_for(kind, spec, limit)
            assert shared_bytes(kind, spec, tile) <= limit, f"{kind} {tile}"
            assert tile.block_m >= 16 and tile.block_n >= 16  # tl.dot takes no less


def test_the_choice_depends_on_the_spec_and_the_limit_alone() -> None:
    """So all ranks of one job run the same kernels."""
    spec = KernelSpec(BIASED, (CaptureFact("float32", 3),), "bfloat16", 96, 96)
    assert len({tile_for("forward", spec, 99 * 1024) for _ in range(3)}) == 1
