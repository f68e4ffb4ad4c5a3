"""Runs expressions and whole programs with torch: the oracle that every other consumer is compared with.

    env = {"score": x, "b": range(2), "h": range(8), "q_idx": range(64), "kv_idx": range(128)}
    evaluate(parse("score = score + c0[h] * (kv_idx - q_idx)").score, env, [slopes], [])    # [2, 8, 64, 128]

The only module of `score/` that imports torch. Results broadcast: a value that does not depend on an index has size 1
there, so nothing is n x n before it must be. Everything is differentiable by autograd in `score` and float captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .diagonal import diagonal_offset
from .expr import FLOAT_RESULT, INDEX_NAMES, KV, SCORE_NAME, Const, Expr, Load, Name, Program, Q, captures_in, walk


def evaluate(
    expr: Expr,
    env: Mapping[str, Tensor | range | int],
    captures: Sequence[Tensor] = (),
    sizes: Sequence[int] = (),
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The value of the expression, broadcastable to [B, H, M, N]; compute_dtype, int64 or bool.

    `env` maps "score" to a float tensor, `b`, `h`, `q_idx`, `kv_idx` to an integer tensor ([B, 1, 1, 1], [1, H, 1, 1],
    [1, 1, M, 1], [1, 1, 1, N]) or to a `range` with step 1 (captures are then sliced, not gathered), and `q_len`,
    `kv_len` to ints. Names the expression does not use may be absent. `sizes` are s0, s1, ...
    """
    return Evaluator(env, captures, sizes, compute_dtype).run(expr)


def evaluate_load(node: Load, env: Mapping[str, Tensor | range | int], capture: Tensor) -> Tensor | None:
    """The load as a broadcast view or small copy [B|1, H|1, M|1, N|1] in the capture's dtype, None if it is a gather.

    That is, None unless each index is a constant or an index name and no name is used twice.
    """
    names = [i.head for i in node.args if isinstance(i, Name)]
    simple = all(_is_plain(i) for i in node.args) and len(set(names)) == len(names)
    if not simple or not all(_runs_along(n, env[n]) for n in names):
        return None
    value, axis, axes = capture, 0, []
    for i in node.args:
        if isinstance(i, Const):
            value = value.select(axis, i.head)
            continue
        index = env[i.head]
        value = value.narrow(axis, index.start, len(index)) if isinstance(index, range) else _select(value, axis, index)
        axes.append(INDEX_NAMES.index(i.head))
        axis += 1
    order = sorted(range(len(axes)), key=axes.__getitem__)
    shape = [1, 1, 1, 1]
    for a, size in zip(axes, value.shape, strict=True):
        shape[a] = size
    value = value.permute(order)
    for a in range(4):
        if a not in axes:
            value = value.unsqueeze(a)
    return value


def diagonals_read(
    node: Load, env: Mapping[str, Tensor | range | int], sizes: Sequence[int], capture: Tensor
) -> tuple[int, range] | None:
    """The one dimension indexed by `kv_idx - q_idx + x`, and its positions there in order; None for any other load.

    That is, for ranges of q_idx and kv_idx that stay inside, where the other indices are plain and other names.
    """
    q, kv = env.get("q_idx"), env.get("kv_idx")
    dims = [d for d, i in enumerate(node.args) if not _is_plain(i)]
    if len(dims) != 1 or {Q, KV} & {*node.args} or not isinstance(q, range) or not isinstance(kv, range):
        return None
    lengths = {n: v for n, v in env.items() if n in ("q_len", "kv_len") and isinstance(v, int)}
    offset = diagonal_offset(node.args[dims[0]], {**lengths, **{f"s{i}": int(s) for i, s in enumerate(sizes)}})
    if offset is None or not q or not kv or (q.step, kv.step) != (1, 1):
        return None
    found = range(kv[0] - q[-1] + offset, kv[-1] - q[0] + offset + 1)
    return (dims[0], found) if found[0] >= 0 and found[-1] < capture.shape[dims[0]] else None


def along(node: Load, dim: int, name: Name) -> Load:
    """The load with another index in one dimension."""
    return Load(node.head, (*node.args[:dim], name, *node.args[dim + 1 :]))  # type: ignore[return-value]


def _is_plain(index: Expr) -> bool:
    if isinstance(index, Const):
        return type(index.head) is int
    return isinstance(index, Name) and index.head in INDEX_NAMES


def _runs_along(name: str, index: Tensor | range | int) -> bool:
    """Whether the index varies along its own axis alone."""
    if isinstance(index, range):
        return index.step == 1
    axis = INDEX_NAMES.index(name)
    return isinstance(index, Tensor) and index.dim() == 4 and index.numel() == index.shape[axis]


def _select(value: Tensor, axis: int, index: Tensor) -> Tensor:
    return value.index_select(axis, index.flatten().to(value.device))


def index_tensor(name: str, index: Tensor | range | int, device: torch.device) -> Tensor:
    """The int64 tensor of an index name, along its own axis of four; [] for a single int."""
    if isinstance(index, Tensor):
        return index.to(torch.int64)
    if not isinstance(index, range):
        return torch.full((), index, dtype=torch.int64, device=device)
    shape = [1, 1, 1, 1]
    shape[INDEX_NAMES.index(name)] = len(index)
    return torch.arange(index.start, index.stop, index.step, device=device).view(shape)


class Evaluator:
    """Values of all nodes of one evaluation; `run` may be called for several expressions that share nodes."""

    def __init__(
        self,
        env: Mapping[str, Tensor | range | int],
        captures: Sequence[Tensor],
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.env, self.captures, self.sizes, self.dtype = env, captures, sizes, dtype
        self.device = next((v.device for v in (*env.values(), *captures) if isinstance(v, Tensor)), torch.device("cpu"))
        self.values: dict[Expr, Tensor] = {}

    def run(self, expr: Expr) -> Tensor:
        for node in walk(expr):
            if node not in self.values:
                self.values[node] = self._node(node)
        return self.values[expr]

    def _node(self, node: Expr) -> Tensor:
        if isinstance(node, Const):
            return self._scalar(node.head)
        if isinstance(node, Name):
            return self._name(node.head)
        if isinstance(node, Load):
            return self._widen(self._load(node))
        return self._op(node.head, [self.values[a] for a in node.args])

    def _scalar(self, value: bool | int | float) -> Tensor:
        dtype = {bool: torch.bool, float: self.dtype}.get(type(value), torch.int64)
        return torch.full((), value, dtype=dtype, device=self.device)

    def _name(self, name: str) -> Tensor:
        if name == SCORE_NAME:
            return self.env[name].to(self.dtype)  # type: ignore[union-attr]
        if name in INDEX_NAMES:
            return index_tensor(name, self.env[name], self.device)
        value = self.env[name] if name in self.env else self.sizes[int(name[1:])]
        return value.to(torch.int64) if isinstance(value, Tensor) else self._scalar(value)  # type: ignore[arg-type]

    def _load(self, node: Load) -> Tensor:
        capture = self.captures[node.head]
        if not node.args:
            return capture.reshape(())
        view = evaluate_load(node, self.env, capture)
        if view is None:
            view = self._diagonals(node, capture)
        if view is not None:
            return view
        return capture[tuple(self.values[i].to(torch.int64) for i in node.args)]

    def _diagonals(self, node: Load, capture: Tensor) -> Tensor | None:
        """Windows that slide over the capture, one a query: copied row by row instead of gathered."""
        found = diagonals_read(node, self.env, self.sizes, capture)
        if found is None:
            return None
        dim, positions = found
        rows, columns = (range(len(self.env[n])) for n in ("q_idx", "kv_idx"))  # type: ignore[arg-type]
        windows = capture.narrow(dim, positions[0], len(positions)).unfold(dim, len(columns), 1).flip(dim)
        moved = along(node, dim, Q)  # type: ignore[arg-type]
        return evaluate_load(Load(0, (*moved.args, KV)), {**self.env, "q_idx": rows, "kv_idx": columns}, windows)  # type: ignore[arg-type]

    def _widen(self, value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            return value
        return value.to(self.dtype if value.is_floating_point() else torch.int64)

    def _op(self, operation: str, args: list[Tensor]) -> Tensor:
        if operation == "float":
            return args[0].to(self.dtype)
        if operation == "int":
            return args[0].to(torch.int64)  # truncates
        if operation == "bool":
            return args[0] != 0
        if operation == "where":
            return torch.where(args[0] != 0, *self._promote(args[1:]))
        if operation in FLOAT_RESULT:
            return _FUNCTIONS[operation](*(a.to(self.dtype) for a in args))
        args = self._promote(args)
        if args[0].dtype == torch.bool:
            if operation in _BOOL_IDENTITY:
                return args[0]
            if operation in _COUNTS:
                args = [a.to(torch.int64) for a in args]
        if operation in _ROUNDING and not args[0].is_floating_point():
            return args[0]
        return _FUNCTIONS[operation](*args)

    def _promote(self, args: list[Tensor]) -> list[Tensor]:
        """All to one dtype: compute_dtype if any is float, else int64 if any is int. torch would pick float32."""
        if any(a.is_floating_point() for a in args):
            return [a.to(self.dtype) for a in args]
        if any(a.dtype != torch.bool for a in args):
            return [a.to(torch.int64) for a in args]
        return args


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": partial(torch.div, rounding_mode="floor"), "mod": torch.remainder, "pow": torch.pow, "neg": torch.neg,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "minimum": torch.minimum, "maximum": torch.maximum,
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "erf": torch.erf, "sin": torch.sin, "cos": torch.cos, "abs": torch.abs, "sign": torch.sign,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "isnan": torch.isnan,
}  # fmt: skip
_ROUNDING = frozenset({"floor", "ceil", "round", "trunc"})
_BOOL_IDENTITY = _ROUNDING | {"abs", "sign"}
_COUNTS = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg", "pow"})  # arithmetic on bools is on ints


def fill_top(
    top: Expr,
    query: Tensor,
    key: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The value of `Fill.top`, []: no filled score is greater. NaN where an operand that matters holds one."""
    env = {"q_len": query.shape[2], "kv_len": key.shape[2]}
    return evaluate(top, env, _extremes(top, query, key, captures, dtype), sizes, dtype).to(dtype)


def _extremes(top: Expr, query: Tensor, key: Tensor, captures: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What the loads of `Fill.top` stand for; those it does not name are left 0."""
    found = [query.new_zeros((), dtype=dtype)] * (2 * len(captures) + 1)
    for number in captures_in(top):
        if number == 0:
            # |q . k| <= D max|q| max|k|; a hundredth more than any order or precision of the sum can add
            sizes = [torch.linalg.vector_norm(t, torch.inf).to(dtype) for t in (query, key)]
            found[0] = sizes[0] * sizes[1] * (1.01 * query.shape[-1])
        else:
            capture = captures[(number - 1) // 2]
            once = capture[tuple(slice(1) if s == 0 else slice(None) for s in capture.stride())]
            found[number] = (once.amin() if number % 2 else once.amax()).to(dtype)
    return found


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor] = (),
    sizes: Sequence[int] = (),
    program: Program | None = None,
    seed: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    drop_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by the definition: out [B, H, M, Dv] in the dtype of query, lse [B, H, M] in compute_dtype.

    query [B, H, M, D], key [B, Hk, N, D], value [B, Hk, N, Dv], H a multiple of Hk. compute_dtype is float64 for
    float64 operands, else float32. Dropout needs `drop_mask`, bool [B, H, M, N], true where a weight is kept: which
    bits `seed` stands for is the business of each implementation.
    """
    program = Program() if program is None else program
    if compute_dtype is None:
        compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    (batch, heads, rows, _), (kv_heads, keys) = query.shape, key.shape[1:3]
    k, v = (t.to(compute_dtype).repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    x = query.to(compute_dtype) @ k.transpose(-1, -2)
    env = {"score": x, "b": range(batch), "h": range(heads), "q_idx": range(rows), "kv_idx": range(keys)}
    run = Evaluator({**env, "q_len": rows, "kv_len": keys}, captures, sizes, compute_dtype).run
    s = run(program.score).to(compute_dtype).expand(x.shape)
    if program.keep is not None:
        s = torch.where(run(program.keep), s, -torch.inf)
    sink = None if program.sink is None else run(program.sink).to(compute_dtype).expand(batch, heads, rows, 1)
    p, lse = _softmax(s, sink, program)
    if program.drop:
        if drop_mask is None:
            raise ValueError("reference: a program with dropout needs drop_mask, bool [B, H, M, N], got None")
        p = p * drop_mask / (1.0 - program.drop)
    if program.weight is not None:
        p = p * run(program.weight)
    out = p @ v
    if keys == 0:  # the product over nothing is 0, the softmax over nothing NaN
        out = torch.where(lse.isnan().unsqueeze(-1), torch.nan, out)
    return out.to(query.dtype), lse


def _softmax(s: Tensor, sink: Tensor | None, program: Program) -> tuple[Tensor, Tensor]:
    """p [B, H, M, N] and lse [B, H, M] of s, with the sink [B, H, M, 1] in the denominator."""
    if s.shape[-1] == 0:
        top = s.new_full((*s.shape[:-1], 1), -torch.inf)
    else:
        top = s.detach().amax(-1, keepdim=True)
    no_key = top == -torch.inf
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    if not program.unsaved:
        no_key = top == -torch.inf
    if program.guarded:
        # a finite stand-in keeps NaN out of the values and of autograd
        top = torch.where(no_key, 0.0, top)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    if not program.guarded:
        # also for no keys at all, where the sum is 0
        total = total + torch.zeros_like(total).masked_fill_(no_key, torch.nan)
        return e / total, (top + torch.log(total)).squeeze(-1)
    total = torch.where(no_key, 1.0, total)
    return e / total, torch.where(no_key, -torch.inf, top + torch.log(total)).squeeze(-1)
