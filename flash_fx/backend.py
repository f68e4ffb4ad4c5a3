"""The `torch.compile` backend: the pass, then Inductor (or AOTAutograd, or plain execution) as usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import compat
from .errors import NothingFusedError, OptionError
from .fingerprint import uuid
from .graph_pass import run_pass
from .match.normalize import may_mutate
from .options import DEFAULT, INNER_BACKENDS, Options


def make_backend(inner: str = "inductor", strict: bool = False, **options: Any) -> Callable:
    """A backend for `torch.compile`.

    inner    "inductor", "aot_eager" (AOTAutograd, no code generation) or "eager"; what compiles the rewritten graph
    strict   raise NothingFusedError when a compiled graph had no site fused
    options  see flash_fx.options.Options

    `mode=` and `options=` of torch.compile reach Inductor as they do for the stock backend.
    Raises OptionError on an unknown inner backend or option.
    """
    if inner not in INNER_BACKENDS:
        raise OptionError(f"inner must be one of {', '.join(map(repr, INNER_BACKENDS))}, got {inner!r}")
    return Backend(inner, Options.make(strict=strict, **options))


class Backend:
    """What `make_backend` returns: called by Dynamo with every graph it captures."""

    def __init__(self, inner: str, options: Options) -> None:
        self.inner, self.options = inner, options
        self.__name__ = "flash_fx"

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list,
        *,
        mode: str | None = None,
        options: dict | None = None,
        **kwargs: Any,
    ) -> Callable:
        report = run_pass(gm, self.options)
        if self.options.strict and report.fused == 0:
            raise NothingFusedError(_explain_nothing(report))
        if self.inner != "inductor":
            if mode is not None or options is not None:
                raise OptionError(f"mode= and options= are Inductor's; the inner backend is {self.inner!r}")
            # plain execution would meet in-place writes to tensors that the operator saved: let AOTAutograd remove them
            writes = self.inner == "eager" and report.fused and any(may_mutate(n) for n in gm.graph.nodes)
            return compat.inner_backend("aot_eager" if writes else self.inner)(gm, example_inputs)
        return compat.inductor(
            gm, example_inputs, mode, options, tag=uuid(self.options), own_patterns=self.options.inductor_patterns
        )

    def __eq__(self, other: object) -> bool:
        """Equal backends share Dynamo's cache entries."""
        return isinstance(other, Backend) and (self.inner, self.options) == (other.inner, other.options)

    def __hash__(self) -> int:
        return hash((self.inner, self.options))


def _explain_nothing(report: Any) -> str:
    found = f"Found and left alone:\n{report}" if report.sites else "No softmax between two matrix products was found."
    return f"strict=True, but no attention was fused in a compiled graph. {found}"


flash_fx = Backend("inductor", DEFAULT)
