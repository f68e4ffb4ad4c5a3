"""Launches under symbolic tracing become graph nodes, with sizes still symbols."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "an interpreted kernel cannot be traced: run `TRITON_INTERPRET=0 pytest tests/kernels/test_trace.py`",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from torch.fx.experimental.proxy_tensor import make_fx

from flash_fx import compat
from flash_fx.kernels import launch, tiles
from flash_fx.kernels.render import is_rendered
from flash_fx.score.text import parse


@pytest.mark.parametrize(
    ("index", "shape", "nodes"),
    [
        ("b // s0, h, q_idx, kv_idx", (3, 2, 40, 50), []),
        ("b // s0, h, kv_idx", (3, 2, 50), ["sum_by_index"]),
        ("h, q_idx + s0, kv_idx", (2, 42, 50), ["sum_by_index"]),
    ],
)
def test_gradient_at_a_computed_index_traces_with_symbolic_sizes(index: str, shape: tuple, nodes: list[str]) -> None:
    program = parse(f"score = score + c0[{index}]")

    def step(q, k, v, bias, g, two):
        sizes = [two.shape[0]]
        out, lse = launch.forward(q, k, v, [bias], sizes, None, program)
        return launch.backward(g, q, k, v, [bias], sizes, None, out, lse, program, [False, False, False, True])[0]

    shapes = ((6, 2, 40, 16), (6, 2, 50, 16), (6, 2, 50, 24), shape, (6, 2, 40, 24), (2,))
    graph = make_fx(step, tracing_mode="symbolic")(*(torch.randn(s) for s in shapes))
    names = [str(n.target) for n in graph.graph.nodes]
    assert sum("triton_kernel_wrapper" in n for n in names) == 3  # forward, delta, bias
    assert [n.split(".")[1] for n in names if n.startswith("flash_fx")] == nodes
    output = graph.graph.find_nodes(op="output")[0].args[0].meta["val"]
    assert tuple(map(int, output.shape)) == shape and all(isinstance(n, torch.SymInt) for n in output.shape)


def test_a_fill_that_is_added_traces_with_the_bound_of_the_scores() -> None:
    program = parse("score = score * 0.125 + c0[h, 0, kv_idx] + where(kv_idx <= q_idx, 0.0, -1e9)")

    def step(q, k, v, bias, g):
        out, lse = launch.forward(q, k, v, [bias], [], None, program)
        return out, *launch.backward(g, q, k, v, [bias], [], None, out, lse, program, [True] * 4)

    shapes = ((3, 4, 40, 16), (3, 2, 50, 16), (3, 2, 50, 24), (4, 1, 50), (3, 4, 40, 24))
    graph = make_fx(step, tracing_mode="symbolic")(*(torch.randn(s) for s in shapes))
    targets = [str(n.target) for n in graph.graph.nodes]
    assert sum("triton_kernel_wrapper" in t for t in targets) == 5
    assert not any("item" in t or "_local_scalar" in t for t in targets)  # the host waits for nothing


def test_forward_and_backward_trace_with_symbolic_sizes() -> None:
    program = parse("score = score * 0.125 + c0[h, q_idx, kv_idx]; keep = kv_idx <= q_idx + s0; sink = c1[h]")

    def step(q, k, v, bias, sink, g):
        captures, sizes = [bias, sink], [k.shape[2] - q.shape[2]]
        out, lse = launch.forward(q, k, v, captures, sizes, None, program, bmhd=True)
        return out, *launch.backward(g, q, k, v, captures, sizes, None, out, lse, program, [True] * 5)

    inputs = [
        torch.randn(s) for s in ((3, 4, 40, 16), (3, 2, 50, 16), (3, 2, 50, 24), (4, 40, 50), (4,), (3, 4, 40, 24))
    ]
    graph = make_fx(step, tracing_mode="symbolic")(*inputs)
    launches = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    assert len(launches) == 5  # forward, delta, dq, dk and dv, bias
    outputs = [n.meta["val"] for n in graph.graph.find_nodes(op="output")[0].args[0]]
    assert all(isinstance(outputs[0].shape[i], torch.SymInt) for i in (0, 2))
    assert [tuple(map(int, o.shape)) for o in outputs] == [(3, 4, 40, 24), *(tuple(t.shape) for t in inputs[:5])]


def test_tables_and_diagonals_trace_with_symbolic_sizes() -> None:
    program = parse("score = score + c0[c1[q_idx, kv_idx], h] + c2[h, kv_idx - q_idx + q_len - 1]")

    def step(q, k, v, table, positions, diagonals, g):
        captures = [table, positions, diagonals]
        out, lse = launch.forward(q, k, v, captures, [], None, program)
        needs = [True, True, True, True, False, True]
        return out, *launch.backward(g, q, k, v, captures, [], None, out, lse, program, needs)

    shapes = ((3, 4, 40, 16), (3, 2, 50, 16), (3, 2, 50, 24), (11, 4), (40, 50), (4, 89), (3, 4, 40, 24))
    inputs = [torch.randn(s) for s in shapes]
    inputs[4] = inputs[4].abs().int()
    graph = make_fx(step, tracing_mode="symbolic")(*inputs)
    names = [str(n.target) for n in graph.graph.nodes]
    assert sum("triton_kernel_wrapper" in n for n in names) == 6  # forward, delta, dq, dk and dv, two captures
    assert [n.split(".")[1] for n in names if n.startswith("flash_fx")] == ["sum_by_index"]
    assert not any("item" in n or "_local_scalar" in n for n in names)
    outputs = [n.meta["val"] for n in graph.graph.find_nodes(op="output")[0].args[0]]
    wanted = [(3, 4, 40, 24), *(shapes[i] for i in (0, 1, 2, 3, 5))]
    assert [tuple(map(int, o.shape)) for o in outputs] == wanted
    assert all(isinstance(o.shape[-1], torch.SymInt) for o in outputs[-2:])


def test_a_kernel_is_analysed_once_however_often_it_is_called() -> None:
    """Compile time: each analysis compiles the kernel to Triton's IR."""
    asked = []

    def analyse(kernel, kwargs, tma_descriptor_metadata):
        asked.append(kwargs)
        return ["OUT"]

    remembering = compat._remembering(analyse, is_known=lambda kernel: kernel is not other)
    ours, other = (SimpleNamespace(fn=function) for function in (min, max))
    x, half = torch.randn(3), torch.randn(3).half()
    for arguments in ({"OUT": x, "M": 3}, {"OUT": torch.randn(5), "M": 3}, {"OUT": half, "M": 3}, {"OUT": x, "M": 4}):
        for wrapped in (ours, SimpleNamespace(fn=ours), SimpleNamespace(fn=ours)):
            assert remembering(wrapped, arguments, {}) == ["OUT"]
    assert [(a["OUT"].dtype, a["M"]) for a in asked] == [(x.dtype, 3), (half.dtype, 3), (x.dtype, 4)]
    remembering(other, {"OUT": x}, {})
    remembering(other, {"OUT": x}, {})
    assert len(asked) == 5


def test_the_analysis_of_this_pytorch_is_found() -> None:
    from torch._higher_order_ops import triton_kernel_wrap

    compat.remember_kernel_accesses(is_rendered)
    found = [getattr(triton_kernel_wrap, n, None) for n in ("identify_accessed_tensors", "identify_mutated_tensors")]
    assert any(hasattr(f, "flash_fx_answers") for f in found)


def test_under_max_autotune_launches_use_the_fastest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up here: more stages are faster, and a kernel of 128 keys does not run at all."""
    asked = []

    def milliseconds(call) -> float:
        tile, (kind,) = tiles._OVERRIDE[-1]
        asked.append(kind)
        if tile.block_n == 128:
            raise RuntimeError("out of resources")
        return 1.0 / (tile.num_stages + tile.block_m / 1000)

    def step(q, k, v, bias, g):
        out, lse = launch.forward(q, k, v, [bias], [], None, program)
        return out, *launch.backward(g, q, k, v, [bias], [], None, out, lse, program, [True] * 4)

    program = parse("score = score * 0.125 + c0[h, q_idx, kv_idx]")
    monkeypatch.setattr(compat, "searches_for_the_fastest", lambda: True)
    monkeypatch.setattr(compat, "milliseconds", milliseconds)
    monkeypatch.setattr(launch._Run, "_only", lambda self, kind: lambda: None)
    shapes = ((3, 4, 640, 16), (3, 4, 650, 16), (3, 4, 650, 16), (4, 640, 650), (3, 4, 640, 16))
    operands = [torch.randn(s, dtype=torch.bfloat16) for s in shapes]
    make_fx(step, tracing_mode="symbolic")(*operands)
    kinds = {"forward", "backward_dq", "backward_dkdv", "backward_capture"}
    assert set(asked) == kinds
    count = len(asked)
    graph = make_fx(step, tracing_mode="fake")(*operands)  # lengths as numbers: another choice
    assert len(asked) == 2 * count
    make_fx(step, tracing_mode="fake")(*operands)
    assert len(asked) == 2 * count
    used = [launched(n) for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    chosen = {name: stages for name, stages in used if name.removeprefix("flash_fx_") in kinds}
    assert chosen == {f"flash_fx_{kind}": 4 for kind in kinds}


def launched(node) -> tuple[str, int]:
    """Name of the kernel and its number of stages."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    return kernel.fn.fn.__name__, kernel.configs[0].num_stages
