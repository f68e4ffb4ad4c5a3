"""What each kernel template is filled with: which loops it needs, and the emitted text of each loop.

A loop over tiles is split into phases: tiles that a mask cuts (head, tail), and the tiles between, where every
position counts and no mask is computed. Each phase has its own text, because masked loads and `keep` belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..score.expr import INDEX_NAMES, SCORE, Const, Expr, Load, Name, Program, const, names_in
from ..score.grad import derivative, loads_of
from ..score.region import Region, kv_region, q_region
from .emit import LN2, LOG2E, Emitter, Place, capture_parameters, literal, range_lines, size_parameters
from .facts import is_tame, linear_scale, needs_residual
from .spec import KernelSpec

_ZERO = const(0.0)
DRAWS = 1 << 16  # outcomes of one draw of dropout


@dataclass
class Phase:
    """One loop: `for start in range(start, stop, BLOCK)`. Texts of values are names or literals; "" where absent."""

    name: str
    masked: bool
    start: str
    stop: str
    score: list[str] = field(default_factory=list)
    s: str = ""
    keep: list[str] = field(default_factory=list)
    kept: str = ""
    weight: list[str] = field(default_factory=list)
    w: str = ""
    slope: list[str] = field(default_factory=list)
    dscore: str = ""
    dload_score: str = ""
    dload_weight: str = ""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one place where a capture is read, and what indexes the result of its kernel.

    `axes`     of b, h, q_idx, kv_idx, in this order; the kernel sums over the others
    `grouped`  dimensions of the capture whose index is a function of b or of h alone, such as `b // 2`. A kernel for
               tiles sums the members of a group, so that no [B, H, M, N] buffer is needed.
    """

    load: Load
    axes: tuple[str, ...]
    grouped: tuple[int, ...] = ()

    @property
    def mode(self) -> str:
        """Shape of what a program accumulates: a "tile" [M, N], a "row" [M] (also where neither varies), a "column"."""
        if "kv_idx" not in self.axes:
            return "row"
        return "tile" if "q_idx" in self.axes else "column"

    @property
    def plain(self) -> dict[int, str]:
        """Dimensions whose index is the name of an axis that no other dimension depends on."""
        return {d: _only_reader(self.load, d) for d in range(len(self.load.args)) if _only_reader(self.load, d)}

    @property
    def scattered(self) -> tuple[int, ...]:
        """Dimensions whose positions are computed and summed by after the kernel."""
        direct = {*self.plain, *self.grouped}
        return tuple(d for d, i in enumerate(self.load.args) if d not in direct and not isinstance(i, Const))


def _only_reader(load: Load, dim: int) -> str:
    """The index name that is all of this dimension's index and in no other, "" if there is none."""
    index = load.args[dim]
    others = [i for d, i in enumerate(load.args) if d != dim]
    alone = isinstance(index, Name) and index.head in INDEX_NAMES and index.head not in names_in(*others)
    return index.head if alone else ""


def _grouped(load: Load, name: str) -> tuple[int, ...]:
    """The dimensions that depend on the name, if they depend on nothing else and one is more than the name itself."""
    names = [names_in(i) & set(INDEX_NAMES) for i in load.args]
    dims = tuple(d for d, found in enumerate(names) if name in found)
    alone = all(names[d] == {name} for d in dims)
    return dims if alone and not any(_only_reader(load, d) for d in dims) else ()


def gradients_of(program: Program, capture: int) -> list[Gradient]:
    """The places of score and weight through which the capture has a gradient."""
    roots = [e for e in (program.score, program.weight) if e is not None]
    loads = loads_of(program, capture)
    return [_gradient(n) for n in loads if not all(derivative(e, n) is _ZERO for e in roots)]


def _gradient(load: Load) -> Gradient:
    names = names_in(*load.args)
    groups = {n: _grouped(load, n) for n in ("b", "h")} if {"q_idx", "kv_idx"} <= names else {}
    axes = tuple(n for n in INDEX_NAMES if n in names and not groups.get(n))
    return Gradient(load, axes, tuple(sorted(d for dims in groups.values() for d in dims)))


# *** places ***

_ROWS = Place(q="offs_m[:, None]", q_first="start_m", q_local="local_m[:, None]", q_mask="mask_m[:, None]")
_COLUMNS = Place(kv="offs_n[:, None]", kv_first="start_n", kv_local="local_n[:, None]", kv_mask="mask_n[:, None]")
_TILE_RANGE = {"q0": "start_m", "q1": "last_m", "k0": "start_n", "k1": "last_n"}


def _query_major(masked: bool) -> Place:
    """A tile [BLOCK_M, BLOCK_N] in a loop over keys."""
    return replace(
        _ROWS, score="qk", kv="offs_n[None, :]", kv_first="start_n", kv_local="local_n[None, :]",
        kv_mask="mask_n[None, :]" if masked else "",
    )  # fmt: skip


def _key_major(masked: bool) -> Place:
    """A tile [BLOCK_N, BLOCK_M] in a loop over queries."""
    return replace(
        _COLUMNS, score="qk", q="offs_m[None, :]", q_first="start_m", q_local="local_m[None, :]",
        q_mask="mask_m[None, :]" if masked else "",
    )  # fmt: skip


# *** contexts ***


def _common(spec: KernelSpec) -> dict[str, Any]:
    program = spec.parsed
    scale = linear_scale(program.score)
    slope = derivative(program.score, SCORE)
    return {
        "spec": spec,
        "captures": capture_parameters(spec),
        "sizes": size_parameters(spec),
        "drop": program.drop or 0.0,
        **_dropout(program.drop or 0.0),
        "empty": program.empty is not None,
        "has_sink": program.sink is not None,
        "has_weight": program.weight is not None,
        "linear": scale is not None,
        "exact": scale is not None or is_tame(program.score),  # see Note [Large scores] in the templates
        "scale": repr(scale),
        "scale2": repr((1.0 if scale is None else scale) * LOG2E),
        "large": "32.0" if spec.dtype == "float32" else "256.0",
        "slope_scale": literal(slope.head, "float") if isinstance(slope, Const) else "",
        "LOG2E": repr(LOG2E),
        "LN2": repr(LN2),
        "widen": ".to(tl.float32)" if spec.widen else "",
        "precision": f', input_precision="{spec.precision}"' if spec.precision else "",
        "causal_like": _stops_late(kv_region(program)),
    }


def _dropout(p: float) -> dict[str, Any]:
    """Draws have 16 bits: the probability is the nearest multiple of 2^-16, the scale that of those that survive."""
    threshold = round(p * DRAWS)
    return {"threshold": threshold, "survivor": repr(DRAWS / (DRAWS - threshold)) if threshold < DRAWS else "0.0"}


def _stops_late(region: Region) -> bool:
    """The last query tiles have the most keys, so they should start first."""
    return region.hi is not None and "q1" in names_in(region.hi) and region.lo is None


def _phases(program: Program, region: Region, axis: str) -> list[Phase]:
    """The loops over `range_lines` of the region."""
    ragged = f"full_hi if EVEN_{axis.upper()} else hi"  # the compiler drops a loop that ends where it starts
    if program.keep is None:
        return [Phase("middle", False, "0", "full_hi"), Phase("tail", True, "full_hi", ragged)]
    full_hi = region.full_hi
    if isinstance(full_hi, Const) and full_hi.head <= 0:
        return [Phase("all", True, "lo", "hi")]
    head = [] if region.full_lo is None else [Phase("head", True, "lo", "tl.minimum(full_lo, hi)")]
    end = ragged if region.full_hi is None else "hi"
    return [*head, Phase("middle", False, "full_lo", "full_hi"), Phase("tail", True, "full_hi", end)]


def _roots(program: Program, *more: Expr) -> list[Expr]:
    return [e for e in (program.score, program.keep, program.weight, *more) if e is not None]


def _fill(phase: Phase, e: Emitter, program: Program, linear: bool, slopes: dict[str, Expr]) -> None:
    """Emits one phase. `slopes` maps dscore, dload_score, dload_weight to what a backward loop needs."""
    if linear:
        phase.s = "qk"
    else:
        phase.s = e.value(program.score, "float")
        if "score" not in names_in(program.score):  # not a full tile of its own
            phase.s = e.let(f"tl.zeros_like(qk) + {phase.s}")
    phase.score = e.take()
    if phase.masked and program.keep is not None:
        phase.kept = e.value(program.keep, "bool")
        phase.keep = e.take()
    if program.weight is not None:
        phase.w = e.value(program.weight, "float")
        phase.weight = e.take()
    for name, slope in slopes.items():
        if slope is not _ZERO:
            setattr(phase, name, e.value(slope, "float"))
    phase.slope = e.take()


def _backward(spec: KernelSpec) -> dict[str, Any]:
    """In a backward kernel "exact" means that no residual is needed; a residual goes with scores in natural units."""
    exact = not needs_residual(spec)
    return {**_common(spec), "exact": exact, "linear": exact and _is_linear(spec.parsed)}


def _over_keys(spec: KernelSpec, slopes: dict[str, Expr], linear: bool) -> dict[str, Any]:
    """Text of a program that owns a q tile and loops over kv tiles."""
    program, region = spec.parsed, kv_region(spec.parsed)
    outer = Emitter(spec, replace(_ROWS, extra=_TILE_RANGE))
    outer.hoist(_roots(program, *slopes.values()), frozenset({"kv_idx", "score"}))
    hoisted = outer.take()
    bounds = range_lines(outer, region, "n")
    phases = _phases(program, region, "n")
    for phase in phases:
        _fill(phase, Emitter(spec, _query_major(phase.masked), outer), program, linear, slopes)
    return {"hoisted": hoisted, "bounds": bounds, "phases": phases}


def _over_queries(spec: KernelSpec, slopes: dict[str, Expr], linear: bool) -> dict[str, Any]:
    """Text of a program that owns a kv tile and loops over query heads, and in each over q tiles."""
    program, region = spec.parsed, q_region(spec.parsed)
    roots = _roots(program, *slopes.values())
    outer = Emitter(spec, replace(_COLUMNS, extra=_TILE_RANGE))
    outer.hoist(roots, frozenset({"q_idx", "score", "h"}))
    bounds = range_lines(outer, region, "m")
    per_head = Emitter(spec, _COLUMNS, outer)
    per_head.hoist(roots, frozenset({"q_idx", "score"}))
    phases = _phases(program, region, "m")
    for phase in phases:
        _fill(phase, Emitter(spec, _key_major(phase.masked), per_head), program, linear, slopes)
    return {"hoisted": [], "bounds": bounds, "per_head": per_head.take(), "phases": phases}


def _one_tile(spec: KernelSpec, slopes: dict[str, Expr], linear: bool, gradient: Gradient) -> dict[str, Any]:
    """Text of a program that owns one tile and loops over batches and heads, those of its group if there is one."""
    program = spec.parsed
    outer = Emitter(spec, replace(_query_major(True), score="", extra=_TILE_RANGE))
    outer.hoist(_roots(program, *slopes.values()), frozenset({"b", "h", "score"}))
    hoisted = outer.take()
    bounds = range_lines(outer, kv_region(program), "n")
    tests = [f"({outer.value(gradient.load.args[d], 'int')} == group_{d})" for d in gradient.grouped]
    members = {"grouped": gradient.grouped, "member": outer.take(), "is_member": " & ".join(tests)}
    phase = Phase("tile", True, "", "")
    _fill(phase, Emitter(spec, _query_major(True), outer), program, linear, slopes)
    return {"hoisted": hoisted, "bounds": bounds, "phases": [phase], **members}


def _is_linear(program: Program) -> bool:
    return linear_scale(program.score) is not None


def _sink(spec: KernelSpec) -> dict[str, Any]:
    """The sink of every row of a q tile: [BLOCK_M, 1] or scalar."""
    if spec.parsed.sink is None:
        return {"sink_lines": [], "sink": ""}
    e = Emitter(spec, _ROWS)
    text = e.value(spec.parsed.sink, "float")
    return {"sink_lines": e.take(), "sink": text}


def forward_context(spec: KernelSpec) -> dict[str, Any]:
    return {**_common(spec), **_over_keys(spec, {}, _is_linear(spec.parsed)), **_sink(spec)}


def delta_context(spec: KernelSpec) -> dict[str, Any]:
    plain = replace(spec, program=str(replace(spec.parsed, weight=None)))  # weights do not change the denominator
    return {**_backward(spec), **_over_keys(plain, {}, linear=False), **_sink(spec)}


def _score_slope(program: Program) -> dict[str, Expr]:
    slope = derivative(program.score, SCORE)
    return {} if isinstance(slope, Const) else {"dscore": slope}


def backward_dq_context(spec: KernelSpec) -> dict[str, Any]:
    common = _backward(spec)
    return {**common, **_over_keys(spec, _score_slope(spec.parsed), common["linear"])}


def backward_dkdv_context(spec: KernelSpec) -> dict[str, Any]:
    common = _backward(spec)
    return {**common, **_over_queries(spec, _score_slope(spec.parsed), common["linear"])}


def backward_capture_context(spec: KernelSpec, gradient: Gradient) -> dict[str, Any]:
    program = spec.parsed
    slopes = {"dload_score": derivative(program.score, gradient.load)}
    if program.weight is not None:
        slopes["dload_weight"] = derivative(program.weight, gradient.load)
    facts: dict[str, Any] = {"mode": gradient.mode, "load": str(gradient.load), **_NOTATION[gradient.mode]}
    facts |= {"has_b": "b" in gradient.axes, "has_h": "h" in gradient.axes}
    common = _backward(spec)
    if gradient.mode == "tile":
        return {**common, **_one_tile(spec, slopes, common["linear"], gradient), **facts}
    over = _over_keys if gradient.mode == "row" else _over_queries
    return {**common, **over(spec, slopes, common["linear"]), "grouped": (), **facts}


_NOTATION = {
    "row": {"layout": "[B, H, M] float32", "notation": "Tiles are [BLOCK_M, BLOCK_N]."},
    "column": {"layout": "[B, H, N] float32", "notation": "Tiles are [BLOCK_N, BLOCK_M]."},
    "tile": {"layout": "[groups, B or 1, H or 1, M, N] any dtype", "notation": "Tiles are [BLOCK_M, BLOCK_N]."},
}

CONTEXTS = {
    "forward": forward_context,
    "delta": delta_context,
    "backward_dkdv": backward_dkdv_context,
    "backward_dq": backward_dq_context,
    "backward_capture": backward_capture_context,
}
