"""A wheel and an editable install, each in its own environment with the torch of this one. Both find the templates."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("flash_fx", "templates", "examples")
CHECK = """
import flash_fx, torch
from pathlib import Path
from flash_fx.demo_models import SMALL, build
from flash_fx.graph_pass import FlashAttentionPass
from flash_fx.kernels.render import template_folder
from importlib.metadata import entry_points
print(Path(flash_fx.__file__).parent)
print(template_folder())
assert "flash_fx" in torch._dynamo.list_backends()
assert len(FlashAttentionPass().uuid()) == 64
assert build("mingpt", SMALL).title.startswith("minGPT")
assert any(e.value == "flash_fx.pytest_plugin" for e in entry_points(group="pytest11"))
x = torch.randn(3, 1, 2, 8, 16)
report = flash_fx.explain(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *x)
assert report.fused == 1, report
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The files of a clean clone."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in PARTS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(checkout))
    (path,) = out.glob("*.whl")
    return path


def environment(folder: Path) -> Path:
    """Python of a new environment that sees the packages of this one, but not an editable flash_fx."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    site = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _run(*command: str, cwd: "str | Path | None" = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _install(python: Path, *what: str) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check")
    _run(str(python), "-m", "pip", "install", "-q", *options, *what)


def test_wheel_contents(wheel, checkout):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (checkout / "templates").glob("*.jinja"):
        assert f"flash_fx/_templates/{path.name}" in names
    for path in (checkout / "flash_fx").rglob("*.py"):
        assert path.relative_to(checkout).as_posix() in names
    assert {"flash_fx/py.typed", "flash_fx/_examples/mingpt.py"} <= names
    assert {n.split("/")[0] for n in names} == {"flash_fx", "flash_fx-0.1.0.dist-info"}


def test_wheel_install(wheel, tmp_path):
    python = environment(tmp_path / "env")
    _install(python, str(wheel))
    package, templates = _run(str(python), "-c", CHECK, cwd=tmp_path).splitlines()
    assert Path(package).is_relative_to(tmp_path)
    assert templates == f"{package}/_templates"
    assert "usage: flash-fx" in _run(str(tmp_path / "env" / "bin" / "flash-fx"), "--help", cwd=tmp_path)


def test_editable_install(checkout, tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("editables")
    python = environment(tmp_path / "env")
    _install(python, "-e", str(checkout))
    package, templates = _run(str(python), "-c", CHECK, cwd=tmp_path).splitlines()
    assert package == str(checkout / "flash_fx")
    assert templates == str(checkout / "templates")
