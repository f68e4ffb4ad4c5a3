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


MUTANTS = [
    Mutant("%NAME%", "", "", "", ()),
]


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(w in m.name for w in words)]
    sound = {m.selection: passes(ROOT, m.selection) for m in chosen}
    print(f"{'mutant':34} {'file':34} {'verdict':9} seconds")
    survived = 0
    for mutant in chosen:
        start = time.monotonic()
        verdict = judge(mutant) if sound[mutant.selection] else "unsound"  # the selection fails without a mutation
        survived += verdict != "caught"
        print(f"{mutant.name:34} {mutant.file:34} {verdict:9} {time.monotonic() - start:.0f}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return 1 if survived or not chosen else 0


def judge(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results"))
        target = copy / mutant.file
        text = target.read_text()
        if text.count(mutant.before) != 1:
            return "stale"
        target.write_text(text.replace(mutant.before, mutant.after))
        return "survived" if passes(copy, mutant.selection) else "caught"


def passes(folder: Path, selection: tuple[str, ...]) -> bool:
    """Exit status 1 of pytest is a failed test; anything else but 0 is a fault of this script."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "FLASH_FX_CACHE_DIR": str(folder / ".mutate_cache")}
    environment.pop("TRITON_INTERPRET", None)
    if "kernels" in selection[0]:
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment["FLASH_FX_CACHE_DIR"] = tempfile.gettempdir()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *selection]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest {' '.join(selection)} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
