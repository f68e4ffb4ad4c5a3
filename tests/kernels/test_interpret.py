"""Forward and every gradient of the real kernels, in Triton's interpreter, against float64 autograd.

Budget: error of the kernel <= error of eager in the same dtype + a few roundings of the largest value.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: run `pytest tests/kernels` on its own", allow_module_level=True)
pytest.importorskip("triton")

from flash_fx.kernels import launch, matrix, tiles
from flash_fx.kernels.facts import separated
from flash_fx.kernels.plan import DRAWS
from flash_fx.kernels.spec import CaptureFact, KernelSpec
from flash_fx.kernels.tiles import Tile
from flash_fx.score.evaluate import reference
from flash_fx.score.text import parse

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy: inf - inf
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not launch.interpreting(), reason="Triton was imported before TRITON_INTERPRET=1 was set"),
]
SMALL = Tile(16, 16, 4, 1)


@dataclass(frozen=True)
class Shape:
    b: int = 2
    h: int = 2
    hk: int = 2
    m: int = 17
    n: int = 33
    d: int = 16
    dv: int = 16


def operands(shape: Shape, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """query, key, value, grad_out."""
    g = torch.Generator().manual_seed(seed)
    sizes = [
        (shape.b, shape.h, shape.m, shape.d), (shape.b, shape.hk, shape.n, shape.d),
        (shape.b, shape.hk, shape.n, shape.dv), (shape.b, shape.h, shape.m, shape.dv),
    ]  # fmt: skip
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in sizes]


def kernels(
    tensors: Sequence[Tensor], captures: Sequence[Tensor], sizes: Sequence[int], program, seed=None, bmhd=False
):
    """[out, lse, dq, dk, dv, gradient of each float capture]"""
    q, k, v, g = tensors
    out, lse = launch.forward(q, k, v, captures, sizes, seed, program, bmhd)
    needs = [True] * 3 + [c.is_floating_point() for c in captures]
    return [out, lse, *launch.backward(g, q, k, v, captures, sizes, seed, out, lse, program, needs)]


def autograd(tensors: Sequence[Tensor], captures, sizes, program, dtype: torch.dtype, drop_mask=None):
    *ins, g = (t.detach().to(dtype).requires_grad_() for t in tensors)
    captures = [c.detach().to(dtype).requires_grad_() if c.is_floating_point() else c for c in captures]
    leaves = [*ins, *(c for c in captures if c.requires_grad)]
    out, lse = reference(*ins, captures, sizes, program, drop_mask=drop_mask)
    grads = torch.autograd.grad(out, leaves, g.detach(), allow_unused=True)
    return [out, lse, *(torch.zeros_like(t) if x is None else x for x, t in zip(grads, leaves))]


def compare(ours: list[Tensor], eager: list[Tensor], golden: list[Tensor], dtype: torch.dtype) -> None:
    names = ["out", "lse", "dq", "dk", "dv", *(f"dc{i}" for i in range(len(ours)))]
    big = golden[1][golden[1].isfinite()].abs().amax().item() if golden[1].isfinite().any() else 0.0
    for name, a, b, c in zip(names, ours, eager, golden):
        assert a.shape == c.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(c.shape)}"
        assert torch.equal(a.isnan(), c.isnan()), f"{name}: {int(a.isnan().sum())} NaN, expected {int(c.isnan().sum())}"
        if a.numel() == 0:
            continue
        a, b, c = (torch.nan_to_num(t.detach().double()) for t in (a, b, c))
        error, allowed = (a - c).abs().max().item(), (b - c).abs().max().item()
        eps = torch.finfo(torch.float32 if name == "lse" else dtype).eps
        # summation orders differ by a rounding of the score; ds = p * (dp - delta) cancels, so at least of 1
        rounding = eps * max(c.abs().max().item(), 1.0) * (16.0 if dtype == torch.float32 else 2.0)
        if dtype == torch.float32 and big < 1e6:
            rounding *= 1.0 + big / 16.0
        assert error <= allowed + rounding, f"{name}: error {error:.2e}, eager {allowed:.2e} + rounding {rounding:.2e}"


def check(
    text: str, captures: Sequence[Tensor] = (), shape: Shape = Shape(), dtype=torch.float32, sizes=(), tile=SMALL
):
    program, tensors = parse(text), operands(shape, dtype)
    with tiles.override(tile):
        ours = kernels(tensors, captures, sizes, program)
    compare(
        ours, autograd(tensors, captures, sizes, program, dtype),
        autograd(tensors, captures, sizes, program, torch.float64), dtype,
    )  # fmt: skip


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a matrix by a kernel of its own, as where many batches share it."""
    monkeypatch.setattr(matrix, "MOST", 0)


@pytest.fixture(params=["beside dQ", "apart"])
def either_way(request: pytest.FixtureRequest) -> None:
    if request.param == "apart":
        request.getfixturevalue("apart")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def keep(p: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) < p


MASKS = {
    "none": "score = score * 0.25",
    "causal": "score = score * 0.25; keep = kv_idx <= q_idx",
    "bottom right": "score = score * 0.25; keep = kv_idx <= q_idx + (kv_len - q_len)",
    "strict": "score = score * 0.25; keep = kv_idx < q_idx + 3",
    "window": "score = score * 0.25; keep = (kv_idx <= q_idx + 16) & (q_idx + 16 - kv_idx < 9)",
    "prefix": "score = score * 0.25; keep = (kv_idx <= q_idx) | (kv_idx < s0)",
    "reversed": "score = score * 0.25; keep = kv_idx >= q_idx",
    "length": "score = score * 0.25; keep = kv_idx < s0",
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    check(MASKS[mask], shape=Shape(h=4, d=8, dv=20), sizes=[7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_half(mask: str, dtype: torch.dtype) -> None:
    check(MASKS[mask], shape=Shape(b=1, h=2, hk=1, m=33), dtype=dtype)


@pytest.mark.parametrize("m, n", [(1, 1), (1, 17), (15, 15), (16, 16), (16, 32), (17, 17), (17, 1), (33, 15)])
def test_sizes_around_tile_edges(m: int, n: int) -> None:
    check("score = score * 0.3", shape=Shape(b=1, m=m, n=n, d=20))
    if m <= n:
        check("score = score * 0.3; keep = kv_idx <= q_idx + (kv_len - q_len)", shape=Shape(b=1, m=m, n=n, d=20))


@pytest.mark.parametrize("d, dv", [(1, 3), (8, 64), (20, 20), (64, 8), (512, 16)])
def test_head_dims(d: int, dv: int) -> None:
    check(MASKS["causal"], shape=Shape(b=1, d=d, dv=dv))


@pytest.mark.parametrize("h, hk", [(4, 1), (6, 2)])
def test_grouped_heads(h: int, hk: int) -> None:
    check(MASKS["causal"], shape=Shape(b=1, h=h, hk=hk))
    check("score = score + c0[h, q_idx, kv_idx]", [randn(h, 17, 33)], Shape(b=1, h=h, hk=hk))


def test_tile_shapes_differ() -> None:
    check(MASKS["causal"], shape=Shape(m=70, n=70), tile=Tile(32, 16, 4, 1))
    check(MASKS["window"], shape=Shape(m=70, n=70), tile=Tile(16, 64, 4, 1))


BIASES = {
    "b, h, q_idx, kv_idx": (2, 2, 17, 33), "h, q_idx, kv_idx": (2, 17, 33), "b, 0, q_idx, kv_idx": (2, 1, 17, 33),
    "q_idx, kv_idx": (17, 33), "kv_idx, q_idx": (33, 17), "b, kv_idx": (2, 33), "kv_idx": (33,), "h, q_idx": (2, 17),
    "b, h, q_idx, 0": (2, 2, 17, 1), "h": (2,), "b": (2,), "": (), "0, 1, q_idx, kv_idx": (2, 3, 17, 33),
}  # fmt: skip


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", BIASES)
def test_bias_of_every_broadcast(index: str) -> None:
    check(f"score = score * 0.3 + c0[{index}]" if index else "score = score * 0.3 + c0", [randn(*BIASES[index])])


COMPOSED = {
    "b // 2, h, q_idx, kv_idx": (2, 2, 17, 33), "b % 2, h, q_idx, kv_idx": (2, 2, 17, 33),
    "b // 2, 0, q_idx, kv_idx": (2, 1, 17, 33), "b // s0, b % s0, kv_idx, q_idx": (2, 2, 33, 17),
    "b // 2 % 2, h, q_idx, kv_idx": (2, 2, 17, 33), "h // 2, q_idx, kv_idx": (1, 17, 33), "b // 3, h % 2": (2, 2),
    "b * 2 + h, q_idx, kv_idx": (8, 17, 33), "b * 2 + h, 0, kv_idx": (8, 1, 33), "b // s0, kv_idx": (2, 33),
    "h, q_idx + 3, kv_idx": (2, 25, 33), "q_idx, kv_idx + s0": (17, 35), "h, q_idx // 4": (2, 5), "kv_idx // 2, b": (17, 4),
    "h, kv_idx - q_idx + 16": (2, 49), "q_idx, q_idx": (17, 17), "h, minimum(abs(kv_idx - q_idx), 7)": (2, 8),
    "b, h * q_idx": (4, 17), "b // 2, q_idx, b": (2, 17, 4), "q_idx, kv_idx": (20, 40), "s0, kv_idx": (3, 33),
}  # fmt: skip


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", COMPOSED)
def test_gradient_at_a_computed_index(index: str) -> None:
    shape, tile = Shape(b=4, d=8, dv=8), Tile(32, 32, 4, 1)
    check(f"score = score * 0.3 + c0[{index}]", [randn(*COMPOSED[index])], shape, sizes=[2], tile=tile)


BUCKETS = torch.arange(17 * 33).view(17, 33) * 7 % 11
TABLES = {
    "c0[h, c1[q_idx, kv_idx]]": ((2, 11), BUCKETS),
    "c0[c1[q_idx, kv_idx], h]": ((11, 2), BUCKETS.int()),
    "c0[c1[q_idx, kv_idx], 1, h]": ((11, 2, 3), BUCKETS),  # more rows than heads
    "c0[c1[q_idx * 33 + kv_idx], b, h]": ((11, 2, 2), BUCKETS.flatten()),
    "c0[c1[b, q_idx, kv_idx], h]": ((11, 2), torch.stack([BUCKETS, BUCKETS.flip(0)])),
    "c0[c1[q_idx, kv_idx], h] * c0[3, h] + c0[kv_idx % 11, 0]": ((11, 2), BUCKETS),
    "c0[c1[q_idx, kv_idx], c1[16 - q_idx, kv_idx]]": ((11, 11), BUCKETS),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("text", TABLES)
def test_gradient_of_tables_gathered_before_the_kernels(text: str) -> None:
    shape, positions = TABLES[text]
    check(f"score = score * 0.3 + {text}", [randn(*shape), positions], Shape(d=8, dv=8))


def test_gradient_of_tables_in_every_part_of_a_program() -> None:
    score = "where(kv_idx <= q_idx + 9, score * 0.3 + c0[c1[q_idx, kv_idx], h], -1e9)"
    text = f"score = {score}; keep = c2[c1[q_idx, kv_idx]]; weight = c0[c1[q_idx, kv_idx], 0]"
    check(text, [randn(11, 2), BUCKETS, keep(0.7, 11)], Shape(d=8, dv=8))


def test_gradient_of_bfloat16_tables() -> None:
    table = randn(11, 2).bfloat16()
    check("score = score * 0.3 + c0[c1[q_idx, kv_idx], h]", [table, BUCKETS], Shape(d=8, dv=8), torch.bfloat16)


def test_gradient_of_tables_gathered_in_the_kernels() -> None:
    check(
        "score = score + c0[c1[kv_idx], 0, b]; keep = kv_idx <= q_idx", [randn(11, 2, 2), BUCKETS[0]], Shape(d=8, dv=8)
    )


DIAGONALS = {
    "c0[kv_idx - q_idx + 16]": (49,), "c0[h, kv_idx + q_len - q_idx - 1]": (2, 49),
    "c0[kv_idx + s0 - q_idx, b, h]": (49, 2, 2), "c0[kv_idx - q_idx + 17, h]": (50, 2), "c0[q_idx - kv_idx + 32]": (49,),
}  # fmt: skip


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("load", DIAGONALS)
def test_gradient_along_diagonals(load: str) -> None:
    check(f"score = score * 0.3 + {load}", [randn(*DIAGONALS[load])], Shape(d=8, dv=8), sizes=[16])


def test_gradient_of_one_capture_at_several_indices() -> None:
    score = "score * c0[b // 2, q_idx, kv_idx] + c0[1, q_idx, kv_idx + 3]"
    text = f"score = {score}; weight = c0[b % 2, q_idx, 0]; sink = c0[b // 2, 0, h]"
    check(text, [randn(2, 17, 36)], Shape(b=4, d=8, dv=8))


def test_gradient_at_a_computed_index_under_a_mask_and_dropout() -> None:
    check(
        "score = score + c0[b // 2, q_idx, kv_idx]; keep = kv_idx <= q_idx", [randn(2, 17, 33)], Shape(b=4, d=8, dv=8)
    )
    bias = randn(2, 17, 33)
    tensors, seed = operands(Shape(b=4), torch.float32), torch.tensor([1, 2])
    with tiles.override(SMALL):
        ours, every = (
            kernels(tensors, [c], [], parse(f"score = score + c0[{index}, q_idx, kv_idx]; drop = 0.25"), seed)
            for index, c in (("b // 2", bias), ("b", bias.repeat_interleave(2, 0)))
        )
    torch.testing.assert_close(ours[-1], every[-1].view(2, 2, 17, 33).sum(1))


@pytest.mark.usefixtures("either_way")
def test_causal_bias_leaves_zeros_where_no_tile_is_visited() -> None:
    shape = Shape(m=40, n=40)
    check("score = score + c0[h, q_idx, kv_idx]; keep = kv_idx <= q_idx", [randn(2, 40, 40)], shape)


@pytest.mark.usefixtures("either_way")
def test_half_bias_in_a_half_program() -> None:
    check("score = score + c0[h, q_idx, kv_idx]", [randn(2, 17, 33).half()], Shape(b=1), torch.float16)


MATRICES = {
    "tanh(score * 0.3 + c0[h, q_idx, kv_idx]) * 3.0; weight = c0[1, q_idx, kv_idx]; drop = 0.25": Shape(b=3, h=4, hk=2),
    "score * c0[b, h, q_idx, kv_idx]; keep = kv_idx <= q_idx + 5; sink = c1[h]": Shape(b=2, h=4, hk=2, m=40),
    "score * 0.3 + c0[q_idx, kv_idx]; keep = (kv_idx <= q_idx + 9) & (kv_idx >= q_idx - 3)": Shape(b=4, h=1, hk=1, m=50, dv=24),
    "score * 0.3 + c0[h, q_idx, kv_idx] + c2[b, h, q_idx, kv_idx]": Shape(b=2, m=40),
}


@pytest.mark.parametrize("text", MATRICES)
@pytest.mark.parametrize("tile", [SMALL, Tile(32, 16, 4, 1)], ids=["16x16", "32x16"])
def test_a_matrix_beside_dq_is_what_it_is_apart(text: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel or two: the same terms, whatever else the program holds."""
    shape, program = MATRICES[text], parse(f"score = {text}")
    leading = {"c0[h": (shape.h,), "c0[b": (shape.b, shape.h), "c0[q": ()}[text[text.index("c0[") :][:4]]
    captures = [randn(*leading, shape.m, shape.n), randn(shape.h), randn(shape.b, shape.h, shape.m, shape.n)]
    tensors, seed = operands(shape, torch.float32), torch.tensor([1, 2]) if program.drop else None
    with tiles.override(tile):
        beside = kernels(tensors, captures, [], program, seed)
        used: list[int] = []
        monkeypatch.setattr(launch, "matrix_beside_dq", lambda *_: used.append(1))
        apart = kernels(tensors, captures, [], program, seed)
    assert used
    for a, b in zip(beside, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_matrix_goes_beside_dq_where_few_batches_share_it() -> None:
    def chosen(text: str, b=4, h=16, m=1024, d=64, shared=tiles.HOPPER_SHARED) -> int | None:
        facts = (CaptureFact("bfloat16", 3), CaptureFact("bfloat16", 4))
        found = matrix.matrix_beside_dq(KernelSpec(f"score = {text}", facts, "bfloat16", d, d), [0, 1], b, h, m, shared)
        return None if found is None else found[1]

    assert chosen("score + c0[h, q_idx, kv_idx]") == 4
    assert chosen("score + c1[b, h, q_idx, kv_idx]", b=1000) == 1
    assert chosen("score + c0[h, q_idx, kv_idx]", b=8) is None and chosen("score + c0[h, q_idx, kv_idx]", d=128) is None
    assert chosen("score + c0[h, q_idx, kv_idx]", m=256) is None  # too few programs
    assert chosen("score + c0[h, q_idx, kv_idx]", shared=16 * 1024) is None
    assert chosen("score + c0[q_idx, kv_idx, 0]") is None and chosen("score + c0[q_idx, kv_idx, 0]", h=1, m=8192) == 4
    assert chosen("score + c1[b // 2, h, q_idx, kv_idx]") is None and chosen("score + c0[h, 0, kv_idx]") is None
    assert chosen("score + c0[h, q_idx, kv_idx]; keep = kv_idx < b") is None  # each batch has other tiles to walk over
    assert chosen("where(kv_idx <= q_idx, score + c0[h, q_idx, kv_idx], -1e9)") is None


def test_expanded_and_transposed_captures() -> None:
    wide = randn(1, 1, 17, 33).expand(2, 2, 17, 33)
    check("score = score + c0[b, h, q_idx, kv_idx]", [wide])
    check("score = score + c0[q_idx, kv_idx]", [randn(33, 17).t()])


def test_one_capture_read_twice() -> None:
    check("score = score * c0[h] + c0[0] * 2.0", [randn(2)])
    check("score = score + c0[h, q_idx, kv_idx]; weight = c0[h, q_idx, kv_idx]", [randn(2, 17, 33)])


@pytest.mark.parametrize(
    "text",
    [
        "score = tanh(score * 0.1) * 10.0; keep = kv_idx <= q_idx",
        "score = tanh(score * 0.001) * 1000.0",
        "score = score * 0.3 - c0[h] * float(abs(q_idx - kv_idx)); keep = kv_idx <= q_idx",
        "score = sigmoid(score) + erf(score) + minimum(score, 0.5) + sin(score) + expm1(score * 0.1)",
        "score = score * -2.0",
        "score = where(q_idx % 3 == kv_idx % 3, score, score * 0.5 - 1.0)",
        "score = score * 0.3; keep = (q_idx - kv_idx) // 4 == -1",
    ],
)
def test_scores(text: str) -> None:
    check(text, [randn(2)] if "c0" in text else [])


DISTANCES = [
    "score * 0.3 + c0[h] * float(kv_idx - q_idx); keep = kv_idx <= q_idx + 16",
    "score * 0.3 - float(q_idx - kv_idx) * c0[h] * 0.5",
    "score * 0.3 + float(kv_idx * 3 + kv_len - q_idx * 3) * -0.125 + c0[h]; sink = c0[h]",
    "c0[h] * -float(q_idx - kv_idx) + score / 3.0 - 7.0; keep = kv_idx % 3 < q_idx; weight = c0[h]; empty = 0.0",
]


@pytest.mark.parametrize("text", DISTANCES)
@pytest.mark.parametrize("h, hk", [(2, 2), (4, 2)])
def test_scores_by_distance(text: str, h: int, hk: int) -> None:
    """16-bit kernels take the two indices apart."""
    program = parse(f"score = {text}")
    q, _, v, _ = operands(Shape(), torch.float16)
    assert separated(launch.make_spec(q, v, [randn(2)], 0, program)) is not None
    shape, slopes = Shape(h=h, hk=hk, d=8, dv=8), [randn(h)]
    tensors = operands(shape, torch.float16)
    with tiles.override(SMALL):
        ours = kernels(tensors, slopes, [], program)
    half, golden = (autograd(tensors, slopes, [], program, t) for t in (torch.float16, torch.float64))
    compare(ours[:5], half[:5], golden[:5], torch.float16)
    # sums of ds * distance over a head, where DELTA has the rounding of a 16-bit result
    torch.testing.assert_close(ours[5].double(), golden[5], rtol=0.02, atol=1.0)


NOT_APART = [
    "score * 0.3 + c0[h] * float(kv_idx + q_idx)", "score * 0.3 + c0[h] * float(abs(kv_idx - q_idx))",
    "score * c0[h] + float(kv_idx - q_idx)", "score * -0.3 + float(kv_idx - q_idx)", "score * 0.3 + c0[h]",
    "score * 0.3 + c0[kv_idx] * float(kv_idx - q_idx)", "score * 0.3 + 1e9 * float(kv_idx - q_idx)",
    "score + score + float(kv_idx - q_idx)", "where(kv_idx < 9, score + float(kv_idx - q_idx), -1e9)",
]  # fmt: skip


@pytest.mark.parametrize("score", NOT_APART)
def test_scores_that_stay_whole(score: str) -> None:
    q, _, v, _ = operands(Shape(), torch.float16)
    assert separated(launch.make_spec(q, v, [randn(2)], 0, parse(f"score = {score}"))) is None


def test_bool_masks_and_documents() -> None:
    check("score = score * 0.3; keep = c0[b, 0, kv_idx]", [keep(0.7, 2, 1, 33)])
    check("score = score * 0.3; keep = (c0[b, q_idx] == c0[b, kv_idx]) & (kv_idx <= q_idx)", [randn(2, 33).gt(0).int()])


def test_rows_without_a_key() -> None:
    masked = torch.where(keep(0.05, 2, 17, 33), 0.0, -torch.inf)
    for end in ("", "; empty = 0.0"):
        check(f"score = score * 0.3 + c0[b, q_idx, kv_idx]{end}", [masked])
        check(f"score = score * 0.3; keep = c0[b, q_idx, kv_idx]{end}", [keep(0.05, 2, 17, 33)])


def test_affine_mask_without_a_key_gives_nan_rows() -> None:
    q, k, v, _ = operands(Shape(), torch.float32)
    with tiles.override(SMALL):
        out, lse = launch.forward(q, k, v, [], [], None, parse("keep = kv_idx <= q_idx - 5"))
    assert out[:, :, :5].isnan().all() and lse[:, :, :5].isnan().all() and out[:, :, 5:].isfinite().all()


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_rows_filled_with_one_finite_number(fill: float) -> None:
    check(f"score = where(c0[q_idx, kv_idx], score * 0.3, {fill!r})", [keep(0.06, 17, 33)])
    check("score = score * 0.3 + c0[b, q_idx, kv_idx]", [torch.where(keep(0.06, 2, 17, 33), 0.0, fill)])


def test_large_scores() -> None:
    check("score = score * 100.0")
    check("score = score * 30.0; keep = kv_idx <= q_idx + 3", shape=Shape(m=33))


def test_nan_and_inf_scores_as_softmax() -> None:
    bias = torch.zeros(17, 33)
    bias[3, 20], bias[5, 2] = torch.inf, torch.nan
    q, k, v, _ = operands(Shape(), torch.float32)
    program = parse("score = score + c0[q_idx, kv_idx]")
    with tiles.override(SMALL):
        out, _ = launch.forward(q, k, v, [bias], [], None, program)
    expected, _ = reference(q, k, v, [bias], [], program)
    assert torch.equal(out.isnan(), expected.isnan()) and out[:, :, 3].isnan().all() and out[:, :, 5].isnan().all()


def test_sinks() -> None:
    check("score = score * 0.3; keep = kv_idx <= q_idx; sink = c0[h]", [randn(2)])
    for end in ("", "; empty = nan"):
        text = f"score = score * 0.3; keep = c1[b, q_idx, kv_idx]; sink = c0[h] * 2.0{end}"
        check(text, [randn(2), keep(0.05, 2, 17, 33)])


def test_weights() -> None:
    check("score = score * 0.3; weight = c0[b, q_idx, kv_idx]", [randn(2, 17, 33)])
    check("score = score * 0.3; weight = c0[kv_idx] * 0.5; keep = kv_idx <= q_idx", [randn(33)])


@pytest.mark.parametrize("extra", ["", "; keep = kv_idx <= q_idx + 3", "; weight = c0[h]"])
def test_dropout(extra: str) -> None:
    """V = identity shows the weights, and so which of them were dropped."""
    captures = [randn(2).abs() + 0.5] if "c0" in extra else []
    program, seed = parse(f"score = score * 0.3; drop = 0.4{extra}"), torch.tensor([12345, 678])
    q, k, _, _ = operands(Shape(), torch.float32)
    eye = torch.eye(33).expand(2, 2, 33, 33)
    with tiles.override(SMALL):
        weights, _ = launch.forward(q, k, eye, captures, [], seed, program)
        alive = weights != 0
        tensors = operands(Shape(), torch.float32)
        ours = kernels(tensors, captures, [], program, seed)
    with tiles.override(Tile(32, 16, 4, 1)):  # the stream depends on positions alone
        again, _ = launch.forward(q, k, eye, captures, [], seed, program)
    assert torch.equal(alive, again != 0)
    if "keep" not in extra:
        assert abs(alive.float().mean().item() - 0.6) < 0.05
    assert program.drop is not None
    scale = (1.0 - program.drop) / (1.0 - round(program.drop * DRAWS) / DRAWS)  # of the draws' own probability
    mask = alive.double() * scale
    results = [
        autograd(tensors, captures, [], program, t, drop_mask=mask.to(t)) for t in (torch.float32, torch.float64)
    ]
    compare(ours, *results, torch.float32)


@pytest.mark.parametrize("tile", [Tile(64, 32, 4, 1), Tile(16, 64, 4, 1), Tile(32, 128, 4, 1)], ids=str)
def test_dropout_is_the_same_in_every_pass_and_tile(tile: Tile) -> None:
    """With all weights alike, the gradient of V under DO = identity is the pattern of dropout, transposed."""
    program, seed = parse("score = score * 0.0; drop = 0.5"), torch.tensor([5, 77])
    q, k = torch.zeros(1, 2, 70, 16), torch.zeros(1, 1, 70, 16)
    eye = torch.eye(70)[None, None]
    with tiles.override(SMALL):
        out, lse = launch.forward(q, k, eye, [], [], seed, program)
    with tiles.override(tile):
        again, _ = launch.forward(q, k, eye, [], [], seed, program)
        backward = [
            launch.backward(one, q, k, eye, [], [], seed, out, lse, program, [False, False, True])[0]
            for one in (torch.stack([eye[0, 0], torch.zeros(70, 70)])[None], torch.stack([torch.zeros(70, 70), eye[0, 0]])[None])
        ]  # fmt: skip
    assert torch.equal(out, again)
    assert torch.equal(torch.cat(backward, 1).mT != 0, out != 0)


def test_draws_are_independent_of_their_neighbours() -> None:
    program, eye = parse("drop = 0.25"), torch.eye(128)[None, None]
    q, k = torch.zeros(2, 2, 128, 16), torch.zeros(2, 1, 128, 16)
    alive = [
        (launch.forward(q, k, eye.expand(2, 1, -1, -1), [], [], torch.tensor(s), program)[0] != 0).double() - 0.75
        for s in ([1, 0], [2, 0])
    ]
    a = alive[0]
    assert abs(a.mean().item()) < 0.006  # 3.5 standard deviations of 65536 draws
    moved = [
        a.roll(shift, axis) for shift, axis in ((1, 2), (8, 2), (1, 3), (2, 3), (4, 3), (8, 3), (16, 3), (1, 0), (1, 1))
    ]
    for other in [*moved, a.mT, alive[1]]:
        assert abs((a * other).mean().item()) / 0.1875 < 0.02


def test_strides_are_free() -> None:
    shape, program = Shape(), parse(MASKS["causal"])
    tensors = operands(shape, torch.float32)
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    moved[1] = moved[1].transpose(2, 3).contiguous().transpose(2, 3)  # inner stride is not 1
    with tiles.override(SMALL):
        plain, other = kernels(tensors, [], [], program), kernels(moved, [], [], program, bmhd=True)
    assert other[0].transpose(1, 2).is_contiguous()
    for a, b in zip(plain, other):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_expanded_grad_out() -> None:
    """out.sum().backward() hands in a gradient with zero strides."""
    program = parse(MASKS["causal"])
    q, k, v, g = operands(Shape(), torch.float32)
    one = torch.ones(()).expand(g.shape)
    with tiles.override(SMALL):
        for a, b in zip(
            kernels([q, k, v, one], [], [], program), kernels([q, k, v, one.contiguous()], [], [], program)
        ):
            assert torch.equal(a, b)


def test_gradients_are_bitwise_repeatable_and_only_the_asked_for_are_made() -> None:
    program, bias = parse("score = score + c0[h, q_idx, kv_idx]"), randn(2, 17, 33)
    q, k, v, g = operands(Shape(), torch.float32)
    with tiles.override(SMALL):
        every = kernels([q, k, v, g], [bias], [], program)
        out, lse = every[:2]
        some = launch.backward(g, q, k, v, [bias], [], None, out, lse, program, [False, True, False, True])
    assert len(some) == 2 and torch.equal(some[0], every[3]) and torch.equal(some[1], every[5])


def test_sizes_of_zero() -> None:
    for shape in (Shape(b=0), Shape(m=0), Shape(n=0)):
        tensors = operands(shape, torch.float32)
        out, lse, dq, dk, dv = kernels(tensors, [], [], parse(""))
        assert [out.shape, dq.shape, dk.shape, dv.shape] == [tensors[i].shape for i in (3, 0, 1, 2)]
        assert lse.shape == out.shape[:3] and dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("index", ["h, q_idx, kv_idx", "0, q_idx, kv_idx", "b // 2, q_idx, kv_idx"])
def test_sums_over_many_batches_are_shared_out(index: str) -> None:
    """Windows: one tile, many batches. The sum of all their gradients is cut into chunks."""
    shape = Shape(b=10, h=2, hk=2, m=12, n=12, d=8, dv=8)
    rows = {"h": 2, "0": 1, "b // 2": 5}[index.split(",")[0]]
    check(f"score = score * 0.25 + c0[{index}]", [randn(rows, 12, 12)], shape)
    assert launch.chunks_of(2, 20) == 20 and launch.chunks_of(400, 20) == 2 and launch.chunks_of(512, 20) == 1


def test_a_matrix_with_gaps_is_read_without_them() -> None:
    """[M, N, H] read as [H, M, N], as nn.Embedding gives it; broadcast dimensions are not copied."""
    bias = randn(17, 33, 2).permute(2, 0, 1)
    check("score = score * 0.25 + c0[h, q_idx, kv_idx]", [bias])
    wide = bias[None].expand(2, -1, -1, -1)
    program = parse("score = score + c0[b, h, q_idx, kv_idx]")
    staged = launch.along_keys(0, wide, program)
    assert torch.equal(staged, wide) and staged.stride() == (0, 17 * 33, 33, 1)
    rows = randn(33 * 17, 2)
    flat = parse("score = score * 0.25 + c0[q_idx * 33 + kv_idx, h]")
    check(str(flat), [rows])
    assert (
        launch.along_keys(0, rows, flat).stride() == (1, 33 * 17)
        and launch.along_keys(0, rows.mT.contiguous().mT, flat).stride()[0] == 1
    )
    for left in (bias.contiguous(), bias.contiguous().mT.contiguous().mT):
        assert launch.along_keys(0, left, parse("score = score + c0[h, q_idx, kv_idx]")) is left


def test_diagonals_are_read_as_matrices_with_strides_of_their_own() -> None:
    check("score = score * 0.25 + c0[h, kv_idx - q_idx + q_len - 1]", [randn(2, 49)])
    check("score = score * 0.25 + c0[b, 2 * kv_idx - (q_idx - 16), q_idx // 2]", [randn(2, 90, 9)])
    check("score = score * 0.25 + c0[kv_idx * 2]", [randn(66)])
