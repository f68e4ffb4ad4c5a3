"""Every private torch API the project touches, in one place. Supports torch 2.11 and newer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_innermost_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor", "FakeTensorMode", "FunctionalTensor", "FunctionalTensorMode", "disable_functional_mode",
    "disable_proxy_modes_tracing", "enable_python_dispatcher", "get_innermost_proxy_mode", "make_fx",
    "track_tensor_tree", "unset_fake_temporarily",
]  # fmt: skip


def plain_tensor(value: Any) -> Any:
    """The tensor under a functional one, pending mutations applied."""
    if isinstance(value, FunctionalTensor):
        torch._sync(value)
        return torch._from_functional_tensor(value.elem)
    return value


def traced_node(value: Any) -> torch.fx.Node | None:
    """The node of the innermost make_fx trace that computes this functional tensor's present value."""
    mode = get_innermost_proxy_mode()
    slot = get_proxy_slot(plain_tensor(value), mode.tracer, None) if mode is not None else None
    return slot.proxy.node if slot is not None else None


def last_traced_node() -> torch.fx.Node:
    """The newest node of the innermost make_fx trace."""
    mode = get_innermost_proxy_mode()
    assert mode is not None
    return mode.tracer.graph._root.prev


def fake_mode_of(values: list[Any]) -> FakeTensorMode | None:
    """The fake tensor mode of the first fake tensor among the values, or inside of one that wraps others."""
    for v in values:
        if isinstance(v, FakeTensor):
            return v.fake_mode
        if is_wrapper(v) and (mode := fake_mode_of([getattr(v, name) for name in v.__tensor_flatten__()[0]])):
            return mode
    return None


def is_wrapper(value: Any) -> bool:
    """Is this a tensor that wraps others, such as a DTensor or a nested tensor?"""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def sym_expr(value: Any) -> Any:
    """The sympy expression of a SymInt."""
    return value.node.expr


def sym_hint(value: Any) -> int:
    """A likely value of a SymInt, or the number itself; guides searches and guesses costs, proves nothing."""
    if isinstance(value, int):
        return value
    hint = value.node.hint
    return int(hint) if hint is not None else 64


def symbol_value(size: Any, symbol: Any) -> Any:
    """A SymInt for one free symbol of another SymInt's expression."""
    env = size.node.shape_env
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return env.create_symintnode(symbol, hint=int(values[symbol]) if symbol in values else None)


def specialise(size: Any) -> int:
    """The value of a size as a number, on which Dynamo then guards.

    Raises ValueError where it must stay free: the user marked it dynamic, or nobody guards, as in an exported program.
    """
    if isinstance(size, torch.SymInt) and (TracingContext.try_get() is None or _is_marked_dynamic(size)):
        raise ValueError(f"{size} has no fixed value")
    return int(size)


def _is_marked_dynamic(size: torch.SymInt) -> bool:
    """Would Dynamo raise if this size became a number?"""
    symbols = sym_expr(size).free_symbols
    for tracked in size.node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for dim, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            free = isinstance(dim, torch.SymInt) and not symbols.isdisjoint(sym_expr(dim).free_symbols)
            if free and constraint is not None and not constraint.warn_only:
                return True
    return False


def inner_backend(name: str) -> Callable:
    """A stock Dynamo backend by name."""
    return torch._dynamo.lookup_backend(name)


def inductor(
    gm: Any, example_inputs: list, mode: str | None, options: dict | None, *, tag: str, own_patterns: bool
) -> Callable:
    """Compile with Inductor, `mode` and `options` as torch.compile applies them.

    `tag` becomes part of Inductor's cache keys. With `own_patterns=False` its attention patterns do not run.
    """
    from torch._inductor.compile_fx import compile_fx

    # torch.compile's own wrapper knows how modes and options become config entries
    config = dict(torch._TorchCompileInductorWrapper(mode, options, None).config)
    if "joint_custom_pre_pass" not in config:
        config["joint_custom_pre_pass"] = _joint_tag(f"{tag}:{own_patterns}")
    with contextlib.nullcontext() if own_patterns else without_attention_patterns():
        return compile_fx(gm, example_inputs, config_patches=config)


def _joint_tag(tag: str) -> Any:
    """A pass that carries a cache key and runs whatever joint pass was configured before."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    before = config.joint_custom_pre_pass

    class CacheTag(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if before is not None:
                before(graph)

        def uuid(self) -> Any:
            if before is None:
                return tag
            inner = before.uuid() if isinstance(before, CustomGraphPass) else None
            return None if inner is None else f"{tag}:{inner}"

    return CacheTag()


@contextlib.contextmanager
def without_attention_patterns() -> Iterator[None]:
    """Inductor's own attention patterns match nothing inside the block.

    There is no switch for them alone. Every one of them asks `_sfdp_params_check` last, and holds a reference to it, so
    its code object is what can be replaced. Dynamo compiles under a lock, so nothing else runs meanwhile.
    """
    from torch._inductor.fx_passes import fuse_attention

    check = fuse_attention._sfdp_params_check
    original = check.__code__
    try:
        check.__code__ = _never.__code__
        yield
    finally:
        check.__code__ = original


def _never(match: Any) -> bool:
    return False


def annotate_with_fakes(gm: Any, example_inputs: Any) -> None:
    """Give every node of a graph a fake `example_value` by running it on fake copies of the inputs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    class Annotate(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            n.meta["example_value"] = result
            return result

    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in example_inputs]
    with mode:
        Annotate(gm).run(*fakes)


def run_pre_grad_pass_early() -> Callable[[], None]:
    """Run the pre-grad pass on every compile, before caches are asked, so that reports exist for warm ones too.

    Newer torch runs a pass with a uuid only where the cache misses. Returns what undoes the change.
    """
    from torch._inductor import config

    if not hasattr(config, "pre_grad_pass_timing"):
        return lambda: None
    before = config.pre_grad_pass_timing
    config.pre_grad_pass_timing = "early"

    def undo() -> None:
        config.pre_grad_pass_timing = before

    return undo


# *** which arguments a Triton kernel reads and writes ***


def remember_kernel_accesses(is_known: Callable[[Any], bool]) -> None:
    """From now on PyTorch analyses each kernel for which `is_known` holds once, not at every call it traces or lowers.

    The analysis compiles the kernel to Triton's IR, 0.1 to 0.3 s each time; a model of 12 layers asks for it 96 times. The
    answer depends on the kernel, on constants and on dtypes. Does nothing where PyTorch has no such function.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    for name in ("identify_accessed_tensors", "identify_mutated_tensors"):  # torch 2.13, torch 2.11
        analyse = getattr(triton_kernel_wrap, name, None)
        if analyse is not None and not hasattr(analyse, "flash_fx_answers"):
            setattr(triton_kernel_wrap, name, _remembering(analyse, is_known))


def _remembering(analyse: Callable[..., Any], is_known: Callable[[Any], bool]) -> Callable[..., Any]:
    answers: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def wrapper(kernel: Any, kwargs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        if not is_known(kernel) or any(rest) or any(more.values()):
            return analyse(kernel, kwargs, *rest, **more)
        function = kernel
        while hasattr(function, "fn"):  # each call wraps the kernel anew, with its number of warps
            function = function.fn
        key = function, tuple(sorted((name, _kind(value)) for name, value in kwargs.items()))
        if key not in answers:
            answers[key] = analyse(kernel, kwargs, *rest, **more)
        answer = answers[key]
        return list(answer) if isinstance(answer, list) else answer

    wrapper.flash_fx_answers = answers  # type: ignore[attr-defined]
    return wrapper


def _kind(value: Any) -> str:
    """What the analysis sees of an argument: the dtype of a tensor, the value of a number, else the type."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    get_dtype = getattr(value, "get_dtype", None)  # a buffer of Inductor's
    return str(get_dtype()) if get_dtype is not None else type(value).__name__


# *** the search for the fastest tile ***


def searches_for_the_fastest() -> bool:
    """Whether this is compiled under mode="max-autotune"."""
    from torch._inductor import config

    return bool(config.max_autotune)


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """Operations inside run on real tensors although a trace is under way."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=5, rep=25, return_mode="median"))


def default_store() -> Any:
    """The key-value store that all ranks of a distributed job share; None outside of one."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()
