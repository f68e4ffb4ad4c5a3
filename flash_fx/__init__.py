"""Hand-written attention in, flash attention out, and nothing else changes.

import flash_fx
fast = torch.compile(model, backend=flash_fx)
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from . import testing
from .backend import flash_fx as _backend
from .backend import make_backend
from .errors import FlashFxError, NothingFusedError, OperandError, OptionError, ProgramError
from .explaining import explain
from .exported import rewrite
from .graph_pass import FlashAttentionPass, install, uninstall
from .ops import attention
from .report import Report, SiteReport, recording
from .version import __version__

__all__ = [
    "FlashAttentionPass",
    "FlashFxError",
    "NothingFusedError",
    "OperandError",
    "OptionError",
    "ProgramError",
    "Report",
    "SiteReport",
    "__version__",
    "attention",
    "explain",
    "install",
    "make_backend",
    "recording",
    "rewrite",
    "testing",
    "uninstall",
]


class _CallableModule(types.ModuleType):
    """Makes `backend=flash_fx` work: Dynamo calls the module with a graph and its inputs."""

    def __call__(self, gm: Any, example_inputs: list, **kwargs: Any) -> Callable:
        return _backend(gm, example_inputs, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
