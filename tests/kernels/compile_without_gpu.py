"""Compiles one kernel for a target with no GPU at hand; run as a script by test_compile.py.

    python compile_without_gpu.py '<json list of jobs>'

A job is [name, template, program, captures [[dtype, ndim], ...], dtype, d, target]; the answer is one JSON object,
{name: {"regs", "spill_bytes", "shared", "shared_limit", "instructions"}} or {name: {"error"}}. A process of its own, since the
interpreter replaces triton.jit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_fx.kernels.plan import gradients_of
from flash_fx.kernels.render import load_kernel
from flash_fx.kernels.small import SMALL, tile_of
from flash_fx.kernels.spec import CaptureFact, KernelSpec
from flash_fx.kernels.tiles import Tile, padded, tile_for

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bool": "i1", "int64": "i64", "int32": "i32"}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
_INTEGERS = {
    "B", "H", "G", "M", "N", "NUM_BH", "NUM_BK", "CHUNKS", "SPLIT", "SPLITS", "ROWS", "COLS",
    "stride_lb", "stride_lh", "stride_row", "stride_col",
}  # fmt: skip
OF_A_GRADIENT = ("backward_capture", "backward_small", "backward_dq_matrix")
BATCHES = 4  # that share a matrix
UNTILED = ("combine", "block_kinds", "block_lists")
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def build(template: str, spec: KernelSpec, target: str, tile: Tile | None = None, even: bool = True) -> Any:
    """The compiled kernel, with the last strides 1 and everything else a multiple of 16."""
    context: list[Any] = gradients_of(spec.parsed, 0)[:1] if template in OF_A_GRADIENT else []
    context += [BATCHES] if template == "backward_dq_matrix" else []
    kernel = load_kernel(template, spec, *context)
    tile = tile or _tile(template, spec, SHARED[target])
    constants: dict[str, Any] = {
        "D": spec.d, "D_V": spec.dv, "BLOCK_D": padded(spec.d), "BLOCK_DV": padded(spec.dv), "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "GROUP": 8, "WIDTH": 128, "BLOCK_S": 16, "EVEN_M": even, "EVEN_N": even, "SHORT": False,
    }  # fmt: skip
    names = list(kernel.arg_names)
    constants = {k: v for k, v in constants.items() if k in names}
    signature = {n: "constexpr" if n in constants else _type(n, spec, constants) for n in names}
    attributes = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, t in signature.items() if t.startswith("*") or n.startswith("stride_") or n in ("M", "N")
    }  # fmt: skip
    attributes = {k: v for k, v in attributes.items() if signature[names[k[0]]] != "constexpr"}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)


def _tile(template: str, spec: KernelSpec, shared: int) -> Tile:
    if template == "backward_small":
        return tile_of(SMALL, SMALL, bool(spec.captures))
    batches = BATCHES if template == "backward_dq_matrix" else 1
    return Tile(32, 128, 4, 1) if template in UNTILED else tile_for(template, spec, shared, batches=batches)


def _type(name: str, spec: KernelSpec, constants: dict[str, Any]) -> str:
    capture = re.fullmatch(r"C(\d+)", name)
    if capture:
        return "*" + TYPES[spec.captures[int(capture[1])].dtype]
    if name in _INTEGERS:
        return "i32"
    stride = re.fullmatch(r"stride_(?:c(\d+)_(\d+)|\w+([a-z]))", name)
    if stride:
        last = stride[3] == "d" if stride[1] is None else int(stride[2]) == spec.captures[int(stride[1])].ndim - 1
        if last:
            constants[name] = 1
        return "constexpr" if last else "i32"
    if name in ("GRAD0", "LSE", "DELTA", "RESIDUAL", "TOP", "LOW", "PART", "TOPS", "SUMS"):
        return "*fp32"
    if name in ("BLOCKS", "LISTS", "KINDS"):
        return "*i8" if name == "KINDS" else "*i32"
    if name == "SEED":
        return "*i64"
    if re.fullmatch(r"S\d+|SIZE_\d+", name):
        return "i32"
    return "*" + TYPES[spec.dtype]


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread and spilled bytes, from ptxas or the AMD metadata."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        regs, spill = (re.search(rf"\.{k}:\s+(\d+)", text) for k in ("vgpr_count", "vgpr_spill_count"))
        return {"regs": int(regs[1]) if regs else 0, "spill_bytes": 4 * int(spill[1]) if spill else 0}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as f:
            f.write(kernel.asm["cubin"])
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"regs": int(found[1]), "spill_bytes": int(found[2])} if found else {"regs": 0, "spill_bytes": 0}


def main() -> None:
    answer = {}
    for name, template, program, captures, dtype, d, target in json.loads(sys.argv[1]):
        facts = tuple(CaptureFact(*c) for c in captures)
        dtype, _, given = dtype.partition(" ")
        precision = given or ("ieee" if dtype == "float32" else None)
        sizes = len(set(re.findall(r"\bs\d+\b", program)))
        blocks = " blocks " in name
        spec = KernelSpec(program, facts, dtype, d, d, sizes, precision, blocks=blocks)
        try:
            kernel = build(template, spec, target)
            answer[name] = {
                **resources(kernel), "shared": kernel.metadata.shared, "shared_limit": SHARED[target],
                "instructions": kernel.asm.get("ptx", "").count(";"),
            }  # fmt: skip
        except Exception as e:
            answer[name] = {"error": f"{type(e).__name__}: {e}"[:2000]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
