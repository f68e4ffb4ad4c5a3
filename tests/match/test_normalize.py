"""The twin: in-place writes become new values, every user node is mapped, gradient stops are seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flash_fx.match import aten as table
from flash_fx.match.normalize import Twin, example_value, make_twin
from flash_fx.testing import capture_rewrites


def twin_of(fn: Callable, *args: Tensor) -> tuple[GraphModule, Twin]:
    (graph, *_), _, _ = capture_rewrites(fn, *args)
    return graph, make_twin(graph)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).softmax(-1) @ v


def inputs(*, grad: bool = True) -> list[Tensor]:
    return [torch.randn(2, 5, 4, requires_grad=grad) for _ in range(3)]


def names(twin: Twin) -> list[str]:
    return [table.name_of(n) for n in twin.graph.nodes if n.op == "call_function"]


def user_node(graph: GraphModule, word: str) -> Node:
    return next(n for n in graph.graph.nodes if word in n.name)


def test_in_place_writes_give_an_alias_a_second_value() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        view = scores.view(2, 25)
        view.mul_(0.5)
        return scores.softmax(-1) @ v

    graph, twin = twin_of(scaled, *inputs())
    product = user_node(graph, "scores")
    entries = twin.history[product]
    write = twin.order[user_node(graph, "mul_")]
    assert len(entries) == 2
    assert entries[1][0] == write
    assert twin.value_at(product, write) is entries[0][1]
    assert twin.value_at(product, write + 1) is entries[1][1]


def test_the_twin_is_functional() -> None:
    def updated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores *= 0.5
        scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9)
        return scores.softmax(-1) @ v

    _, twin = twin_of(updated, *inputs())
    overloads = [n.target for n in twin.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert overloads
    assert not any(o._schema.is_mutable for o in overloads)


def test_every_tensor_of_the_user_has_a_twin() -> None:
    graph, twin = twin_of(attention, *inputs())
    tensors = [n for n in graph.graph.nodes if isinstance(example_value(n), Tensor) and n.op != "output"]
    assert all(n in twin.history for n in tensors)


def test_all_products_become_bmm() -> None:
    def rank_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.mm(torch.mm(q[0], k[0].t()).softmax(-1), v[0])

    def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.baddbmm(torch.zeros(1), q, k.mT, beta=0, alpha=0.5).softmax(-1) @ v

    def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bmn,bnd->bmd", torch.einsum("bmd,bnd->bmn", q, k).softmax(-1), v)

    for fn in (attention, rank_two, added, summed):
        found = names(twin_of(fn, *inputs())[1])
        assert found.count("bmm") == 2, fn.__name__
        assert not {"mm", "baddbmm", "einsum", "matmul"} & set(found)


def test_detach_stops_the_gradient() -> None:
    def stopped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).detach() @ v

    assert [table.name_of(n) for n in twin_of(stopped, *inputs())[1].stops] == ["detach"]
    assert not twin_of(stopped, *inputs(grad=False))[1].stops
    assert not twin_of(attention, *inputs())[1].stops


def test_no_grad_stops_the_gradient() -> None:
    def stopped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            weights = (q @ k.mT).softmax(-1)
        return weights @ v

    graph, twin = twin_of(stopped, *inputs())
    weights = twin.history[user_node(graph, "weights")][0][1]
    assert weights not in twin.requires_grad
    assert twin.stops


def test_outputs_and_changed_inputs_are_roots() -> None:
    def changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v)
        q.add_(1.0)
        return out

    graph, twin = twin_of(changed, *inputs(grad=False))
    written = next(n for n in graph.graph.nodes if n.op == "placeholder" and len(twin.history[n]) == 2)
    assert twin.history[written][-1][1] in twin.roots
    assert set(twin.graph.output_node().all_input_nodes) <= twin.roots
