"""Programs that say no more than scaled_dot_product_attention does: `score * c`, every key or causal."""

from __future__ import annotations

import math

from .expr import KV, KV_LEN, Q_LEN, SCORE, Const, Expr, Op, Program, Q

_CAUSAL = (KV <= Q, Q >= KV)
_CAUSAL_FROM_END = (KV <= Q + KV_LEN - Q_LEN, KV <= Q + (KV_LEN - Q_LEN), Q + KV_LEN - Q_LEN >= KV)  # same if M == N


def causal_and_scale(program: Program) -> tuple[bool, float] | None:
    """(whether it is causal where M == N, the scale); None if the program says more.

    causal_and_scale(parse("score = score * 0.125; keep = kv_idx <= q_idx"))    # (True, 0.125)
    """
    scale = _scale(program.score)
    if scale is None or any(p is not None for p in (program.sink, program.weight, program.drop)):
        return None
    if program.keep is not None and program.keep not in (*_CAUSAL, *_CAUSAL_FROM_END):
        return None
    return program.keep is not None, scale


def _scale(score: Expr) -> float | None:
    if score is SCORE:
        return 1.0
    if isinstance(score, Op) and score.head in ("mul", "div") and SCORE in score.args:
        factor = score.args[0] if score.args[1] is SCORE else score.args[1]
        if isinstance(factor, Const) and not isinstance(factor.head, bool) and 0 < factor.head < math.inf:
            if score.head == "mul":
                return float(factor.head)
            return 1.0 / factor.head if score.args[0] is SCORE else None
    return None
