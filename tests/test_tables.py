"""Tables of relative positions: what training saves, what the rewritten graph holds, and which positions are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
def test_no_matrix_is_left_in_the_graph_of_positions_that_are_computed(name: str) -> None:
    torch._dynamo.reset()
    fn, args = BY_NAME[name].build()
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
