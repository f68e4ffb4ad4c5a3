"""Every kernel compiles for four targets with no GPU, and the main ones keep to their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
CAUSAL = "score = score * 0.125; keep = kv_idx <= q_idx"
BIAS = (
    "score = tanh(score * 0.01) * 50.0 + c0[h, q_idx, kv_idx]; keep = c1[b, kv_idx] & (kv_idx <= q_idx); sink = c2[h]"
)
FACTS = [["bfloat16", 3], ["bool", 2], ["float32", 1]]
DROP = "score = score * 0.125; drop = 0.1; weight = c2[h]"
FILLS = {
    "select": "score = where(kv_idx <= q_idx, score * 0.125, -1e9)",
    "added": "score = score * 0.125 + where(kv_idx <= q_idx, 0.0, -3.4028234663852886e+38) + c0[h, q_idx, kv_idx]",
}
ALIBI = "score = score * 0.125 + c0[h] * float(kv_idx - q_idx); keep = kv_idx <= q_idx"
KERNELS = ["forward", "delta", "backward_dkdv", "backward_dq"]
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]

JOBS: dict[str, list] = {}
for target in TARGETS:
    for kernel in KERNELS:
        JOBS[f"{target} causal {kernel}"] = [kernel, CAUSAL, [], "bfloat16", 64, target]
for kernel in [*KERNELS, "backward_capture"]:
    JOBS[f"sm_90 bias {kernel}"] = [kernel, BIAS, FACTS, "bfloat16", 64, "sm_90"]
for kernel in KERNELS:
    JOBS[f"sm_90 dropout {kernel}"] = [kernel, DROP, FACTS, "float16", 128, "sm_90"]
    JOBS[f"sm_90 no dropout {kernel}"] = [kernel, DROP.replace("drop = 0.1; ", ""), FACTS, "float16", 128, "sm_90"]
    for form, score in FILLS.items():
        JOBS[f"sm_90 {form} fill {kernel}"] = [kernel, score, FACTS[:1], "bfloat16", 64, "sm_90"]
JOBS["sm_90 added fill backward_capture"] = ["backward_capture", FILLS["added"], FACTS[:1], "bfloat16", 64, "sm_90"]
DOCUMENTS = "score = score * 0.125; keep = (c0[b, q_idx] == c0[b, kv_idx]) & (kv_idx <= q_idx)"
for target in TARGETS:
    JOBS[f"{target} blocks forward"] = ["forward", DOCUMENTS, [["int64", 2]], "bfloat16", 64, target]
    JOBS[f"{target} decode"] = ["decode", BIAS, FACTS, "bfloat16", 128, target]
for kernel in ("backward_dkdv", "backward_dq"):
    JOBS[f"sm_90 blocks {kernel}"] = [kernel, DOCUMENTS, [["int64", 2]], "bfloat16", 64, "sm_90"]
JOBS["sm_90 combine"] = ["combine", BIAS, FACTS, "bfloat16", 128, "sm_90"]
JOBS["sm_90 block_kinds"] = ["block_kinds", DOCUMENTS, [["int64", 2]], "float32", 1, "sm_90"]
JOBS["sm_90 block_lists"] = ["block_lists", "", [], "float32", 1, "sm_90"]
for kernel in ("forward", "backward_dkdv"):
    JOBS[f"sm_90 wide {kernel}"] = [kernel, CAUSAL, [], "bfloat16", 512, "sm_90"]
JOBS["sm_90 matrix backward_dkdv"] = [
    "backward_dkdv", "score = score * 0.125 + c0[0, h, q_idx, kv_idx]", [["bfloat16", 4]], "bfloat16", 64, "sm_90",
]  # fmt: skip
for target in TARGETS:
    JOBS[f"{target} matrix backward_dq_matrix"] = [
        "backward_dq_matrix", BIAS.replace("c1[b, kv_idx] & ", ""), FACTS, "bfloat16", 64, target,
    ]  # fmt: skip
    JOBS[f"{target} window backward_small"] = [
        "backward_small", "score = score * 0.125 + c0[h, q_idx, kv_idx]; drop = 0.1", [["bfloat16", 3]], "bfloat16", 32, target,
    ]  # fmt: skip
for kernel in ("forward", "backward_dkdv", "backward_dq"):
    JOBS[f"sm_90 alibi {kernel}"] = [kernel, ALIBI, [["float32", 1]], "bfloat16", 64, "sm_90"]
JOBS["sm_90 float32 forward"] = ["forward", CAUSAL, [], "float32", 64, "sm_90"]
for kernel in KERNELS:
    JOBS[f"sm_90 three products {kernel}"] = [kernel, CAUSAL, [], "float32 tf32x3", 128, "sm_90"]
JOBS["sm_90 column backward_capture"] = [
    "backward_capture",
    "score = score + c0[b, kv_idx]",
    [["float32", 2]],
    "bfloat16",
    64,
    "sm_90",
]
JOBS["sm_90 grouped backward_capture"] = [
    "backward_capture",
    "score = score * 0.125 + c0[b // s0, 0, h % 2, q_idx, kv_idx]",
    [["bfloat16", 5]],
    "bfloat16",
    64,
    "sm_90",
]
JOBS["sm_90 row backward_capture"] = [
    "backward_capture",
    "score = score * c0[h]",
    [["float32", 1]],
    "bfloat16",
    64,
    "sm_90",
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment.setdefault("FLASH_FX_CACHE_DIR", str(tmp_path_factory.mktemp("rendered")))
    jobs = [[name, *job] for name, job in JOBS.items()]
    script = str(Path(__file__).with_name("compile_without_gpu.py"))
    halves = [
        subprocess.Popen([sys.executable, script, json.dumps(half)], env=environment, stdout=subprocess.PIPE, text=True)
        for half in (jobs[::2], jobs[1::2])
    ]
    answer: dict[str, dict] = {}
    for process in halves:
        answer |= json.loads(process.communicate(timeout=600)[0])
    return answer


@pytest.mark.parametrize("name", JOBS)
def test_compiles(compiled: dict[str, dict], name: str) -> None:
    found = compiled[name]
    assert "error" not in found, found["error"]
    assert found["shared"] <= found["shared_limit"], found


@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_does_not_spill(compiled: dict[str, dict], kernel: str) -> None:
    assert compiled[f"sm_90 causal {kernel}"]["spill_bytes"] <= 32, compiled[f"sm_90 causal {kernel}"]


@pytest.mark.parametrize("name", ["sm_90 matrix backward_dkdv", "sm_90 window backward_small"])
def test_a_matrix_stays_within_the_registers(compiled: dict[str, dict], name: str) -> None:
    assert compiled[name]["spill_bytes"] == 0


@pytest.mark.parametrize(
    ("kernel", "elements", "most"), [("forward", 64, 20), ("backward_dq", 32, 20), ("backward_dkdv", 32, 50)]
)
def test_dropout_shares_its_draws(compiled: dict[str, dict], kernel: str, elements: int, most: int) -> None:
    """PTX instructions per score and thread; one Philox call for each score takes 78."""
    dropped, plain = (compiled[f"sm_90 {name} {kernel}"]["instructions"] for name in ("dropout", "no dropout"))
    assert dropped - plain <= most * elements
