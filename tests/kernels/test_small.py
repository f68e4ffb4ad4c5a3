"""The backward as one kernel, for sequences of one tile: every gradient, in the interpreter, against float64 autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: run `pytest tests/kernels` on its own", allow_module_level=True)
pytest.importorskip("triton")

from test_interpret import BUCKETS, Shape, autograd, check, compare, keep, kernels, operands, randn

from flash_fx.kernels import launch, small, tiles
from flash_fx.kernels.plan import DRAWS
from flash_fx.score.text import parse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
SHAPE = Shape(b=5, d=8, dv=12)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The small kernel in every dtype, a few batches to each program that sums; which kernels ran."""
    names: list[str] = []
    real = launch._Run.launch

    def launch_and_note(self: launch._Run, template: str, *args: object, **arguments: object) -> None:
        names.append(template)
        real(self, template, *args, **arguments)

    monkeypatch.setattr(small, "SMALL", 64)
    monkeypatch.setattr(small, "DTYPES", ("float16", "bfloat16", "float32"))
    monkeypatch.setattr(small, "SUMMING", 6)
    monkeypatch.setattr(launch._Run, "launch", launch_and_note)
    return names


WHOLE = {
    "score = score * 0.25": (),
    "score = score * -0.25; keep = kv_idx <= q_idx": (),
    "score = tanh(score * 0.1) * 10.0; keep = (kv_idx <= q_idx) & (q_idx - kv_idx < 9)": (),
    "score = score * 0.3; keep = kv_idx < q_idx - 3": (),  # rows without a key: NaN
    "score = score * 0.3; keep = kv_idx < q_idx - 3; empty = 0.0": (),
    "score = score * 0.3; keep = c0[b, kv_idx]": (keep(0.6, 5, 33),),
    "score = where(c0[q_idx, kv_idx], score * 0.3, -3.4028234663852886e+38)": (keep(0.06, 17, 33),),
    "score = score * 0.3 + c0[h, q_idx, kv_idx]": (randn(2, 17, 33),),
    "score = score * 0.3 + c0[q_idx, kv_idx]": (randn(17, 33),),
    "score = score * 0.3 + c0[kv_idx, q_idx]": (randn(33, 17),),
    "score = score * 0.3 + c0[1, h, kv_idx, q_idx] * 2.0; keep = kv_idx <= q_idx + 9": (randn(2, 2, 33, 17),),
    "score = score * c0[h, q_idx, kv_idx] + c1[q_idx, kv_idx]": (randn(2, 17, 33), randn(17, 33)),
    "score = score * 0.3; weight = c0[h, q_idx, kv_idx]": (randn(2, 17, 33),),
    "score = score * 0.3; weight = 1.0 / float(kv_len - kv_idx)": (),  # infinite beyond the last key
    "score = score * 0.3 + c0[h, q_idx, kv_idx]; weight = c0[h, q_idx, kv_idx]": (randn(2, 17, 33),),
    "score = score * 0.3 + c0[c1[q_idx, kv_idx], h]": (randn(11, 2), BUCKETS),
    "score = score * 0.3 + c0[h, kv_idx - q_idx + 16]": (randn(2, 49),),
    "score = score * 0.3 + c0[c1[q_idx, kv_idx], h] + c2[b // s0, 0, q_idx, kv_idx]": (
        randn(11, 2), BUCKETS, keep(0.8, 3, 1, 17, 33).long(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WHOLE)
def test_one_kernel(text: str, launched: list[str]) -> None:
    check(text, WHOLE[text], SHAPE, sizes=[2])
    assert launched == ["forward", "backward_small"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m, n, d", [(1, 1, 16), (1, 64, 64), (64, 1, 40), (16, 16, 16), (49, 49, 32), (64, 64, 64)])
def test_lengths_and_dtypes(m: int, n: int, d: int, dtype: torch.dtype, launched: list[str]) -> None:
    shape = Shape(b=3, m=m, n=n, d=d, dv=d)
    check("score = score * 0.3 + c0[h, q_idx, kv_idx]", [randn(2, m, n).to(dtype)], shape, dtype)
    check("score = score * 0.3", [], shape, dtype)
    assert launched == ["forward", "backward_small"] * 2


OTHERWISE = {
    "score = score * 0.3 + c0[b, q_idx, kv_idx]": (randn(5, 17, 33),),  # a sum for each batch
    "score = score * 0.3 + c0[h]": (randn(2),),
    "score = score * 0.3 + c0[b // 2, q_idx, kv_idx]": (randn(3, 17, 33),),
    "score = score * 0.3; sink = c0[h]": (randn(2),),
    "score = score * c0[q_idx, kv_idx] + c1[q_idx, kv_idx] + c2[q_idx, kv_idx]": tuple(randn(17, 33) for _ in "abc"),
}


@pytest.mark.parametrize("text", OTHERWISE)
def test_what_it_does_not_sum_takes_the_other_kernels(text: str, launched: list[str]) -> None:
    check(text, OTHERWISE[text], SHAPE)
    assert "backward_small" not in launched and "backward_dkdv" in launched


@pytest.mark.parametrize("shape", [Shape(m=65), Shape(n=65), Shape(d=65), Shape(dv=65), Shape(h=4, hk=2)], ids=str)
def test_larger_and_grouped_heads_take_the_other_kernels(shape: Shape, launched: list[str]) -> None:
    check("score = score * 0.3", (), shape)
    assert "backward_small" not in launched


def test_dropout_is_that_of_the_forward(launched: list[str]) -> None:
    """V = identity shows which weights were dropped."""
    program, seed = parse("score = score * 0.3 + c0[q_idx, kv_idx]; drop = 0.4"), torch.tensor([12345, 678])
    tensors, bias = operands(SHAPE, torch.float32), [randn(17, 33)]
    eye = torch.eye(33).expand(SHAPE.b, SHAPE.h, 33, 33)
    with tiles.override(tiles.Tile(16, 16, 4, 1)):
        alive = launch.forward(*tensors[:2], eye, bias, [], seed, program)[0] != 0
        ours = kernels(tensors, bias, [], program, seed)
    assert launched[-1] == "backward_small" and program.drop is not None
    mask = alive.double() * ((1.0 - program.drop) / (1.0 - round(program.drop * DRAWS) / DRAWS))
    compare(
        ours, *(autograd(tensors, bias, [], program, t, drop_mask=mask.to(t)) for t in (torch.float32, torch.float64)),
        torch.float32,
    )  # fmt: skip


def test_strides_are_free(launched: list[str]) -> None:
    program, bias = parse("score = score * 0.3 + c0[h, q_idx, kv_idx]"), randn(2, 17, 33)
    tensors = operands(SHAPE, torch.float32)
    moved: list[Tensor] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    moved[1] = moved[1].transpose(2, 3).contiguous().transpose(2, 3)
    moved[3] = torch.ones(()).expand(tensors[3].shape)
    tensors[3] = torch.ones_like(tensors[3])
    staged = bias.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for a, b in zip(kernels(tensors, [bias], [], program), kernels(moved, [staged], [], program)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert launched.count("backward_small") == 2


def test_no_batches() -> None:
    shape = Shape(b=0)
    ours = kernels(operands(shape, torch.float32), [randn(2, 17, 33)], [], parse("score = score + c0[h, q_idx, kv_idx]"))
    assert [tuple(t.shape) for t in ours[2:]] == [(0, 2, 17, 16), (0, 2, 33, 16), (0, 2, 33, 16), (2, 17, 33)]
    assert not ours[-1].any()
