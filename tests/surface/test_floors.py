"""Imports go down the floors, never up or across. Read from the source, so imports inside functions count too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "flash_fx"

# the first name of a module inside the package -> its floor; siblings on a floor that may not meet are in APART
FLOORS = {
    **dict.fromkeys(["errors", "limits", "options", "reject", "report", "version", "compat"], 0),
    **dict.fromkeys(["layout", "score", "scatter"], 1),
    **dict.fromkeys(["match", "kernels", "tiled", "cpu_sdpa", "cudnn_sdpa"], 2),
    **dict.fromkeys(["ops", "fingerprint"], 3),
    **dict.fromkeys(
        ["placing", "block_maps", "rewriting", "graph_pass", "backend", "explaining", "exported", "testing"], 4
    ),
    **dict.fromkeys(["pytest_plugin", "target", "measure", "demo_models", "demo", "bench", "cli", "__main__", "__init__"], 5),
}
APART = {
    ("match", "kernels"), ("kernels", "match"), ("match", "tiled"), ("tiled", "match"), ("match", "cpu_sdpa"),
    *((a, b) for x in ("match", "kernels", "tiled", "cpu_sdpa") for a, b in ((x, "cudnn_sdpa"), ("cudnn_sdpa", x))),
    ("cpu_sdpa", "match"), ("kernels", "tiled"), ("tiled", "kernels"), ("kernels", "cpu_sdpa"), ("cpu_sdpa", "kernels"),
}  # fmt: skip
NO_TORCH_FX = ("kernels", "score", "scatter", "tiled", "cpu_sdpa", "cudnn_sdpa")


def imports_of(source: str, package: tuple[str, ...]) -> set[str]:
    """Absolute dotted names a module imports; `package` is where it stands, such as ("flash_fx", "match")."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{prefix}.{a.name}" for a in node.names}
    return found


def unit(dotted: str) -> str | None:
    """`flash_fx.match.find.Site` -> match; None for what is not ours."""
    parts = dotted.split(".")
    if parts[0] != "flash_fx":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "__init__"


def violations(path_parts: tuple[str, ...], source: str) -> list[str]:
    """What a module at flash_fx/<path_parts> imports against the floors."""
    here = path_parts[0]
    problems = []
    for name in sorted(imports_of(source, ("flash_fx", *path_parts[:-1]))):
        there = unit(name)
        if there is not None and there != here:
            if FLOORS[there] > FLOORS[here]:
                problems.append(f"{here} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})")
            if (here, there) in APART:
                problems.append(f"{here} imports its sibling {name}")
        if here in NO_TORCH_FX and name.startswith("torch.fx"):
            problems.append(f"{here} imports {name}")
        if here == "score" and name.split(".")[0] in ("triton", "jinja2"):
            problems.append(f"{here} imports {name}")
    return problems


def modules() -> list[tuple[str, ...]]:
    return [p.relative_to(PACKAGE).with_suffix("").parts for p in sorted(PACKAGE.rglob("*.py"))]


def test_every_module_has_a_floor():
    assert {m[0] for m in modules()} <= set(FLOORS) | {"_templates", "_examples"}


@pytest.mark.parametrize("module", modules(), ids=".".join)
def test_imports_go_down(module):
    assert violations(module, PACKAGE.joinpath(*module).with_suffix(".py").read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (("match", "find"), "from ..kernels import launch"),
        (("match", "find"), "def f():\n    from ..ops.attention import attention"),
        (("kernels", "emit"), "from ..match.site import Site"),
        (("kernels", "emit"), "import torch.fx"),
        (("kernels", "emit"), "from torch.fx import Node"),
        (("score", "expr"), "from .. import tiled"),
        (("score", "expr"), "import flash_fx.backend"),
        (("errors",), "from .options import OPTIONS\nfrom .score.expr import Expr"),
        (("ops", "attention"), "from ..rewriting import rewrite_graph"),
        (("tiled",), "from .kernels import launch"),
    ],
)
def test_the_check_can_fail(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (("ops", "attention"), "from ..kernels import launch\nfrom .. import tiled"),
        (("match", "find"), "from ..score.expr import Expr\nfrom .site import Site\nimport torch.fx"),
        (("kernels", "launch"), "from . import render\nfrom ..score import grad"),
        (("cli",), "from .demo import run"),
    ],
)
def test_allowed_imports(module, source):
    assert violations(module, source) == []
