"""The command line: help, exit codes, and errors of one readable line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flash_fx import cli, target
from flash_fx.errors import TargetError

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import torch
from torch import nn

def attention(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v

def nothing(x):
    return x.softmax(-1)

def fails(x):
    raise ValueError("first line\\nsecond line")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids):
        x = self.embed(ids)
        return self.drop((x @ x.mT).softmax(-1)) @ x

class NeedsWidth(nn.Module):
    def __init__(self, width):
        super().__init__()

net = Net()
number = 3

def with_args():
    return net, (torch.zeros(2, 5, dtype=torch.int64),)

def with_kwargs():
    return attention, dict(zip("qkv", torch.randn(3, 2, 4, 8, 16)))

def just_model():
    return Net()

def closed_over():
    q = torch.ones(1, 2, 4, 8)
    return attention(q, q, q)
"""
QKV = ["--shape", "2,4,8,16", "2,4,8,16", "2,4,8,16"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `mine` in the current folder."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mine"
    sys.modules.pop("mine", None)


def run(*argv):
    try:
        return cli.main(list(argv))
    except SystemExit as e:  # argparse
        return e.code


def shell(*argv, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "flash_fx", *argv], cwd=cwd, capture_output=True, text=True)


# *** as a person runs it ***


def test_explain_in_a_shell():
    done = shell("explain", "examples.mingpt:build")
    assert done.returncode == 0, done.stderr
    head, first, program, *_ = done.stdout.splitlines()
    assert head == "2 fused, 0 left"
    assert first.startswith("fused mingpt.py:")
    assert "keep = c0[0, 0, q_idx, kv_idx] != 0.0" in program


def test_bad_target_in_a_shell():
    done = shell("explain", "examples.mingpt:nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "flash-fx: error: examples.mingpt has no 'nope'\n"


@pytest.mark.parametrize("command", [[], ["explain"], ["demo"]])
def test_help(command, capsys):
    assert run(*command, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: flash-fx")
    assert text.isascii()
    if command:
        assert f"flash-fx {command[0]}" in text.split("examples:")[1]


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("flash-fx 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required"),
        (["explain"], "MODULE:CALLABLE"),
        (["benchmark"], "invalid choice"),
        (["demo", "--seq", "0"], "expected a positive number, got '0'"),
        (["demo", "--model", "t5"], "invalid choice"),
    ],
)
def test_usage_errors(argv, message, capsys):
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


# *** targets ***


@pytest.mark.parametrize(
    ("name", "shapes", "fused"),
    [
        ("attention", QKV, 1),
        ("with_args", [], 1),
        ("with_kwargs", [], 1),
        ("net", ["--shape", "2,5:int64"], 1),
        ("Net", ["--shape", "2,5", "--dtype", "int64"], 1),
        ("just_model", ["--shape", "2,5:int64"], 1),
        ("with_args", ["--shape", "3,7:int64"], 1),
        ("closed_over", [], 1),
        ("Net.forward", ["--shape", "2,5"], None),
        ("nothing", ["--shape", "4,4"], 0),
    ],
)
def test_targets(module, name, shapes, fused, capsys):
    if fused is None:  # an unbound method lacks its self
        assert run("explain", f"{module}:{name}", *shapes) == 2
        return
    assert run("explain", f"{module}:{name}", *shapes) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{fused} fused, 0 left"


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("mine", [], "'mine' is not MODULE:CALLABLE, for example examples.mingpt:build"),
        ("mine:", [], "'mine:' is not MODULE:CALLABLE, for example examples.mingpt:build"),
        ("no_such:f", [], "cannot import no_such: ModuleNotFoundError: No module named 'no_such'"),
        ("mine:nope", [], "mine has no 'nope'"),
        ("mine:number", [], "mine:number is a int; expected a function, an nn.Module or a factory"),
        (
            "mine:attention",
            [],
            "mine:attention takes arguments: give one --shape for each tensor, for example --shape 2,4,128,64",
        ),
        ("mine:attention", ["--shape", "2,x"], "shape '2,x' is not a list of sizes such as 2,4,128,64 or 2,128:int64"),
        (
            "mine:attention",
            ["--shape", "2,-1"],
            "shape '2,-1' is not a list of sizes such as 2,4,128,64 or 2,128:int64",
        ),
        ("mine:attention", ["--shape", "2:int7"], "unknown dtype 'int7'; expected one of " + ", ".join(target.DTYPES)),
        ("mine:NeedsWidth", [], "mine:NeedsWidth() failed: TypeError: "),
        ("mine:fails", ["--shape", "2"], "mine:fails failed: ValueError: first line"),
        ("mine:attention", ["--shape", "2,3"], "mine:attention failed: "),
    ],
)
def test_bad_targets(module, name, shapes, message, capsys):
    assert run("explain", name, *shapes) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"flash-fx: error: {message}")
    assert err.count("\n") == 1


def test_module_that_fails_at_import(tmp_path, monkeypatch):
    (tmp_path / "broken_one.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError, match="cannot import broken_one: ZeroDivisionError: division by zero"):
        target.find("broken_one:f")


# *** options of explain ***


def test_json(module, capsys):
    assert run("explain", f"{module}:attention", *QKV, "--json") == 0
    assert json.loads(capsys.readouterr().out)["fused"] == 1


def test_strict(module, capsys):
    assert run("explain", f"{module}:nothing", "--shape", "4,4", "--strict") == 1
    assert run("explain", f"{module}:attention", *QKV, "--strict") == 0


def test_train(module, capsys):
    assert run("explain", f"{module}:net", "--shape", "2,5:int64") == 0
    assert "drop = " not in capsys.readouterr().out
    assert run("explain", f"{module}:net", "--shape", "2,5:int64", "--train") == 0
    assert "drop = 0.5" in capsys.readouterr().out


def test_dtype(module, capsys):
    assert run("explain", f"{module}:attention", *QKV, "--dtype", "bfloat16") == 0
    assert " bfloat16 [2, 4, 8, 16]" in capsys.readouterr().out


# *** demo ***


def test_demo(capsys, monkeypatch):
    """The display; `make demo` runs it with real code generation."""
    import torch

    from flash_fx import demo, make_backend

    def compiled(name, built):
        backend = {"stock": "eager", "flash_fx": make_backend("eager")}.get(name)
        return torch.compile(built.model, backend=backend) if backend else built.model

    monkeypatch.setattr(demo, "_compiled", compiled)
    assert demo.run("mingpt", [64], None, 1) == 0
    text = capsys.readouterr().out
    assert "found: 2 fused, 0 left" in text
    assert "2 x fused mingpt.py" in text
    for word in ("eager", "stock", "flash_fx", "logits", "gradients", "training", "inference", "16 x 64"):
        assert word in text


def test_demo_says_what_ran_out_of_memory(capsys, monkeypatch):
    import torch

    from flash_fx import demo

    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(demo, "_compiled", lambda name, built: built.model)
    monkeypatch.setattr(demo, "median_seconds", full)
    demo.run("mingpt", [64], None, 1)
    assert capsys.readouterr().out.count("out of memory") == 6


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mingpt"])
def test_demo_models_fuse(name):
    import torch

    import flash_fx
    from flash_fx.demo_models import SMALL, build

    if name != "mingpt":
        pytest.importorskip("transformers")
    demo = build(name, SMALL)
    report = flash_fx.explain(demo.logits, demo.model, torch.zeros(2, 32, dtype=torch.int64))
    assert (report.fused, report.left) == (SMALL.layers, 0)
