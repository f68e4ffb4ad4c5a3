"""What each kernel template is filled with: which loops it needs, and the emitted text of each loop.

A loop over tiles is split into phases: tiles that a mask cuts (head, tail), and the tiles between, where every
position counts and no mask is computed. Each phase has its own text, because masked loads and `keep` belong to it.

A finite fill (score/fill.py) counts as a mask. The tiles it covers are a last phase, which runs only where a row's
maximum or LSE does not lie clear of the fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..score.blocks import BLOCK, EMPTY, FULL, PARTIAL, block_mask
from ..score.expr import INDEX_NAMES, SCORE, Const, Expr, Load, Name, Op, Program, const, names_in, op
from ..score.fill import MARGIN, Fill, fill_of
from ..score.grad import derivative, loads_of
from ..score.region import Region, kv_region, q_region
from .emit import (
    LN2,
    Emitter,
    Place,
    capture_parameters,
    ends_lines,
    filled_lines,
    literal,
    range_lines,
    size_parameters,
)
from .facts import LOG2E, batches_share_tiles, is_tame, linear_scale, matrices_of, needs_residual, separated
from .spec import KernelSpec

_ZERO = const(0.0)
# from this size of an LSE on its rounding shows beside that of the dtype: see Note [Large scores] in `delta`
LARGE = {"float32": 8.0, "float16": 1024.0, "bfloat16": 4096.0}
DRAWS = 1 << 16  # outcomes of one draw of dropout


@dataclass
class Phase:
    """One loop over tiles. Texts of values are names or literals; "" where absent.

    `loop`    the statements that open it and set start_m or start_n
    `filled`  a loop over the tiles that only a finite fill reaches
    `linear`  scores are kept as the raw products, `scale` goes into exp2
    `log2`    scores are times log2(e), and lack `row`: see facts.Separated
    `exact`   see Note [Large scores] in the templates; in a backward kernel, that no residual is needed
    `shared`  statements that all batches of a tile have in common
    """

    name: str
    masked: bool
    loop: list[str]
    filled: bool = False
    linear: bool = False
    log2: bool = False
    exact: bool = False
    scale: float = 1.0
    score: list[str] = field(default_factory=list)
    s: str = ""
    row: str = ""
    keep: list[str] = field(default_factory=list)
    kept: str = ""
    weight: list[str] = field(default_factory=list)
    w: str = ""
    slope: list[str] = field(default_factory=list)
    dscore: str = ""
    dload_score: str = ""
    dload_weight: str = ""
    shared: list[str] = field(default_factory=list)

    @property
    def scale2(self) -> str:
        return repr(self.scale * LOG2E)


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


def gradients_of(program: Program, capture: int, parts: tuple[str, ...] = ("score", "weight")) -> list[Gradient]:
    """The places in these parts through which the capture has a gradient."""
    roots = [e for part, e in program.parts() if part in parts]
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
_TURNED_COLUMNS = Place(
    kv="offs_n[None, :]", kv_first="start_n", kv_local="local_n[None, :]", kv_mask="mask_n[None, :]"
)  # fmt: skip
_FIRST_QUERY = {"q0": "start_m"}
_TILE_RANGE = {"q0": "start_m", "q1": "last_m", "k0": "start_n", "k1": "last_n"}


def _query_major(masked: bool) -> Place:
    """A tile [BLOCK_M, BLOCK_N] in a loop over keys."""
    return replace(
        _ROWS, score="qk", kv="offs_n[None, :]", kv_first="start_n", kv_local="local_n[None, :]",
        kv_mask="mask_n[None, :]" if masked else "", extra=_FIRST_QUERY,
    )  # fmt: skip


def _key_major(masked: bool) -> Place:
    """A tile [BLOCK_N, BLOCK_M] in a loop over queries."""
    return replace(
        _COLUMNS, score="qk", q="offs_m[None, :]", q_first="start_m", q_local="local_m[None, :]",
        q_mask="mask_m[None, :]" if masked else "", extra=_FIRST_QUERY,
    )  # fmt: skip


def _turned(masked: bool) -> Place:
    """A tile [BLOCK_M, BLOCK_N] in a loop over queries."""
    return replace(_query_major(True), q_mask="mask_m[:, None]" if masked else "")


# *** contexts ***


def _common(spec: KernelSpec) -> dict[str, Any]:
    program = spec.parsed
    fill, scale = _fill(spec), _slope_scale(spec)
    return {
        "spec": spec,
        "captures": capture_parameters(spec),
        "sizes": size_parameters(spec),
        "drop": program.drop or 0.0,
        **_dropout(program.drop or 0.0),
        "empty": program.guarded,
        "unsaved": program.unsaved,
        "loses": spec.blocks and not program.guarded,
        "has_sink": program.sink is not None,
        "has_weight": program.weight is not None,
        "exact": not needs_residual(spec),  # no residual: see Note [Large scores] in `delta`
        "large": repr(LARGE[spec.dtype]),
        "slope_scale": "" if scale is None else literal(scale.head, "float"),
        "fill": fill is not None,
        "top": literal(fill.top.head, "float") if fill is not None and isinstance(fill.top, Const) else "",
        "margin": repr(MARGIN),
        "LOG2E": repr(LOG2E),
        "LN2": repr(LN2),
        "widen": ".to(tl.float32)" if spec.widen else "",
        "precision": f', input_precision="{spec.precision}"' if spec.precision else "",
        "add_dot": partial(_add_dot, spec.precision),
        "whole": False,  # a tile holds all keys of a row
        "makes_delta": False,  # rowsum(OUT * DO) is not known yet
        "total": "",
        "batches_first": batches_share_tiles(program),
        "causal_like": _stops_late(kv_region(_inner(spec))),
    }


def _add_dot(precision: str | None, total: str, a: str, b: str) -> str:
    """The statement that adds a product to a float32 total.

    The ordinary units add its terms to the total one by one, each rounded at the total's size: over long sequences that
    is what their error is made of. So a product is summed from zero and added once, which Triton undoes unless
    max_num_imprecise_acc, without meaning for these units, is set.
    """
    if precision is None:
        return f"{total} = tl.dot({a}, {b}, {total})"
    if precision == "ieee":
        return f'{total} += tl.dot({a}, {b}, input_precision="ieee", max_num_imprecise_acc=1)'
    return f'{total} = tl.dot({a}, {b}, {total}, input_precision="{precision}")'


def _dropout(p: float) -> dict[str, Any]:
    """Draws have 16 bits: the probability is the nearest multiple of 2^-16, the scale that of those that survive."""
    threshold = round(p * DRAWS)
    return {"threshold": threshold, "survivor": repr(DRAWS / (DRAWS - threshold)) if threshold < DRAWS else "0.0"}


def _stops_late(region: Region) -> bool:
    """The last query tiles have the most keys, so they should start first."""
    return region.hi is not None and "q1" in names_in(region.hi) and region.lo is None


def _fill(spec: KernelSpec) -> Fill | None:
    return fill_of(spec.parsed, spec.blocks)


def _inner(spec: KernelSpec) -> Program:
    """The program of the positions that no finite fill covers."""
    fill = _fill(spec)
    return spec.parsed if fill is None else fill.inner(spec.parsed)


def _along(axis: str, start: str, stop: str) -> list[str]:
    return [f"for start_{axis} in tl.range({start}, {stop}, BLOCK_{axis.upper()}):"]


def _by_step(axis: str, first: str, stop: str, start: str, options: str = "") -> list[str]:
    return [f"for step in tl.range({first}, {stop}{options}):", f"    start_{axis} = {start}"]


_UNSTAGED = ", num_stages=1"  # a loop that seldom runs needs no buffers


def _phases(program: Program, region: Region, axis: str) -> list[Phase]:
    """The loops over `range_lines` of the region."""
    # the compiler drops a loop that ends where it starts
    ragged = f"full_hi if EVEN_{axis.upper()} and not SHORT else hi"
    if program.keep is None:
        return [
            Phase("middle", False, _along(axis, "0", "full_hi")),
            Phase("tail", True, _along(axis, "full_hi", ragged)),
        ]
    full_hi = region.full_hi
    if isinstance(full_hi, Const) and full_hi.head <= 0:
        return [Phase("all", True, _along(axis, "lo", "hi"))]
    head = [] if region.full_lo is None else [Phase("head", True, _along(axis, "lo", "tl.minimum(full_lo, hi)"))]
    end = ragged if region.full_hi is None else "hi"
    # the middle first: with a finite fill only its maxima are sure to be ordinary numbers, and may stay raw products
    middle, tail = _along(axis, "full_lo", "full_hi"), _along(axis, "full_hi", end)
    return [Phase("middle", False, middle), *head, Phase("tail", True, tail)]


def _listed(loops: _Loops, axis: str) -> tuple[list[str], list[Phase]]:
    """The loops over the list of the tile's block: its full blocks, its partial ones, and with a finite fill the empty ones.

    A block is several tiles: `step` counts tiles.
    """
    other, length, block = ("m", "N", "BLOCK_N") if axis == "n" else ("n", "M", "BLOCK_M")
    names = names_in(block_mask(loops.spec.parsed).program.keep)  # type: ignore[union-attr, arg-type]
    row = ["BLOCKS", *(f"off_{n} * stride_l{n}" for n in "bh" if n in names)]
    lines = [
        f"per_block = {BLOCK} // {block}",
        f"blocks = tl.cdiv({length}, {BLOCK})",
        f"row = {' + '.join(row)} + start_{other} // {BLOCK} * (blocks + 2)",
        "full = tl.load(row)",
        "some = tl.load(row + 1)",
    ]

    def place(step: str) -> str:
        return f"tl.load(row + 2 + {step} // per_block) * {BLOCK} + {step} % per_block * {block}"

    def over(first: str, stop: str, options: str = "") -> list[str]:
        # the number of the next block is read a step early: a load whose address waits for another would not be staged
        return [
            f"upcoming = {place(f'tl.minimum({first}, blocks * per_block - 1)')}",
            f"for step in tl.range({first}, {stop}{options}):",
            f"    start_{axis} = upcoming",
            "    after = tl.minimum(step + 1, blocks * per_block - 1)",
            f"    upcoming = {place('after')}",
        ]

    phases = [
        Phase("full blocks", False, over("0", "full * per_block")),
        Phase("partial blocks", True, over("full * per_block", "some * per_block")),
    ]
    if loops.fill is not None:
        phases.append(Phase("filled", True, over("some * per_block", "blocks * per_block", _UNSTAGED), filled=True))
    return lines, phases


Slopes = Callable[[Program], dict[str, Expr]]  # of a program: dscore, dload_score, dload_weight, as a loop needs them


def _no_slopes(program: Program) -> dict[str, Expr]:
    return {}


@dataclass(frozen=True)
class _Loops:
    """What the loops of a kernel have in common.

    `backward`  whether the weights are recomputed from LSE
    `natural`   scores in natural units only
    `walks`     whether filled positions add something if their weight is not 0
    """

    spec: KernelSpec
    slopes: Slopes = _no_slopes
    backward: bool = True
    natural: bool = False
    walks: bool = True

    @property
    def fill(self) -> Fill | None:
        return _fill(self.spec) if self.walks else None

    def variants(self) -> dict[bool, Program]:
        """The program of a phase, by whether it is masked."""
        return {True: self.spec.parsed, False: _inner(self.spec)}

    def roots(self) -> list[Expr]:
        programs = dict.fromkeys(self.variants().values())
        apart = None if self.natural else separated(self.spec)
        scores = {p: [p.score] if apart is None else [apart.score2, apart.row] for p in programs}
        return [e for p in programs for e in (*scores[p], p.keep, p.weight, *self.slopes(p).values()) if e is not None]

    def emit(self, phase: Phase, e: Emitter) -> None:
        """Fills in the texts of a phase."""
        program = self.variants()[phase.masked]
        self._choose_form(phase, program)
        if phase.linear:
            phase.s = "qk"
        elif phase.log2:
            apart = separated(self.spec)
            assert apart is not None
            phase.s = e.value(apart.score2, "float")
            phase.row = e.value(apart.row, "float") if self.backward else ""
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
        self.emit_slopes(phase, self.slopes(program), e)

    def emit_slopes(self, phase: Phase, slopes: dict[str, Expr], e: Emitter) -> None:
        for name, slope in slopes.items():
            if slope is not _ZERO:
                setattr(phase, name, e.value(slope, "float"))
        phase.slope = e.take()

    def _choose_form(self, phase: Phase, program: Program) -> None:
        scale = linear_scale(program.score)
        if self.backward:
            phase.exact = not needs_residual(replace(self.spec, program=str(program)))
        else:
            phase.exact = scale is not None or is_tame(program.score)
        if self.natural:
            return
        if scale is not None and phase.exact:
            phase.linear, phase.scale = True, scale
        phase.log2 = separated(self.spec) is not None


def _over_keys(loops: _Loops) -> dict[str, Any]:
    """Text of a program that owns a q tile and loops over kv tiles."""
    outer = Emitter(loops.spec, replace(_ROWS, extra=_TILE_RANGE))
    outer.hoist(loops.roots(), frozenset({"kv_idx", "score"}))
    hoisted = outer.take()
    bounds, phases = _bounds_and_phases(loops, outer, "n", kv_region)
    for phase in phases:
        loops.emit(phase, Emitter(loops.spec, _query_major(phase.masked), outer))
    return {"hoisted": hoisted, "bounds": bounds, "phases": phases, "walks": loops.fill is not None}


def _over_queries(loops: _Loops, major: str = "key") -> dict[str, Any]:
    """Text of a program that owns a kv tile and loops over query heads, and in each over q tiles."""
    roots = loops.roots()
    columns, tile = (_COLUMNS, _key_major) if major == "key" else (_TURNED_COLUMNS, _turned)
    outer = Emitter(loops.spec, replace(columns, extra=_TILE_RANGE))
    outer.hoist(roots, frozenset({"q_idx", "q0", "score", "h"}))
    hoisted = outer.take()
    bounds, phases = _bounds_and_phases(loops, outer, "m", q_region)
    per_head = Emitter(loops.spec, columns, outer)
    per_head.hoist(roots, frozenset({"q_idx", "q0", "score"}))
    for phase in phases:
        loops.emit(phase, Emitter(loops.spec, tile(phase.masked), per_head))
    walks, head = loops.fill is not None, per_head.take()
    if loops.spec.blocks:  # lists may differ by head
        bounds, head = [], bounds + head
    return {"hoisted": hoisted, "bounds": bounds, "per_head": head, "phases": phases, "walks": walks, "major": major}


def _bounds_and_phases(
    loops: _Loops, outer: Emitter, axis: str, region_of: Callable[[Program], Region]
) -> tuple[list[str], list[Phase]]:
    if loops.spec.blocks:
        return _listed(loops, axis)
    program, inner = loops.variants().values()
    region = region_of(inner)
    bounds, phases = range_lines(outer, region, axis), _phases(inner, region, axis)
    if loops.fill is not None:
        lines, start = filled_lines(outer, region_of(program), axis, region)
        loop = _by_step(axis, "0", "left", start, _UNSTAGED)
        bounds, phases = [*bounds, *lines], [*phases, Phase("filled", True, loop, filled=True)]
    return bounds, phases


def _one_tile(loops: _Loops, gradient: Gradient) -> dict[str, Any]:
    """Text of a program that owns one tile and loops over batches and heads, those of its group if there is one."""
    outer = Emitter(loops.spec, replace(_query_major(True), score="", extra=_TILE_RANGE))
    outer.hoist(loops.roots(), frozenset({"b", "h", "score"}))
    hoisted = outer.take()
    bounds, _ = _bounds_and_phases(loops, outer, "n", kv_region)
    walks = loops.fill is not None
    conditions = [f"({outer.value(gradient.load.args[d], 'int')} == group_{d})" for d in gradient.grouped]
    conditions += ["needed"] if walks else []
    members = {"grouped": gradient.grouped, "member": outer.take(), "condition": " & ".join(conditions)}
    phase = Phase("tile", True, [])
    loops.emit(phase, Emitter(loops.spec, _query_major(True), outer))
    return {"hoisted": hoisted, "bounds": bounds, "phases": [phase], "walks": walks, **members}


def _sink(spec: KernelSpec, place: Place = _ROWS) -> dict[str, Any]:
    """The sink of every row of a q tile: [BLOCK_M, 1] or scalar."""
    if spec.parsed.sink is None:
        return {"sink_lines": [], "sink": ""}
    e = Emitter(spec, place)
    text = e.value(spec.parsed.sink, "float")
    return {"sink_lines": e.take(), "sink": text}


def forward_context(spec: KernelSpec) -> dict[str, Any]:
    return {**_common(spec), **_over_keys(_Loops(spec, backward=False)), **_sink(spec), **_row(spec)}


def _row(spec: KernelSpec) -> dict[str, Any]:
    """What the scores of a row lack until LSE is known: [BLOCK_M, 1] or scalar."""
    apart, e = separated(spec), Emitter(spec, replace(_ROWS, extra=_FIRST_QUERY))
    row = "" if apart is None else e.value(apart.row, "float")
    return {"row_lines": e.take(), "row": row}


_PACKED = Place(q="offs_m[:, None]", q_first="0", q_local="offs_m[:, None]", extra={"h": "offs_h[:, None]"})
_ONE_ROW = Place(q="off_m", q_first="off_m")


def decode_context(spec: KernelSpec) -> dict[str, Any]:
    """A tile whose rows are the queries of several heads, so that even h varies inside."""
    loops = _Loops(spec, backward=False, natural=True, walks=False)
    program = spec.parsed
    outer = Emitter(spec, replace(_PACKED, extra={**_PACKED.extra, "q0": "0", "q1": "(M - 1)"}))
    bounds = ends_lines(outer, kv_region(program), "n")
    keys = _query_major(True)
    place = replace(_PACKED, score="qk", **{k: getattr(keys, k) for k in ("kv", "kv_first", "kv_local", "kv_mask")})
    phase = Phase("all", True, [])
    loops.emit(phase, Emitter(spec, place, outer))
    return {**_common(spec), "bounds": bounds, "phase": phase}


def combine_context(spec: KernelSpec) -> dict[str, Any]:
    return {**_common(spec), **_sink(spec, _ONE_ROW)}


def delta_context(spec: KernelSpec) -> dict[str, Any]:
    plain = replace(spec, program=str(replace(spec.parsed, weight=None)))  # weights do not change the denominator
    return {**_common(spec), **_over_keys(_Loops(plain, natural=True)), **_sink(spec)}


def _slope_scale(spec: KernelSpec) -> Const | None:
    """A constant by which the gradient of qk can be multiplied at the very end."""
    scale = derivative(_inner(spec).score, SCORE)
    if isinstance(scale, Const) and _over(derivative(spec.parsed.score, SCORE), scale) is not None:
        return scale
    return None


def _over(slope: Expr, scale: Const) -> Expr | None:
    """slope / scale, where that is 1 and 0 by a condition."""
    if slope in (scale, _ZERO):
        return const(1.0) if slope is scale else _ZERO
    if isinstance(slope, Op) and slope.head == "where":
        then, other = (_over(a, scale) for a in slope.args[1:])
        return None if then is None or other is None else op("where", slope.args[0], then, other)
    return None


def _score_slopes(spec: KernelSpec) -> Slopes:
    scale = _slope_scale(spec)

    def slopes(program: Program) -> dict[str, Expr]:
        slope = derivative(program.score, SCORE)
        if scale is not None:
            return {} if slope is scale else {"dscore": _over(slope, scale) or slope}
        return {"dscore": slope}

    return slopes


def _load_slopes(load: Load) -> Slopes:
    def slopes(program: Program) -> dict[str, Expr]:
        found = {"dload_score": derivative(program.score, load)}
        if program.weight is not None:
            found["dload_weight"] = derivative(program.weight, load)
        return found

    return slopes


def _outside(spec: KernelSpec) -> Program:
    """The program of the positions that a finite fill covers."""
    fill = _fill(spec)
    return spec.parsed if fill is None else replace(spec.parsed, score=fill.outside)


def block_kinds_context(spec: KernelSpec) -> dict[str, Any]:
    assert spec.parsed.keep is not None
    e = Emitter(spec, _query_major(True))
    kept = e.value(spec.parsed.keep, "bool")
    return {
        **_BLOCKS,
        "captures": capture_parameters(spec),
        "sizes": size_parameters(spec),
        "keep": e.take(),
        "kept": kept,
    }


def block_lists_context(spec: KernelSpec) -> dict[str, Any]:
    return _BLOCKS


_BLOCKS: dict[str, Any] = {"BLOCK": BLOCK, "EMPTY": EMPTY, "PARTIAL": PARTIAL, "FULL": FULL}


def backward_dq_context(spec: KernelSpec, makes_delta: bool = False) -> dict[str, Any]:
    walks = derivative(_outside(spec).score, SCORE) is not _ZERO
    loops = _over_keys(_Loops(spec, _score_slopes(spec), walks=walks))
    return {**_common(spec), **loops, "makes_delta": makes_delta}


def backward_dq_matrix_context(spec: KernelSpec, gradient: Gradient, batches: int) -> dict[str, Any]:
    """Text of a program that owns the q tiles of several batches of a head, and loops over kv tiles."""
    of_score, of_load = _score_slopes(spec), _load_slopes(gradient.load)
    loops = _Loops(spec, lambda p: {**of_score(p), **of_load(p)}, walks=False)
    outer = Emitter(spec, replace(_ROWS, extra=_TILE_RANGE))
    outer.hoist(loops.roots(), frozenset({"b", "kv_idx", "score"}))
    hoisted = outer.take()
    bounds, phases = _bounds_and_phases(loops, outer, "n", kv_region)
    for phase in phases:
        place = _query_major(phase.masked)
        tile = Emitter(spec, replace(place, score=""), outer)
        tile.hoist(loops.roots(), frozenset({"b", "score"}))
        phase.shared = tile.take()
        loops.emit(phase, Emitter(spec, place, tile))
    found = {"hoisted": hoisted, "bounds": bounds, "phases": phases, "walks": False}
    return {**_common(spec), **found, "gradient": gradient, "batches": batches, "keeps": spec.parsed.keep is not None}


def backward_dkdv_context(spec: KernelSpec) -> dict[str, Any]:
    # a matrix is only staged in shared memory where the tile has its order
    major = "query" if matrices_of(spec.parsed) else "key"
    return {**_common(spec), **_over_queries(_Loops(spec, _score_slopes(spec)), major)}


def backward_capture_context(spec: KernelSpec, gradient: Gradient) -> dict[str, Any]:
    slopes = _load_slopes(gradient.load)
    loops = _Loops(spec, slopes, walks=any(e is not _ZERO for e in slopes(_outside(spec)).values()))
    facts: dict[str, Any] = {"mode": gradient.mode, "load": str(gradient.load), **_NOTATION[gradient.mode]}
    facts |= {"has_b": "b" in gradient.axes, "has_h": "h" in gradient.axes}
    if gradient.mode == "tile":
        return {**_common(spec), **_one_tile(loops, gradient), **facts}
    over = _over_keys if gradient.mode == "row" else _over_queries
    return {**_common(spec), **over(loops), "grouped": (), **facts}


def backward_small_context(spec: KernelSpec, *gradients: Gradient) -> dict[str, Any]:
    """Text of a program that owns a whole head and loops over batches."""
    loops = _Loops(spec, _score_slopes(spec), natural=True, walks=False)
    loads = [_load_slopes(g.load)(spec.parsed) for g in gradients]
    outer = Emitter(spec, replace(_query_major(True), score="", extra=_TILE_RANGE))
    outer.hoist([*loops.roots(), *(e for slopes in loads for e in slopes.values())], frozenset({"b", "score"}))
    hoisted, phase = outer.take(), Phase("tile", True, [])
    inner = Emitter(spec, _query_major(True), outer)
    loops.emit(phase, inner)
    totals = [Phase("tile", True, []) for _ in gradients]
    for part, slopes in zip(totals, loads):
        loops.emit_slopes(part, slopes, inner)
    scale = _slope_scale(spec)
    times = "" if scale is None else f" * {literal(scale.head, 'float')}"
    stores = [
        ("dq", "dq" + times, "dq_ptrs", "m", "mask_m[:, None] & mask_d[None, :]"),
        ("dk", "dk" + times, "dk_ptrs", "n", "mask_n[:, None] & mask_d[None, :]"),
        ("dv", "dv", "dv_ptrs", "n", "mask_n[:, None] & mask_dv[None, :]"),
    ]
    found = {"phase": phase, "hoisted": hoisted, "gradients": gradients, "totals": totals, "stores": stores}
    return {**_common(spec), **found, "whole": True, "walks": False}


_NOTATION = {
    "row": {"layout": "[B, H, M] float32", "notation": "Tiles are [BLOCK_M, BLOCK_N]."},
    "column": {"layout": "[B, H, N] float32", "notation": "Tiles are [BLOCK_N, BLOCK_M]."},
    "tile": {"layout": "[groups, B or 1, H or 1, CHUNKS, M, N] any dtype", "notation": "Tiles are [BLOCK_M, BLOCK_N]."},
}

CONTEXTS = {
    "forward": forward_context,
    "decode": decode_context,
    "combine": combine_context,
    "delta": delta_context,
    "backward_dkdv": backward_dkdv_context,
    "backward_dq": backward_dq_context,
    "backward_dq_matrix": backward_dq_matrix_context,
    "backward_capture": backward_capture_context,
    "backward_small": backward_small_context,
    "block_kinds": block_kinds_context,
    "block_lists": block_lists_context,
}
