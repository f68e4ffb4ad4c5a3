"""`flash-fx bench`: what it prints and writes, and a peer that runs out of memory."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from flash_fx import bench, cli
from flash_fx.errors import TargetError


def test_command_writes_numbers_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    every = bench.peers
    monkeypatch.setattr(
        bench, "peers", lambda n, d: {k: v for k, v in every(n, d).items() if k in ("flash_fx", "eager")}
    )
    table, picture = tmp_path / "cost.csv", tmp_path / "cost.svg"
    command = ["bench", "--seq", "32", "16", "--repeats", "1", "--csv", str(table), "--plot", str(picture)]
    assert cli.main(command) == 0
    rows = list(csv.DictReader(table.open()))
    assert [(r["length"], r["peer"]) for r in rows] == [
        (n, p) for n in ("16", "32") for p in ("flash_fx", "eager")
    ]  # fmt: skip
    assert all(float(r["ms"]) > 0 for r in rows)
    assert "<svg" in picture.read_text() and "flash_fx" in capsys.readouterr().out


def test_a_peer_without_memory_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make(length: int) -> bench.Attention:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            asked.append(length)
            if length > 16:
                raise torch.OutOfMemoryError("no memory")
            return q + k + v

        return attention

    monkeypatch.setattr(bench, "peers", lambda n, _: {"small": lambda: make(n), "any": lambda: bench.legacy})
    points = list(bench.measure([64, 16, 32], torch.device("cpu"), torch.float32, bench.Shape(heads=1), 1))
    assert [(p.peer, p.length) for p in points] == [("small", 16), ("any", 16), ("any", 32), ("any", 64)]
    assert asked.count(32) == 1 and 64 not in asked


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(TargetError, match="pip install matplotlib"):
        bench.plot([bench.Point("a", 16, 1.0, 2.0)], tmp_path / "x.svg", "")
