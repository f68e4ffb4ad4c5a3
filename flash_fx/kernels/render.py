"""Template + spec -> a Python file in a cache folder -> the kernel it defines.

A rendered file is self-contained: it can be opened, imported and stepped through alone. Its name ends in a hash of its
content, so a changed template, program or version is another file and an old one is never stale.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..version import __version__
from .plan import CONTEXTS
from .spec import KernelSpec

_PACKAGE = "flash_fx_rendered"  # of the modules that are made of rendered files
_NOTHING = "\0"  # stands on a line of its own where a list of statements is empty


def template_folder() -> Path:
    """`templates/` beside the package in a checkout, `flash_fx/_templates` in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_templates", package.parent / "templates"):
        if (folder / "forward.py.jinja").is_file():
            return folder
    raise FileNotFoundError(
        f"flash_fx: no kernel templates in {package / '_templates'} or {package.parent / 'templates'}"
    )


def cache_folder() -> Path:
    """FLASH_FX_CACHE_DIR, else flash_fx in the XDG cache folder."""
    chosen = os.environ.get("FLASH_FX_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_fx"


def render(template: str, spec: KernelSpec, *context: Any) -> str:
    """Text of the kernel file. `template` is a key of CONTEXTS; `context` goes to its context function."""
    body = _environment().get_template(f"{template}.py.jinja").render(_context(template, spec, *context))
    body = re.sub(rf"^[ \t]*{_NOTHING}[ \t]*\n", "", body, flags=re.M)
    body = re.sub(r"[ \t]+$", "", body, flags=re.M)
    body = re.sub(r"\n{2,}(?=[ \t])", "\n\n", body)  # inside a function one blank line is enough
    return f"{_header(template, spec)}\n{body.rstrip()}\n"


def _context(template: str, spec: KernelSpec, *context: Any) -> dict[str, Any]:
    build: Any = CONTEXTS[template]
    return build(spec, *context)


@cache
def load_kernel(template: str, spec: KernelSpec, *context: Any) -> Any:
    """The kernel (triton.JITFunction, or its interpreted twin), rendered, stored and imported once."""
    path = store(template, spec, render(template, spec, *context))
    return getattr(_import(path), f"flash_fx_{template}")


def is_rendered(kernel: Any) -> bool:
    """Whether a Triton kernel is one of ours."""
    return str(getattr(getattr(kernel, "fn", None), "__module__", "")).startswith(f"{_PACKAGE}.")


def store(template: str, spec: KernelSpec, text: str) -> Path:
    """Writes the file if it is not there; another process may do the same at the same time."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_folder() / f"{template}_{digest}.py"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.replace(temporary, path)
    return path


def _import(path: Path) -> Any:
    name = f"{_PACKAGE}.{path.stem}"
    found = sys.modules.get(name)
    if found is not None and Path(found.__file__ or "") == path:
        return found
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None, f"cannot import {path}"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # inspect.getsource and pickling look here
    module_spec.loader.exec_module(module)
    return module


def _header(template: str, spec: KernelSpec) -> str:
    lines = [f"Rendered by flash_fx {__version__} from {template}.py.jinja; {spec.key()}.", *spec.lines()]
    return "\n".join(f"# {line}" for line in lines)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(template_folder()), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["lines"] = _lines
    environment.filters["numbered"] = _numbered
    return environment


def _lines(lines: list[str], indent: int = 0) -> str:
    """Statements at the indentation of the place where they are inserted."""
    return ("\n" + " " * indent).join(lines) if lines else _NOTHING


_OF_A_BATCH = re.compile(r"\b(off_b|row_base|q|do|lse|delta|residual|dq)\b")


def _numbered(text: str, batch: int) -> str:
    """Kernel text that several batches have in common, as that of one of them: what it keeps over a loop gets its number."""
    return _OF_A_BATCH.sub(rf"\1_{batch}", text)
