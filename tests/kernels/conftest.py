"""The kernels run here in Triton's interpreter, which must be chosen before Triton is first imported.

pytest tests/kernels            # chooses it
TRITON_INTERPRET=1 pytest       # so does this; a plain `pytest` skips test_interpret.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def _asked_for_this_folder_alone() -> bool:
    paths = [Path(a.split("::")[0]).resolve() for a in sys.argv[1:] if not a.startswith("-")]
    paths = [p for p in paths if p.exists()]
    return bool(paths) and all(p == HERE or HERE in p.parents for p in paths)


if "triton" not in sys.modules and _asked_for_this_folder_alone():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered files go to the session's temporary folder."""
    if "FLASH_FX_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("FLASH_FX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "flash_fx_cache"))


@pytest.fixture(autouse=True)
def _all_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths here are small, yet the kernels and loops of long sequences are what is tested."""
    if "flash_fx.kernels.launch" in sys.modules:
        monkeypatch.setattr("flash_fx.kernels.launch.SHORT", 0)
        monkeypatch.setattr("flash_fx.kernels.small.SMALL", 0)
