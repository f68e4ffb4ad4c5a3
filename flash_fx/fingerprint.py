"""A hash of everything that decides what the pass does: sources, templates, options, versions."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

from .options import Options


def uuid(options: Options) -> str:
    """Hex digest for compile caches. Changes with any package file, template, option, torch or Triton version."""
    digest = hashlib.sha256(_sources().encode())
    digest.update(repr((options, torch.__version__, _triton_version())).encode())
    return digest.hexdigest()


@functools.cache
def _sources() -> str:
    from .kernels.render import template_folder

    digest = hashlib.sha256()
    package = Path(__file__).parent
    for folder, pattern in ((package, "**/*.py"), (template_folder(), "*.jinja")):
        for path in sorted(folder.glob(pattern)):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__
