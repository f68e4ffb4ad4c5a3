"""Tables of relative positions: what training saves, what the rewritten graph holds, and which positions are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from zoo import BY_NAME

import flash_fx
from flash_fx.match.normalize import example_value
from flash_fx.testing import capture_rewrites

HEADS, ROWS, COLUMNS = 6, 40, 48  # the scores of all heads have more elements than any operand
SAVED_MOST = HEADS * ROWS * COLUMNS
BUCKETS = ["bucket_embedding", "bucket_embedding_with_a_row_that_is_not_trained"]
BUFFERS = ["index_buffer", "index_buffer_flat", "index_select_of_a_buffer", "table_from_a_layer"]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[nn.Module, list[Tensor]]]:
    """A row of the zoo with longer sequences and more heads."""
    for name, size in (("H", HEADS), ("M", ROWS), ("N", COLUMNS)):
        monkeypatch.setattr(zoo, name, size)

    def build(name: str) -> tuple[nn.Module, list[Tensor]]:
        torch._dynamo.reset()
        shapes = ((2, HEADS, ROWS, 16), (2, HEADS, COLUMNS, 16), (2, HEADS, COLUMNS, 16))
        return BY_NAME[name].make(), [torch.randn(s, requires_grad=True) for s in shapes]

    return build


def saved_by(call: Callable, args: list[Tensor]) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*args)
    return saved


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["bucket_embedding", "index_buffer"])
def test_training_saves_nothing_as_large_as_a_bias(large: Callable, name: str, inner: str, dynamic: bool) -> None:
    model, args = large(name)
    compiled = torch.compile(model, backend=flash_fx.make_backend(inner=inner, strict=True), dynamic=dynamic)
    saved = saved_by(compiled, args)
    assert len(saved) >= 5  # query, key, value, the result and its LSE
    assert max(t.numel() for t in saved) < SAVED_MOST
    matrices = [t for t in saved if {ROWS, COLUMNS} <= set(t.shape)]
    assert all(t.dtype is torch.int32 and t.dim() == 2 for t in matrices)  # the row numbers
    assert len(matrices) == (name == "index_buffer")
    assert max(t.numel() for t in saved_by(model, args)) >= SAVED_MOST  # eager does


@pytest.mark.parametrize("name", ["index_buffer_flat", "index_select_of_a_buffer", "table_from_a_layer"])
def test_no_spelling_saves_the_bias(large: Callable, name: str) -> None:
    model, args = large(name)
    saved = saved_by(torch.compile(model, backend=flash_fx.make_backend(inner="aot_eager", strict=True)), args)
    assert max(t.numel() for t in saved) < SAVED_MOST


@pytest.mark.parametrize("name", [*BUCKETS, "clipped_positions", "relative_bias"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_no_matrix_is_left_in_the_graph_of_positions_that_are_computed(name: str, training: bool) -> None:
    torch._dynamo.reset()
    fn, args = BY_NAME[name].build()
    with torch.set_grad_enabled(training):
        (rewritten,) = capture_rewrites(fn, *args)[1]
    rows, columns = args[0].shape[2], args[1].shape[2]
    shapes = [v.shape for n in rewritten.graph.nodes if isinstance(v := example_value(n), Tensor)]
    assert (rows + columns - 1,) in shapes
    assert not [s for s in shapes if len(s) > 1 and s[-2:] == (rows, columns)]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("position", [-12, -1, 11])
@pytest.mark.parametrize("name", ["index_buffer", "index_select_of_a_buffer"])
def test_positions_are_refused_where_eager_refuses_them(name: str, position: int, inner: str) -> None:
    torch._dynamo.reset()
    model, args = BY_NAME[name].build()
    compiled = torch.compile(model, backend=flash_fx.make_backend(inner=inner, strict=True))
    compiled(*args)
    model.index[5, 7] = position
    if fails(model, args):
        assert fails(compiled, args)
    else:
        torch.testing.assert_close(compiled(*args), model(*args))


def test_positions_beyond_a_table_are_refused_along_diagonals() -> None:
    torch._dynamo.reset()
    model, args = BY_NAME["clipped_positions"].build()
    model.table = nn.Parameter(model.table[:4].detach().clone())
    assert fails(model, args)
    assert fails(torch.compile(model, backend=flash_fx.make_backend(inner="aot_eager")), args)


def fails(call: Callable, args: tuple[Tensor, ...]) -> bool:
    try:
        call(*args)
    except (IndexError, RuntimeError):
        return True
    return False


def test_one_graph_serves_every_length() -> None:
    torch._dynamo.reset()
    model = BY_NAME["bucket_embedding"].make()
    compiled = torch.compile(model, backend=flash_fx.make_backend(inner="aot_eager"), dynamic=True, fullgraph=True)
    compiles = []
    with flash_fx.recording() as reports:
        for rows, columns in ((17, 13), (5, 40), (70, 70), (33, 2)):
            args = [torch.randn(2, 3, n, 16, requires_grad=True) for n in (rows, columns, columns)]
            results = [
                (o, *torch.autograd.grad(o.sum(), [*args, *model.parameters()]))
                for o in (compiled(*args), model(*args))
            ]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
            compiles.append(len(reports))
    assert compiles == [compiles[0]] * 4
    assert {(r.fused, r.left) for r in reports} == {(1, 0)}


def test_gradients_are_bitwise_repeatable() -> None:
    for name in ("bucket_embedding", "index_buffer"):
        torch._dynamo.reset()
        model, args = BY_NAME[name].build()
        compiled = torch.compile(model, backend=flash_fx.make_backend(inner="aot_eager", strict=True))
        first, second = (torch.autograd.grad(compiled(*args).sum(), [*model.parameters()]) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# *** functions that could go wrong: q, k, v, a table [11, H], positions [M, N] ***

H, M, N, D = 3, 8, 10, 4


def attend(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-1) @ v


def distance(q, k):
    return torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]


def table_overwritten_after_the_lookup(q, k, v, table, index):
    copy = table * 1.0
    bias = copy[index].permute(2, 0, 1)
    with torch.no_grad():
        copy.zero_()
    return attend(q, k, v, bias)


def table_of_frozen_numbers_overwritten(q, k, v, table, index):
    copy = table.detach().clone()
    bias = copy[distance(q, k)].permute(2, 0, 1)
    copy.zero_()
    return attend(q, k, v, bias * table[0, 0])


def positions_overwritten_after_the_lookup(q, k, v, table, index):
    copy = index.clone()
    bias = table.detach()[copy].permute(2, 0, 1)
    copy.zero_()
    return attend(q, k, v, bias * table[0, 0])


def distance_overwritten_after_the_lookup(q, k, v, table, index):
    places = distance(q, k)
    bias = table.detach()[places].permute(2, 0, 1)
    places.zero_()
    return attend(q, k, v, bias * table[0, 0])


def part_of_a_buffer_that_is_wrong_elsewhere(q, k, v, table, index):
    longer = F.pad(index, (0, 3, 0, 2), value=99)
    return attend(q, k, v, table[longer[: q.size(2), : k.size(2)]].permute(2, 0, 1))


def written_into_a_part(q, k, v, table, index):
    bias = torch.zeros(H, q.size(2), k.size(2))
    bias[:, 2:, 3:] = table[distance(q[:, :, 2:], k[:, :, 3:])].permute(2, 0, 1)
    return attend(q, k, v, bias)


def part_of_a_longer_bias(q, k, v, table, index):
    n = k.size(2)
    places = (torch.arange(n) - torch.arange(n)[:, None]).clamp(-5, 5)
    return attend(q, k, v, table[places][n - M :].permute(2, 0, 1))


def shifted_distance(q, k, v, table, index):
    return attend(q, k, v, table[(distance(q, k) - 2).abs()].permute(2, 0, 1))


def no_function_of_the_distance(q, k, v, table, index):
    places = torch.arange(k.size(2)) - 2 * torch.arange(q.size(2))[:, None]
    return attend(q, k, v, table[places.clamp(-5, 5)].permute(2, 0, 1))


def function_of_the_sum(q, k, v, table, index):
    places = torch.arange(k.size(2)) + torch.arange(q.size(2))[:, None]
    return attend(q, k, v, table[places.clamp(max=10)].permute(2, 0, 1))


def distance_in_floats(q, k, v, table, index):
    places = torch.arange(k.size(2), dtype=torch.float32) * 0.1 - torch.arange(q.size(2))[:, None] * 0.1
    return attend(q, k, v, table[(places * 10).long()].permute(2, 0, 1))


def distance_in_int32(q, k, v, table, index):
    places = torch.arange(k.size(2), dtype=torch.int32) - torch.arange(q.size(2), dtype=torch.int32)[:, None]
    return attend(q, k, v, table[places].permute(2, 0, 1))


def distance_scaled_by_a_vector_that_decides_the_dtype(q, k, v, table, index):
    half, full = torch.ones((), dtype=torch.bfloat16), torch.full((k.size(2),), 1.998)
    places = (distance(q, k) * half * full).long()
    return attend(q, k, v, table[places.clamp(-11, 10)].permute(2, 0, 1))


def every_other_position(q, k, v, table, index):
    bias = table[distance(q, k)].permute(2, 0, 1)[:, ::2, ::2]
    return attend(q[:, :, ::2], k[:, :, ::2], v[:, :, ::2], bias)


def distance_by_comparisons(q, k, v, table, index):
    rows, columns = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    places = torch.where(columns > rows, 1, torch.where(rows - columns >= 3, 2, 0)) + (columns == rows)
    return attend(q, k, v, F.embedding(places, table).permute(2, 0, 1))


def blocks_of_keys(q, k, v, table, index):
    places = torch.arange(k.size(2)) // 2 - torch.arange(q.size(2))[:, None] // 2
    return attend(q, k, v, table[places].permute(2, 0, 1))


def rows_and_columns_of_windows(q, k, v, table, index):
    x, y = torch.arange(q.size(2)) % 4, torch.arange(q.size(2)) // 4
    places = (x[:, None] - x + 1).clamp(0, 2) * 3 + (y[:, None] - y + 1).clamp(0, 1)
    return attend(q, k[:, :, :M], v[:, :, :M], table[places].permute(2, 0, 1))


def looked_up_by_positions_that_are_looked_up(q, k, v, table, index):
    order = torch.arange(11).flip(0)
    return attend(q, k, v, table[order[index]].permute(2, 0, 1))


def permuted_matrix(q, k, v, table, index):
    whole = table[:, 0].outer(table[:, 1])
    return attend(q, k, v, whole[index[:, :1], index[:1]])


def one_head_for_all(q, k, v, table, index):
    return attend(q, k, v, table[:, 0][index])


def used_as_a_factor(q, k, v, table, index):
    return (q @ k.mT * table[index].permute(2, 0, 1).sigmoid()).softmax(-1) @ v


def used_twice(q, k, v, table, index):
    bias = table[index].permute(2, 0, 1) + table[distance(q, k)].permute(2, 0, 1)
    return attend(q, k, v, bias) + attend(q, k, v, 2.0 * bias)


def weighted_after_the_softmax(q, k, v, table, index):
    return ((q @ k.mT).softmax(-1) * table[index].permute(2, 0, 1)) @ v


def under_a_causal_mask(q, k, v, table, index):
    keep = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(2)
    return attend(q, k, v, table[index].permute(2, 0, 1).masked_fill(~keep, -1e9))


def looked_up_without_gradient(q, k, v, table, index):
    with torch.no_grad():
        near, far = table[distance(q, k)], table[index]
    return attend(q, k, v, (near + far).permute(2, 0, 1) * table[0, 0])


TRICKY = [
    f
    for f in list(globals().values())
    if getattr(f, "__code__", None) and f.__code__.co_varnames[3:5] == ("table", "index")
]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", TRICKY, ids=lambda f: f.__name__)
def test_equals_eager(f: Callable, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(2, H, n, D, generator=g, requires_grad=True) for n in (M, N, N)]
    args += [torch.randn(11, H, generator=g, requires_grad=True), torch.randint(-11, 11, (M, N), generator=g)]
    with flash_fx.recording() as reports:
        compiled = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"), dynamic=dynamic)
        results = [(o, *torch.autograd.grad(o.sin().sum(), args[:4])) for o in (compiled(*args), f(*args))]
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)
    assert sum(r.fused for r in reports)
    print(*reports)
