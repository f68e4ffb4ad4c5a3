"""The README is true: its Python blocks run, and the output it shows is what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_fx

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", README, re.S)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
TEXT = [text for kind, text in BLOCKS if kind == "text"]


def run(path, monkeypatch, *pytest_arguments):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, *pytest_arguments, str(path)]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_first_block_is_the_example():
    assert PYTHON[0] == (ROOT / "examples" / "custom_bias.py").read_text()
    assert sum(bool(line.strip()) for line in PYTHON[0].splitlines()) <= 8


def test_first_block_prints_what_is_shown(monkeypatch):
    assert run(ROOT / "examples" / "custom_bias.py", monkeypatch) == TEXT[0]


@pytest.mark.parametrize("number", range(1, len(PYTHON)))
def test_blocks_run(number, tmp_path, monkeypatch):
    path = tmp_path / "test_block.py"
    path.write_text(PYTHON[number])
    is_test = "def test_" in PYTHON[number]
    run(path, monkeypatch, *(("-m", "pytest", "-q", "-p", "no:cacheprovider") if is_test else ()))


def test_linked_files_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_options_are_all_named():
    from dataclasses import fields

    from flash_fx.options import INNER_BACKENDS, Options

    for name in [f.name for f in fields(Options)]:
        assert f"| `{name}` |" in README
    for name in INNER_BACKENDS:
        assert f'`"{name}"`' in README
    assert flash_fx.__all__


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z][\w-]*)", README)) <= targets | {"test"}


def test_the_page_of_what_is_recognised_is_the_table_of_cases() -> None:
    from recognised import PAGE, page

    assert PAGE.read_text() == page(), "run `python tests/recognised.py`"
