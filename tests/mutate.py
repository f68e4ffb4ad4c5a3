"""Break the package in one place at a time and show that the tests notice.

python tests/mutate.py          every mutant; a table; exit status 1 if one survives
python tests/mutate.py mask     only the mutants with "mask" in their name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("tests/kernels/test_interpret.py", "-k")
ZOO = ("tests/match/test_zoo_verdicts.py", "-k")
NUMERICS = ("tests/test_zoo_numerics.py", "-k")


@dataclass(frozen=True)
class Mutant:
    """Replace `before`, which the file holds, by `after`; the pytest selection must then fail."""

    name: str
    file: str
    before: str
    after: str
    selection: tuple[str, ...]


FORWARD, LIFT, PULL = "templates/forward.py.jinja", "flash_fx/match/lift.py", "flash_fx/match/pull.py"
SOFTMAX, ADVERSARIAL = "flash_fx/match/softmax", ("tests/test_adversarial.py", "-k")
MUTANTS = [
    Mutant(
        "blocks that a mask cuts taken for full", "templates/block_kinds.py.jinja",
        "tl.where(held == {{ BLOCK * BLOCK }}, {{ FULL }}, {{ PARTIAL }})", "{{ FULL }}",
        ("tests/kernels/test_blocks.py", "-k", "walk and causal"),
    ),
    Mutant(
        "empty blocks of a fill forgotten", "flash_fx/kernels/plan.py",
        'over("some * per_block", "blocks * per_block", _UNSTAGED)', 'over("some * per_block", "some * per_block", _UNSTAGED)',
        ("tests/kernels/test_blocks.py", "-k", "walk and filled"),
    ),
    Mutant(
        "a map shared by layers with other masks", "flash_fx/block_maps.py",
        "return str(mask.program), captures, site.sizes", "return str(mask.program), site.sizes",
        ("tests/kernels/test_rewritten.py", "-k", "grow_between_layers"),
    ),
    Mutant(
        "parts of a decode not rescaled", "templates/combine.py.jinja", "acc = acc * alpha +", "acc = acc +",
        ("tests/kernels/test_decode.py", "-k", "more_parts"),
    ),
    Mutant(
        "small: a batch counted twice", "templates/backward_small.py.jinja", "range(chunk * per_chunk,", "range(0,",
        ("tests/kernels/test_small.py", "-k", "test_one_kernel and (0 or 1)"),
    ),
    Mutant(
        "small: rows beyond M", "templates/recompute.py.jinja", "l_i = tl.where(mask_m, l_i, 1.0)", "l_i = l_i",
        ("tests/kernels/test_small.py", "-k", "test_one_kernel"),
    ),
    Mutant(
        "small: heads not summed", "flash_fx/kernels/launch.py", '(0,) if "h" in gradient.axes else (0, 1)', "(0,)",
        ("tests/kernels/test_small.py", "-k", "test_one_kernel"),
    ),
    Mutant(
        "distance: a row's part forgotten", "templates/recompute.py.jinja",
        "(lse{{ across }} - {{ phase.row }})", "lse{{ across }}",
        (*KERNELS, "scores_by_distance"),
    ),
    Mutant(
        "distance: LSE without a row's part", "flash_fx/kernels/facts.py", "_float(step * (Q0 - Q))", "_float(step * (Q - Q0))",
        (*KERNELS, "scores_by_distance"),
    ),
    Mutant(
        "DELTA of the kernel of dQ", "templates/backward_dq.py.jinja", "tl.sum(out * do.to(tl.float32), 1)",
        "tl.sum(do.to(tl.float32), 1)", (*KERNELS, "test_half"),
    ),
    Mutant(
        "a chunk of a sum counted twice", "templates/backward_capture.py.jinja",
        "range(chunk * per_chunk,", "range(0,", (*KERNELS, "shared_out"),
    ),
    Mutant(
        "a turned tile not turned back", "templates/backward_dkdv.py.jinja",
        '"tl.trans(dx.to(q.dtype))"', '"dx.to(q.dtype)"', (*KERNELS, "test_bias_of_every_broadcast"),
    ),
    Mutant(
        "a diagonal the wrong way", "flash_fx/score/diagonal.py", "right = _scaled(right, -1)", "right = _scaled(right, 1)",
        (*KERNELS, "diagonals_are_read"),
    ),
    Mutant(
        "last key dropped", FORWARD, "mask_n = (offs_n < N) | EVEN_N", "mask_n = offs_n < N - 1",
        (*KERNELS, "test_masks and none"),
    ),
    Mutant(
        "key head swapped", FORWARD,
        "K += tl.cast(off_b, tl.int64) * stride_kb + tl.cast(off_h // G, tl.int64) * stride_kh",
        "K += tl.cast(off_b, tl.int64) * stride_kb + tl.cast(off_h % (H // G), tl.int64) * stride_kh",
        (*KERNELS, "test_grouped_heads"),
    ),
    Mutant(
        "dropout not scaled up", FORWARD, "out = out * {{ survivor }}", "out = out", (*KERNELS, "test_dropout"),
    ),
    Mutant(
        "no scale in dK", "templates/backward_dkdv.py.jinja", "dk = dk * {{ slope_scale }}", "dk = dk",
        (*KERNELS, "test_masks and none"),
    ),
    Mutant(
        "no delta", "templates/recompute.py.jinja",
        "ds = p * (dp - delta{{ across }})", "ds = p * dp", (*KERNELS, "test_masks and none"),
    ),
    Mutant(
        "bias not summed", "flash_fx/kernels/launch.py", "partial = partial.sum(unread) if",
        "partial = partial[tuple(0 if i in unread else slice(None) for i in range(partial.dim()))] if",
        (*KERNELS, "test_bias_of_every_broadcast"),
    ),
    Mutant(
        "a batch of the matrix beside dQ forgotten", "templates/backward_dq_matrix.py.jinja",
        "off_gh // H * {{ batches }} + {{ batch }}", "off_gh // H * {{ batches }}", (*KERNELS, "beside_dq"),
    ),
    Mutant(
        "causal diagonal", PULL, 'compare("le" if operation == "tril"', 'compare("lt" if operation == "tril"',
        ("tests/match/test_pull.py", "-k", "tril"),
    ),
    Mutant(
        "softmax axis unchecked", LIFT,
        "if not runs_over_keys or any(x is N for i in others for x in walk(i)):", "if not index:",
        (*ZOO, "softmax_over and static"),
    ),
    Mutant(
        "weights used elsewhere", "flash_fx/match/find.py", "if user in live and user not in replaced and",
        "if not user and", (*ZOO, "(weights_in_a_loss or scores_returned) and static"),
    ),
    Mutant(
        "weights returned", "flash_fx/match/find.py", "        if node in twin.roots:", "        if not node:",
        (*ZOO, "weights_returned and static"),
    ),
    Mutant(
        "gradient stop ignored", PULL,
        "            if self.gradients and node in self.twin.stops:\n", "            if not node:\n",
        (*ZOO, "weights_detached and static"),
    ),
    Mutant(
        "detached part of a softmax", f"{SOFTMAX}/looking.py", 'table.name_of(node) in names and not node.meta.get("stop")',
        "table.name_of(node) in names", (*ADVERSARIAL, "total_detached and static"),
    ),
    Mutant(
        "rows of a quotient moved", f"{SOFTMAX}/divided.py",
        "return reached is not None and reached[:-1] == rows[:-1] and reached[-1] is key", "return reached is not None",
        (*ADVERSARIAL, "rows_moved and static"),
    ),
    Mutant(
        "sink forgotten", LIFT, "logit = puller.twin.sinks.get(anchor)", "logit = None",
        (*NUMERICS, "test_inference and softmax_plus_one"),
    ),
    Mutant(
        "product in part of the scores", PULL, "if self.partial and not all(", "if False and not all(",
        (*ADVERSARIAL, "null_key_at_the_end and static"),
    ),
    Mutant(
        "capture overwritten later", "flash_fx/rewriting.py", "if user is None or not self._wants_gradient() or",
        "if True or", (*ADVERSARIAL, "written_after_each_layer and static"),
    ),
    Mutant(
        "keep polarity", PULL, '    return op("not", e)\n', "    return e\n",
        ("tests/match/test_pull.py", "-k", "algebra"),
    ),
    Mutant(
        "fill polarity", LIFT, "return inner, _and(keep, negate(condition))", "return inner, _and(keep, condition)",
        (*NUMERICS, "test_inference and scale_before_mask"),
    ),
    Mutant(
        "writes seen too early", "flash_fx/match/normalize.py", "if when < moment:", "if True:",
        ("tests/match/test_normalize.py", "-k", "in_place"),
    ),
    Mutant(
        "fake strides", "flash_fx/ops/attention.py",
        "query.new_empty((b, m, h, value.shape[-1])).transpose(1, 2), lse",
        "query.new_empty((b, h, m, value.shape[-1])), lse",
        ("tests/ops/test_contracts.py", "-k", "fake_strides and plain"),
    ),
    Mutant(
        "seed ignored", "flash_fx/tiled.py", "_mix(*seed.tolist(), self.number)", "_mix(7, self.number)",
        (*NUMERICS, "dropout_repeats and not checkpoint"),
    ),
]  # fmt: skip


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(w in m.name for w in words)]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"  # so that edits made meanwhile do not show
        shutil.copytree(ROOT, base, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results"))
        return run(base, chosen)


def run(base: Path, chosen: list[Mutant]) -> int:
    start, survived = time.monotonic(), 0
    print(f"{'mutant':26} {'file':32} verdict", flush=True)
    with ThreadPoolExecutor(2) as pool:
        sound = pool.map(lambda s: passes(base, s), unmutated(chosen))
        for mutant, verdict in zip(chosen, pool.map(lambda m: judge(base, m), chosen), strict=True):
            survived += verdict != "caught"
            print(f"{mutant.name:26} {mutant.file:32} {verdict}", flush=True)
        if not all(sound):
            print("the selections fail without a mutation too, so the table says nothing")
            return 1
    print(f"{len(chosen) - survived} of {len(chosen)} caught in {time.monotonic() - start:.0f} s")
    return 1 if survived or not chosen else 0


def unmutated(mutants: list[Mutant]) -> list[tuple[str, ...]]:
    """All selections, joined by file: they must pass as the repository is."""
    files = dict.fromkeys(m.selection[0] for m in mutants)
    return [(f, "-k", " or ".join(f"({m.selection[2]})" for m in mutants if m.selection[0] == f)) for f in files]


def judge(base: Path, mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(base, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        target = copy / mutant.file
        text = target.read_text()
        if text.count(mutant.before) != 1:
            return "stale"
        target.write_text(text.replace(mutant.before, mutant.after))
        return "survived" if passes(copy, mutant.selection) else "caught"


def passes(folder: Path, selection: tuple[str, ...]) -> bool:
    """Exit status 1 of pytest is a failed test; anything else but 0 is a fault of this script."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_INTERPRET": str(int("kernels" in selection[0]))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *selection]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest {' '.join(selection)} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
