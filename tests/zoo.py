"""One table of attentions as people write them: what is fused, with which program, and what is left, for which reason.

A row is a function under `@row(...)`: the tensors it takes, and the verdict. Rows that are left stand beside the row
that is fused and resembles them. `tests/match/test_zoo_verdicts.py` and `tests/test_zoo_numerics.py` run every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B, H, M, N, D = 2, 3, 17, 13, 16
INF = math.inf


@dataclass(frozen=True)
class T:
    """One argument. `kind`: "grad" or "plain" floats, a bool mask ("keep", or "some" with a row that keeps nothing), or a
    mask of 0 and 1 ("int", "uint8").
    """

    shape: tuple[int, ...]
    kind: str = "grad"
    dtype: torch.dtype = torch.float32

    def make(self, generator: torch.Generator) -> Tensor:
        if self.kind in ("grad", "plain"):
            made = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.dtype)
            return made.requires_grad_(self.kind == "grad")
        keep = torch.rand(self.shape, generator=generator) < 0.7
        if self.kind == "some":
            keep[(0,) * (keep.dim() - 1)] = False
            return keep
        keep[..., 0] = True  # no row without a key
        return keep.to({"keep": torch.bool, "int": torch.int64, "uint8": torch.uint8}[self.kind])


@dataclass(frozen=True)
class Case:
    """`program` is the text of every site in order; `dynamic_program` where run-time shapes change it."""

    name: str
    make: Callable[[], Callable]
    tensors: tuple[T, ...]
    verdict: str = "fuse"
    reason: str | None = None
    program: tuple[str, ...] | None = None
    dynamic_program: tuple[str, ...] | None = None
    sites: int = 1
    random: bool = False
    lossy: torch.dtype | None = None  # a narrower dtype that the row itself computes in

    def build(self) -> tuple[Callable, tuple[Tensor, ...]]:
        """The function or module, and its arguments; the same ones on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            fn = self.make()
        generator = torch.Generator().manual_seed(11)
        return fn, tuple(t.make(generator) for t in self.tensors)


CASES: list[Case] = []


Text = str | Sequence[str] | None


def row(*tensors: T, program: Text = None, dynamic: Text = None, **fields: Any):
    """Add the function below, or what the module class below builds, to the table."""

    def add(fn: Any) -> Any:
        texts, dynamic_texts = ((p,) if isinstance(p, str) else p and tuple(p) for p in (program, dynamic))
        make = fn if isinstance(fn, type) else lambda: fn
        name = getattr(fn, "row_name", fn.__name__.lower())
        CASES.append(Case(name, make, tensors, program=texts, dynamic_program=dynamic_texts, **fields))
        return fn

    return add


def left(*tensors: T, reason: str, **fields: Any):
    """Add a row whose attention is seen and left alone."""
    return row(*tensors, verdict="leave", reason=reason, **fields)


def floats(*shapes: tuple[int, ...], kind: str = "grad", dtype: torch.dtype = torch.float32) -> tuple[T, ...]:
    return tuple(T(s, kind, dtype) for s in shapes)


def qkv(m: int = M, n: int = N, d: int = D, dv: int | None = None, h: int = H, hk: int | None = None, **fields: Any):
    """[B, H, M, D], [B, Hk, N, D], [B, Hk, N, Dv]"""
    hk = hk or h
    return floats((B, h, m, d), (B, hk, n, d), (B, hk, n, dv or d), **fields)


PLAIN = "score = score * 0.25"
DIVIDED = "score = score / 4.0"
MASKED = "score = score * 0.25; keep = ~c0[b, 0, 0, kv_idx]"
CAUSAL = "score = score * 0.25; keep = kv_idx <= q_idx"
KEEP = T((B, 1, 1, N), "keep")

# *** spellings of the products, and layouts ***


@row(*qkv(), program=PLAIN)
def matmul_operator(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v


@row(*qkv(), program=PLAIN)
def matmul_functions(q, k, v):
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)).mul(0.25)
    return torch.matmul(F.softmax(scores, dim=-1), v)


@row(*floats((B * H, M, D), (B * H, N, D), (B * H, N, D)), program=PLAIN)
def bmm_folded(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 0.25, 2), v)


@row(*qkv(), program=PLAIN)
def einsum_bhmd(q, k, v):
    return torch.einsum("bhmn,bhnd->bhmd", (torch.einsum("bhmd,bhnd->bhmn", q, k) * 0.25).softmax(-1), v)


@row(*floats((B, M, H, D), (B, N, H, D), (B, N, H, D)), program=PLAIN)
def einsum_bmhd(q, k, v):
    return torch.einsum("bhmn,bnhd->bmhd", (torch.einsum("bmhd,bnhd->bhmn", q, k) * 0.25).softmax(-1), v)


@row(*floats((B * H, M, D), (B * H, N, D), (B * H, N, D)), program=PLAIN)
def baddbmm_beta_zero(q, k, v):
    empty = torch.empty(q.size(0), q.size(1), k.size(1), dtype=q.dtype)
    return torch.bmm(torch.baddbmm(empty, q, k.mT, beta=0, alpha=0.25).softmax(-1), v)


@row(
    *floats((B * H, M, D), (B * H, N, D), (B * H, N, D), (B * H, 1, N)),
    program="score = score * 0.25 + c0[b, 0, kv_idx]",
)
def baddbmm_bias(q, k, v, alibi):
    return torch.bmm(torch.baddbmm(alibi, q, k.mT, beta=1.0, alpha=0.25).softmax(-1), v)


@row(*floats((M, B, H, D), (N, B, H, D), (N, B, H, D)), program="")
def length_first(q, k, v):
    q, k, v = (t.reshape(t.size(0), B * H, D).transpose(0, 1) for t in (q * 0.25, k, v))
    out = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
    return out.transpose(0, 1).reshape(-1, B, H * D)


@row(*floats((B, D, 4, 4), (B, D, 4, 4), (B, D, 4, 4)), program=PLAIN)
def conv_channels_first(q, k, v):
    b, c, h, w = q.shape
    weights = torch.bmm(q.reshape(b, c, h * w).permute(0, 2, 1), k.reshape(b, c, h * w)) * (int(c) ** (-0.5))
    weights = F.softmax(weights, dim=2).permute(0, 2, 1)
    return torch.bmm(v.reshape(b, c, h * w), weights).reshape(b, c, h, w)


@row(*floats((M, D), (N, D), (N, D)), program=PLAIN)
def rank_two(q, k, v):
    return torch.mm(torch.softmax(torch.mm(q, k.t()) * 0.25, 1), v)


@row(*qkv(), T((H, D, D)), program=PLAIN)
def bilinear_scores(q, k, v, w):
    return (torch.einsum("bhmd,hde,bhne->bhmn", q, w, k) * 0.25).softmax(-1) @ v


@row(*floats((M, D), (N, D), (N, D)), program=PLAIN)
def linear_of_activations(q, k, v):
    return F.linear((F.linear(q, k) * 0.25).softmax(-1), v.t())


@row(*floats((B, M, D), (N, D), (N, D), (N,)), program="score = score + c0[kv_idx]")
def linear_with_a_memory(q, k, v, bias):
    return F.linear(q, k, bias).softmax(-1) @ v


@row(*floats((M, D), (N, D), (N, D), (N,)), program="score = score * 0.25 + c0[kv_idx]")
def addmm_of_activations(q, k, v, bias):
    return torch.mm(torch.addmm(bias, q, k.t(), alpha=0.25).softmax(-1), v)


@row(*floats((D,), (N, D), (N, D)), program=PLAIN)
def one_query_as_a_vector(q, k, v):
    return (k @ q * 0.25).softmax(0) @ v


@row(T((B, N, D)), verdict="leave", sites=0)
class LinearClassifier(nn.Module):
    row_name = "linear_classifier"

    def __init__(self):
        super().__init__()
        self.head, self.back = nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x):
        return self.back(self.head(x).softmax(-1))


@row(*floats((B, 4, H, 9, D), (B, 4, H, 9, D), (B, 4, H, 9, D)), program=PLAIN)
def rank_five_windows(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1) @ v


@row(*qkv(), program=PLAIN)
def keys_first_softmax_over_rows(q, k, v):
    return (k @ q.mT * 0.25).softmax(-2).mT @ v


@left(*qkv(m=N), reason="softmax-axis")
def softmax_over_queries(q, k, v):
    return (q @ k.mT * 0.25).softmax(-2) @ v


@left(*qkv(), reason="softmax-axis")
def softmax_over_heads(q, k, v):
    return (q @ k.mT * 0.25).softmax(1) @ v


@left(*floats((B, M, D), (B, N, D), (B, N, D)), reason="softmax-axis")
def softmax_over_batch(q, k, v):
    return (q @ k.mT * 0.25).softmax(0) @ v


@row(T((B, M, H * D)), program=DIVIDED)
class PackedProjection(nn.Module):
    row_name = "packed_projection"

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.0)

    def forward(self, x):
        b, m, e = x.shape
        q, k, v = self.qkv(x).reshape(b, m, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.drop(self.softmax(q @ k.transpose(-2, -1) / math.sqrt(D)))
        return self.out((weights @ v).transpose(1, 2).contiguous().view(b, m, e))


@row(*qkv(), program=PLAIN)
def queries_are_batches_of_the_score_product(q, k, v):
    return (q.unsqueeze(3) @ k.unsqueeze(2).mT * 0.25).squeeze(3).softmax(-1) @ v


@row(*qkv(), program="")
def queries_are_batches_of_both_products(q, k, v):
    return ((q.unsqueeze(3) @ k.unsqueeze(2).mT).softmax(-1) @ v.unsqueeze(2)).squeeze(3)


@row(*floats((M, D), (N, D), (N, D)), program="score = score * 0.25; keep = kv_idx <= b")
def one_product_for_every_query(q, k, v):
    s = torch.bmm(q.unsqueeze(1), k.T.expand(M, D, N)).squeeze(1) * 0.25
    s = s.masked_fill(torch.ones(M, N, dtype=torch.bool).triu(1), -INF)
    return torch.bmm(s.softmax(-1).unsqueeze(1), v.expand(M, N, D)).squeeze(1)


@left(*floats((H, M, D), (H, N, D), (H, N, D)), reason="score-not-pointwise")
def heads_summed_by_addbmm(q, k, v):
    return torch.addbmm(q.new_zeros(M, N), q, k.mT, alpha=0.25).softmax(-1) @ v


@left(*qkv(), T((M, 1, 1)), reason="score-not-pointwise")
def keys_scaled_by_query_in_the_batch(q, k, v, scale):
    keys = k.unsqueeze(2) * scale
    return (q.unsqueeze(3) @ keys.mT).squeeze(3).softmax(-1) @ v


# *** products written as a multiplication and a sum ***


@row(*qkv(), program="score = score / 4.0")
def multiplied_and_summed(q, k, v):
    w = ((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / 4).softmax(-1)
    return (w.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


@row(*qkv(), program=PLAIN)
def scores_multiplied_and_summed(q, k, v):
    return (torch.sum(q[:, :, :, None] * k[:, :, None] * 0.25, dim=-1)).softmax(-1) @ v


@row(*qkv(dv=8), KEEP, program=MASKED)
def values_multiplied_and_summed(q, k, v, keep):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return torch.sum(v.unsqueeze(2) * w.unsqueeze(-1), dim=3, keepdim=True).squeeze(3)


@row(*floats((B, M, H, D), (B, N, H, D), (B, N, H, D)), program=PLAIN)
def heads_behind_the_summed_axis(q, k, v):
    w = ((q.unsqueeze(2) * k.unsqueeze(1)).sum(-1) * 0.25).softmax(2)
    return (w.unsqueeze(-1) * v.unsqueeze(1)).sum(2)


@row(*floats((B, H, M, D), (B, N, D), (B, N, D)), program=PLAIN)
def heads_share_what_is_summed(q, k, v):
    w = ((q.unsqueeze(-2) * k[:, None, None]).sum(-1) * 0.25).softmax(-1)
    return (w.unsqueeze(-1) * v[:, None, None]).sum(-2)


@row(*qkv(), program=PLAIN)
def expanded_before_they_are_summed(q, k, v):
    q, k = q.unsqueeze(3).repeat(1, 1, 1, N, 1), k.unsqueeze(2).expand(-1, -1, M, -1, -1)
    w = ((q * k).sum(-1) * 0.25).softmax(-1)
    return (w.unsqueeze(-1).expand(-1, -1, -1, -1, D) * v.unsqueeze(2)).sum(3)


@row(*floats((B, M, D), (B, N, D), (B, N, D)), program=PLAIN)
def outer_product_by_einsum(q, k, v):
    return torch.einsum("bmn,bnd->bmd", (torch.einsum("bmd,bnd->bmnd", q, k).sum(-1) * 0.25).softmax(-1), v)


@row(*qkv(), program=PLAIN)
def exponentials_multiplied_and_summed(q, k, v):
    s = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * 0.25
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e.unsqueeze(-1) * v.unsqueeze(2)).sum(3) / e.sum(-1, keepdim=True)


@row(*floats((B, D), (B, N, D), (B, N, D)), program="")
def memory_network(q, memory, candidates):
    p = (memory * q.unsqueeze(1)).sum(2).softmax(-1)
    return (candidates * p.unsqueeze(2)).sum(1)


@row(*floats((B, D), (B, N, D)), program="")
def one_query_of_a_decoder(q, states):
    a = torch.bmm(states, q.unsqueeze(2)).squeeze(2).softmax(1)
    return (a.unsqueeze(-1) * states).sum(1)


@row(*floats((D,), (B, N, D)), program="")
def pooled_by_a_learned_query(w, x):
    return ((x * w).sum(-1, keepdim=True).softmax(1) * x).sum(1)


@row(*qkv(m=N), program=PLAIN)
def result_summed_under_no_grad(q, k, v):
    weighed = (q @ k.mT * 0.25).softmax(-1).detach().unsqueeze(-1) * v.unsqueeze(2)
    with torch.no_grad():
        seen = weighed.sum(3)
    return v * seen + q


@left(*qkv(), reason="gradient-stopped")
def scores_summed_under_no_grad(q, k, v):
    products = q.unsqueeze(3) * k.unsqueeze(2)
    with torch.no_grad():
        s = products.sum(-1)
    return (s * v.mean()).softmax(-1) @ v


@row(*floats((B, M, D), (B, M, N, D), (B, M, N, D)), program=PLAIN)
def every_query_has_its_own_keys(q, k, v):
    w = ((q.unsqueeze(2) * k).sum(-1) * 0.25).softmax(-1)
    return (w.unsqueeze(-1) * v).sum(2)


@row(*floats((B, M, D), (B, N, D), (B, M, N, D)), program=PLAIN)
def every_query_has_its_own_values(q, k, v):
    return ((q @ k.mT * 0.25).softmax(-1).unsqueeze(-1) * v).sum(2)


@left(*floats((B, M, D), (B, N, D), (B, N, D), (D,)), reason="score-not-pointwise")
def additive_scores(q, k, v, w):
    return ((q.unsqueeze(2) + k.unsqueeze(1)).tanh() * w).sum(-1).softmax(-1) @ v


@row(*qkv(), T((N,)), verdict="leave", sites=0)
def expected_position(q, k, v, positions):
    return v.sum(-1).sum(-1)[..., None] + ((q @ k.mT * 0.25).softmax(-1) * positions).sum(-1)


# *** scale ***


@row(*qkv(), program="")
def scale_query(q, k, v):
    return (q * D**-0.5 @ k.mT).softmax(-1) @ v


@row(*qkv(), program="")
def scale_key(q, k, v):
    return (q @ (k / math.sqrt(D)).mT).softmax(-1) @ v


@row(*qkv(), program="")
def scale_both(q, k, v):
    return ((q * 0.5) @ (k * 0.5).mT).softmax(-1) @ v


@row(*qkv(), KEEP, program=DIVIDED + "; keep = ~c0[b, 0, 0, kv_idx]")
def scale_before_mask(q, k, v, keep):
    return (q @ k.mT / math.sqrt(D)).masked_fill(~keep, -INF).softmax(-1) @ v


@row(*qkv(), KEEP, program=DIVIDED + "; keep = ~c0[b, 0, 0, kv_idx]")
def scale_after_mask(q, k, v, keep):
    return ((q @ k.mT).masked_fill(~keep, -INF) / math.sqrt(D)).softmax(-1) @ v


@row(*qkv(), program="score = score / sqrt(16.0)")
def scale_tensor(q, k, v):
    return (q @ k.mT / torch.sqrt(torch.tensor(float(D)))).softmax(-1) @ v


@row(*qkv(), T(()), program="score = score * c0")
def scale_learned(q, k, v, scale):
    return (q @ k.mT * scale).softmax(-1) @ v


@row(*qkv(), T((H, 1, 1)), program="score = score * c0[h, 0, 0]")
def scale_learned_for_each_head(q, k, v, scale):
    return (q @ k.mT * scale.clamp(max=4.0).exp()).softmax(-1) @ v


@row(*qkv(), program="")
def scale_none(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@row(*qkv(), program="score = score * -0.25")
def scale_negative(q, k, v):
    return (-0.25 * (q @ k.mT)).softmax(-1) @ v


# *** softmax, and other functions of the score ***


@row(*qkv(dtype=torch.bfloat16), program=PLAIN)
def softmax_dtype_argument(q, k, v):
    return F.softmax(q @ k.mT * 0.25, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@row(*qkv(dtype=torch.float16), program=PLAIN)
def softmax_float_method(q, k, v):
    return torch.softmax((q @ k.mT * 0.25).float(), -1).type_as(v) @ v


@row(*qkv(), program="t0 = where(score < -5.0, -5.0, score); score = where(t0 > 5.0, 5.0, t0) * 0.25")
def clamped_score(q, k, v):
    return ((q @ k.mT).clamp(-5, 5) * 0.25).softmax(-1) @ v


@row(*qkv(), program="score = tanh(score * 0.25 / 5.0) * 5.0")
def soft_cap(q, k, v):
    return (torch.tanh(q @ k.mT * 0.25 / 5.0) * 5.0).softmax(-1) @ v


ACTIVATIONS = {
    "relu": (F.relu, "where(score <= 0, 0, score)"),
    "relu6": (F.relu6, "where(score <= 0.0, 0.0, where(score >= 6.0, 6.0, score))"),
    "at_least_0": (lambda s: s.clamp(min=0), "where(score < 0.0, 0.0, score)"),
    "leaky_relu": (lambda s: F.leaky_relu(s, 0.25), "where(score > 0.0, score, score * 0.25)"),
    "hardsigmoid": (
        F.hardsigmoid, "t0 = score / 6.0 + 0.5; score = where(t0 <= 0.0, 0.0, where(t0 >= 1.0, 1.0, t0))",
    ),
    "threshold": (lambda s: F.threshold(s, 0.5, -2.0), "where(score <= 0.5, -2.0, score)"),
    "steep_softplus": (
        lambda s: F.softplus(s, beta=2, threshold=1),
        "t0 = score * 2.0; score = where(t0 > 1.0, score, (maximum(t0, 0.0) + log1p(exp(-abs(t0)))) / 2.0)",
    ),
    "elu": (F.elu, "t0 = score > 0.0; score = where(t0, score, expm1(where(t0, 0.0, score)))"),
    "gelu": (F.gelu, "score * 0.5 * (erf(score * 0.7071067811865476) + 1.0)"),
    "silu": (F.silu, "score * sigmoid(score)"),
    "softplus": (F.softplus, "maximum(score, 0.0) + log1p(exp(-abs(score)))"),
    "logsigmoid": (F.logsigmoid, "-(maximum(-score, 0.0) + log1p(exp(-abs(-score))))"),
    "logit": (
        lambda s: s.sigmoid().logit(0.125),
        "t0 = where(sigmoid(score) < 0.125, 0.125, sigmoid(score)); "
        "t1 = where(t0 > 0.875, 0.875, t0); score = log(t1 / (1.0 - t1))",
    ),
    "logaddexp": (
        lambda s: torch.logaddexp(s, torch.linspace(-1, 1, N)),
        "where(score == c0[kv_idx], score + 0.6931471805599453, "
        "maximum(score, c0[kv_idx]) + log1p(exp(-abs(score - c0[kv_idx]))))",
    ),
    "nan_to_num": (
        lambda s: s.nan_to_num(nan=-1.0, posinf=5.0, neginf=-5.0),
        "where(isnan(score), -1.0, where(score == inf, 5.0, where(score == -inf, -5.0, score)))",
    ),
    "mish": (F.mish, "score * tanh(maximum(score, 0.0) + log1p(exp(-abs(score))))"),
}


def activated(activation):
    def fn(q, k, v):
        q = q - q.detach() * (torch.arange(q.size(2)) < 2)[:, None]  # some scores are exactly 0
        return activation(q @ k.mT).softmax(-1) @ v

    return fn


for _name, (_activation, _text) in ACTIVATIONS.items():
    _program = _text if _text.startswith("t0") else f"score = {_text}"
    CASES.append(Case(f"scores_through_{_name}", lambda a=_activation: activated(a), qkv(), program=(_program,)))


NAN_TO_NUM = (
    "score = where(c0[b, 0, 0, kv_idx], -3.4028234663852886e+38, where(isnan(score), 0.0, "
    "where(score == inf, 3.4028234663852886e+38, where(score == -inf, -3.4028234663852886e+38, score))))"
)


@row(*qkv(), KEEP, program=NAN_TO_NUM)
def nan_to_num_after_the_mask(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep, -INF).nan_to_num().softmax(-1) @ v


@row(*qkv(), program="score = -score")
def maximum_minus_scores(q, k, v):
    s = q @ k.mT
    return (s.amax(-1, keepdim=True) - s).softmax(-1) @ v


@left(*qkv(m=N), reason="score-not-pointwise")
def maximum_over_queries_minus_scores(q, k, v):
    s = q @ k.mT
    return (s.amax(-2, keepdim=True) - s).softmax(-1) @ v


@row(*qkv(), verdict="leave", sites=0)
def sigmoid_attention(q, k, v):
    return (q @ k.mT * 0.25).sigmoid() @ v


@left(*qkv(), reason="weight-not-pointwise")
def double_softmax(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1).softmax(-1) @ v


@left(*qkv(), reason="score-not-pointwise")
def top_k(q, k, v):
    scores = q @ k.mT * 0.25
    least = scores.topk(5, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -INF).softmax(-1) @ v


@left(*qkv(), T((H, H)), reason="score-not-pointwise")
def talking_heads(q, k, v, mix):
    return torch.einsum("bhmn,hg->bgmn", q @ k.mT * 0.25, mix).softmax(-1) @ v


# *** additive masks and trainable biases ***

BIASES = {
    "n": ((N,), "c0[kv_idx]"),
    "mn": ((M, N), "c0[q_idx, kv_idx]"),
    "hmn": ((H, M, N), "c0[h, q_idx, kv_idx]"),
    "1hmn": ((1, H, M, N), "c0[0, h, q_idx, kv_idx]"),
    "b1mn": ((B, 1, M, N), "c0[b, 0, q_idx, kv_idx]"),
    "b11n": ((B, 1, 1, N), "c0[b, 0, 0, kv_idx]"),
    "11m1": ((1, 1, M, 1), "c0[0, 0, q_idx, 0]"),
    "h11": ((H, 1, 1), "c0[h, 0, 0]"),
    "scalar": ((), "c0"),
}


def biased(q, k, v, bias):
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


for _name, (_shape, _load) in BIASES.items():
    CASES.append(
        Case(f"bias_{_name}", lambda: biased, (*qkv(), T(_shape)), program=(f"score = score * 0.25 + {_load}",))
    )


@row(*qkv(m=N), T((N,)), program="score = score * 0.25 + c0[q_idx] * c0[kv_idx]")
def bias_read_twice(q, k, v, bias):
    return (q @ k.mT * 0.25 + bias[:, None] * bias).softmax(-1) @ v


@row(*qkv(m=N), T((N, N)), program="score = score * 0.25 + c0[q_idx, kv_idx]")
def bias_flipped(q, k, v, bias):
    return (q @ k.mT * 0.25 + bias.flip(0)).softmax(-1) @ v


def folded_bias(q, k, v, bias):
    folded = (t.reshape(-1, t.size(-2), D) for t in (q, k))
    scores = torch.baddbmm(bias, next(folded), next(folded).mT, alpha=0.25)
    return (scores.softmax(-1) @ v.reshape(-1, N, D)).view(q.shape)


CASES.append(
    Case(
        "bias_of_folded_heads", lambda: folded_bias, (*qkv(), T((B * H, 1, N), "plain")),
        program=("score = score * 0.25 + c0[b, h, 0, kv_idx]",),
    )
)  # fmt: skip
CASES.append(
    Case(
        "bias_of_folded_heads_with_gradient", lambda: folded_bias, (*qkv(), T((B * H, 1, N))),
        program=("score = score * 0.25 + c0[b, h, 0, kv_idx]",),
    )
)  # fmt: skip


@row(*qkv(), T((B, N), "int"), program="score = score * 0.25 + c0[b, 0, 0, kv_idx]")
def extended_int_mask(q, k, v, mask):
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return (q @ k.mT * 0.25 + extended).softmax(-1) @ v


@row(
    *qkv(),
    T((B, 1, M, N), "keep"),
    T((H, M, N)),
    program="score = score * 0.25 + c0[h, q_idx, kv_idx]; keep = c1[b, 0, q_idx, kv_idx]",
)
def mask_and_bias(q, k, v, keep, bias):
    added = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, -INF)
    return (q @ k.mT * 0.25 + bias + added).softmax(-1) @ v


JOINED = (*qkv(d=4), *floats((B, H, M, 2), (B, H, N, 2)))


@row(*JOINED, program=PLAIN)
def content_and_position(q, k, v, p, r):
    return ((q @ k.mT + p @ r.mT) * 0.25).softmax(-1) @ v  # one product of rows of 6


@row(*JOINED, program="score = score * 0.5")
def content_and_position_scaled_apart(q, k, v, p, r):
    scores = torch.einsum("bhmd,bhnd->bhmn", q, k) / 4
    scores -= 0.5 * (r @ p.mT).mT
    return scores.softmax(-1) @ v


@row(*JOINED, program=(PLAIN, "score = score * 2.0"), sites=2)
def content_and_position_twice(q, k, v, p, r):
    content, position = q @ k.mT, p @ r.mT
    return ((content + position) * 0.25).softmax(-1) @ v, (position + 2 * content).softmax(-1) @ v


@row(*JOINED, program="score = score + c0[b, h, q_idx, kv_idx]")
def position_that_is_returned(q, k, v, p, r):
    position = p @ r.mT
    return (q @ k.mT + position).softmax(-1) @ v, position


@row(*JOINED, program="score = score + c0[b, h, q_idx, kv_idx]")
def position_without_gradient(q, k, v, p, r):
    return (q @ k.mT + (p @ r.mT).detach()).softmax(-1) @ v


@row(*JOINED, program="score = score + c0[b, h, q_idx, kv_idx]")
def position_of_the_other_head(q, k, v, p, r):
    return (q @ k.mT + (p @ r.mT).flip(1)).softmax(-1) @ v


@row(*JOINED[:3], *floats((H, B, M, 2), (H, B, N, 2)), program="score = score + c0[h, b, q_idx, kv_idx]")
def position_with_heads_first(q, k, v, p, r):
    return (q @ k.mT + (p @ r.mT).transpose(0, 1)).softmax(-1) @ v


@row(*JOINED[:3], *floats((B, H, M, 9), (B, H, N, 9)), program="score = score + c0[b, h, q_idx, kv_idx]")
def position_of_longer_rows(q, k, v, p, r):
    return (q @ k.mT + p @ r.mT).softmax(-1) @ v  # the joined rows would be larger than the scores


# *** tables of relative positions ***

DIAGONAL = "score = score * 0.25 + c0[h, kv_idx + 16 - q_idx]"
DIAGONALS = "score = score * 0.25 + c0[h, kv_idx + q_len - q_idx - 1]"
LOOKED_UP = "score = score * 0.25 + c1[c0[q_idx, kv_idx], h]"
GATHERED = "score = score * 0.25 + c0[q_idx, kv_idx, h]"


def distances(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.size(2))[None, :] - torch.arange(q.size(2))[:, None]


def buckets_of(distance: Tensor, count: int = 8, farthest: int = 12) -> Tensor:
    """T5's: half of them for keys that come later; in each half one for every near distance, then logarithmic ones."""
    half, near = count // 2, count // 4
    sides = (distance > 0).to(torch.long) * half
    distance = torch.abs(distance)
    far = near + (torch.log(distance.float() / near) / math.log(farthest / near) * (half - near)).to(torch.long)
    far = torch.min(far, torch.full_like(far, half - 1))
    sides += torch.where(distance < near, distance, far)
    return sides


@row(*qkv(), T((H, M + N)), program=DIAGONAL)
def relative_bias(q, k, v, table):
    distance = torch.arange(M)[:, None] - torch.arange(N)[None] + N
    return (q @ k.mT * 0.25 + table[:, distance]).softmax(-1) @ v


@row(*qkv(), program=DIAGONAL, dynamic=DIAGONALS)
class BucketEmbedding(nn.Module):
    row_name = "bucket_embedding"

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, H)

    def forward(self, q, k, v):
        bias = self.bias(buckets_of(distances(q, k))).permute(2, 0, 1).unsqueeze(0)
        return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


@row(*qkv(), program=DIAGONAL, dynamic=DIAGONALS)
class BucketEmbeddingPadded(BucketEmbedding):
    row_name = "bucket_embedding_with_a_row_that_is_not_trained"

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, H, padding_idx=1)


@row(*qkv(), program=GATHERED)
class BucketEmbeddingByFrequency(BucketEmbedding):
    row_name = "bucket_embedding_scaled_by_frequency"

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, H, scale_grad_by_freq=True)


@row(*qkv(m=N), program=DIAGONAL.replace("16", "12"), dynamic=DIAGONALS)
class ClippedPositions(nn.Module):
    row_name = "clipped_positions"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, H))

    def forward(self, q, k, v):
        bias = self.table[distances(q, k).clamp(-4, 4)]  # negative ones count from the end
        return (q @ k.mT * 0.25 + bias.permute(2, 0, 1)).softmax(-1) @ v


@row(*qkv(), program="score = score * 0.25 + c1[c0[q_idx * 13 + kv_idx], h]")
class FlatIndexBuffer(nn.Module):
    row_name = "index_buffer_flat"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, H))
        self.register_buffer("index", torch.randint(0, 11, (M * N,)))

    def forward(self, q, k, v):
        bias = self.table[self.index].view(M, N, H).permute(2, 0, 1)
        return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


@row(*qkv(), program=LOOKED_UP)
class IndexBuffer(nn.Module):
    row_name = "index_buffer"
    low = 0

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, H))
        self.register_buffer("index", torch.randint(self.low, 11, (M, N)))

    def forward(self, q, k, v):
        bias = self.table[self.index.view(-1)].view(M, N, -1).permute(2, 0, 1).contiguous()
        return (q @ k.mT * 0.25 + bias.unsqueeze(0)).softmax(-1) @ v


@row(*qkv(), program=LOOKED_UP)
class NegativeIndexBuffer(IndexBuffer):
    row_name = "index_buffer_with_negative_positions"
    low = -11


@row(*qkv(), program=LOOKED_UP)
class IndexSelect(IndexBuffer):
    row_name = "index_select_of_a_buffer"

    def forward(self, q, k, v):
        bias = self.table.index_select(0, self.index.flatten()).unflatten(0, (M, N)).permute(2, 0, 1)
        return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


@row(*qkv(), program="score = score * 0.25 + sigmoid(c1[c0[q_idx, kv_idx], h]) * 16.0")
class TableFromCoordinates(IndexBuffer):
    row_name = "table_from_a_layer"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, H)
        self.register_buffer("coordinates", torch.randn(1, 11, 1, 2))

    def forward(self, q, k, v):
        table = self.layer(self.coordinates).view(-1, H)
        bias = 16 * torch.sigmoid(table[self.index.view(-1)].view(M, N, -1).permute(2, 0, 1))
        return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


@row(*qkv(), T((B, N), "int"), T((2, H)), program="score = score * 0.25 + c1[c0[b, q_idx, kv_idx], h]")
def positions_from_data(q, k, v, kinds, table):
    same = kinds[:, None, :] == kinds[:, :1, None].expand(-1, q.size(2), -1)
    return (q @ k.mT * 0.25 + F.embedding(same.long(), table).permute(0, 3, 1, 2)).softmax(-1) @ v


@row(*qkv(), T((5, 4, H)), program="score = score * 0.25 + c2[c0[q_idx, kv_idx], c1[q_idx, kv_idx], h]")
class TwoPositions(nn.Module):
    row_name = "positions_in_two_dimensions"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randint(0, 5, (M, N)))
        self.register_buffer("columns", torch.randint(0, 4, (M, N)))

    def forward(self, q, k, v, table):
        return (q @ k.mT * 0.25 + table[self.rows, self.columns].permute(2, 0, 1)).softmax(-1) @ v


@row(*qkv(), program=GATHERED)
class PaddedIndexBuffer(nn.Module):
    row_name = "index_buffer_with_a_row_that_is_not_trained"

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(11, H, padding_idx=1)
        self.register_buffer("index", torch.randint(0, 11, (M, N)))

    def forward(self, q, k, v):
        return (q @ k.mT * 0.25 + self.bias(self.index).permute(2, 0, 1)).softmax(-1) @ v


@row(*qkv(), T((H, 8)), program="score = score * 0.25 + c0[h, q_idx, kv_idx] + c1[h, 0]")
def table_that_eager_detaches(q, k, v, table):
    with torch.no_grad():
        bias = table[:, buckets_of(distances(q, k))]
    return (q @ k.mT * 0.25 + bias + table[:, :1, None]).softmax(-1) @ v


# *** bool masks ***


@row(*qkv(), T((B, 1, M, N), "keep"), program="score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]")
def keep_where(q, k, v, keep):
    return torch.where(keep, q @ k.mT * 0.25, -INF).softmax(-1) @ v


@row(
    *qkv(),
    T((B, 1, M, N), "keep"),
    program="score = score * 0.25; keep = ~c0[b, 0, q_idx, 12 - kv_idx]",
    dynamic="score = score * 0.25; keep = ~c0[b, 0, q_idx, kv_len - kv_idx - 1]",
)
def drop_where(q, k, v, keep):
    drop = keep.flip(-1)
    return torch.where(drop.logical_not().logical_not(), -INF, q @ k.mT * 0.25).softmax(-1) @ v


@row(*qkv(), T((B, N), "uint8"), program="score = where(c0[b, 0, 0, kv_idx], -1000000000.0, score * 0.25)")
def uint8_mask_equal_zero(q, k, v, mask):
    return (q @ k.mT * 0.25).masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1) @ v


@row(*qkv(), T((B, N), "int"), program="score = where(c0[b, 0, 0, kv_idx], -3.4028234663852886e+38, score * 0.25)")
def int_mask_finfo_min(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return scores.masked_fill(mask[:, None, None].eq(0), torch.finfo(scores.dtype).min).softmax(-1) @ v


@row(*qkv(), KEEP, program=MASKED)
def fill_in_place(q, k, v, keep):
    scores = torch.matmul(q, k.mT) * 0.25
    scores.masked_fill_(~keep, float("-inf"))
    return scores.softmax(-1) @ v


@row(*qkv(), T((B, N), "int"), program="score = where(c0[b, 0, 0, kv_idx], score * 0.25, -10000.0)")
def fill_ten_thousand(q, k, v, mask):
    return torch.where(mask[:, None, None].bool(), q @ k.mT * 0.25, torch.tensor(-1e4)).softmax(-1) @ v


# *** causal masks and windows ***


@row(*qkv(m=N), program=CAUSAL)
def causal_tril(q, k, v):
    mask = torch.tril(torch.ones(q.size(-2), k.size(-2)))
    return (q @ k.mT * 0.25).masked_fill(mask == 0, -INF).softmax(-1) @ v


@row(*qkv(), program=CAUSAL)
def causal_triu_top_left(q, k, v):
    mask = torch.triu(torch.full((q.size(-2), k.size(-2)), -INF), diagonal=1)
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


@row(*qkv(), program=CAUSAL)
def causal_triu_of_ones_times_minus_infinity(q, k, v):
    mask = torch.triu(torch.ones(q.size(-2), k.size(-2)) * -INF, diagonal=1)
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


@row(
    *qkv(m=9),
    program="score = score * 0.25; keep = kv_idx <= q_idx + 4",
    dynamic="score = score * 0.25; keep = kv_idx <= q_idx + kv_len - q_len",
)
def causal_bottom_right(q, k, v):
    m, n = q.size(-2), k.size(-2)
    keep = torch.ones(m, n, dtype=torch.bool).tril(diagonal=n - m)
    return (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1) @ v


@row(*qkv(m=N), program="score = where(kv_idx <= q_idx, score * 0.25, -1000000000.0)")
def causal_arange(q, k, v):
    i = torch.arange(q.size(-2))
    return torch.where(i[:, None] >= i[None, :], q @ k.mT * 0.25, -1e9).softmax(-1) @ v


@row(
    *qkv(m=9),
    program="score = where(c0[0, 0, q_idx + 4, kv_idx], score * 0.25, -3.4028234663852886e+38)",
    dynamic="score = where(c0[0, 0, q_idx, kv_idx], score * 0.25, -3.4028234663852886e+38)",
)
class CausalBuffer(nn.Module):
    row_name = "causal_buffer"

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32))

    def forward(self, q, k, v):
        m, n = q.size(-2), k.size(-2)
        scores = torch.where(self.bias[:, :, n - m : n, :n], q @ k.mT * 0.25, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v


@row(*qkv(m=N), program="score = score * 0.25; keep = (kv_idx <= q_idx) & (kv_idx >= q_idx - 4)")
def sliding_window(q, k, v):
    i = torch.arange(q.size(-2))
    distance = i[:, None] - i[None, :]
    return (q @ k.mT * 0.25).masked_fill((distance < 0) | (distance > 4), -INF).softmax(-1) @ v


# *** in-place updates ***


@row(*qkv(), T((H, M, N)), program="score = score * 0.25 + c0[h, q_idx, kv_idx]")
def in_place_updates(q, k, v, bias):
    scores = q @ k.mT
    scores *= 0.25
    scores += bias
    return scores.softmax(-1) @ v


@row(*qkv(m=N, kind="plain"), program=PLAIN)
def query_changed_after(q, k, v):
    q = q * 1.0
    out = (q @ k.mT * 0.25).softmax(-1) @ v
    q.add_(1.0)
    return out + q


@row(*qkv(m=N, kind="plain"), program=PLAIN)
def query_changed_between_but_recomputable(q, k, v):
    q = q * 1.5
    scores = q @ k.mT * 0.25
    q.add_(1.0)
    return scores.softmax(-1) @ v + q


@row(*qkv(m=N, kind="plain"), program=PLAIN)
def query_changed_between(q, k, v):
    q = F.layer_norm(q, (D,))
    scores = q @ k.mT * 0.25
    q.add_(1.0)
    return scores.softmax(-1) @ v + q


# *** weights ***


@row(*qkv(), program="score = score * 0.25; drop = 0.25", random=True)
def dropout_functional(q, k, v):
    return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.25) @ v


@row(*qkv(), program=PLAIN)
def dropout_eval(q, k, v):
    return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.25, training=False) @ v


@row(*qkv(), program="score = score * 0.25; drop = 0.5", random=True)
class DropoutModule(nn.Module):
    row_name = "dropout_module"

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, q, k, v):
        return self.drop((q @ k.mT * 0.25).softmax(-1)) @ v


@left(*qkv(), reason="dropout", random=True)
def dropout_twice(q, k, v):
    return F.dropout(F.dropout((q @ k.mT * 0.25).softmax(-1), 0.25), 0.25) @ v


@row(*qkv(), T((H, 1, 1)), program="score = score * 0.25; weight = c0[h, 0, 0]")
def head_gate(q, k, v, gate):
    return ((q @ k.mT * 0.25).softmax(-1) * gate) @ v


@left(*qkv(), reason="weight-not-pointwise")
def weights_squared(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1).square() @ v


@left(*qkv(), reason="weights-used")
def weights_returned(q, k, v):
    weights = (q @ k.mT * 0.25).softmax(-1)
    return weights @ v, weights


@left(*qkv(), reason="weights-used")
def weights_in_a_loss(q, k, v):
    weights = (q @ k.mT * 0.25).softmax(-1)
    return weights @ v, (weights * (weights + 1e-9).log()).sum()


@left(*qkv(), reason="weights-used")
def scores_returned(q, k, v):
    scores = q @ k.mT * 0.25
    return scores.softmax(-1) @ v, scores


@row(*qkv(), T((B, H, N, 5)), program=(PLAIN, PLAIN), sites=2)
def two_values(q, k, v, other):
    weights = (q @ k.mT * 0.25).softmax(-1)
    return weights @ v, weights @ other


@left(*qkv(), reason="gradient-stopped")
def weights_detached(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1).detach() @ v


@row(*qkv(), program=PLAIN)
def query_detached(q, k, v):
    return (q.detach() @ k.mT * 0.25).softmax(-1) @ v


# *** heads and head dimensions ***


@row(*qkv(h=6, hk=2), program=PLAIN)
def grouped_expand_reshape(q, k, v):
    k, v = (t[:, :, None].expand(B, 2, 3, N, D).reshape(B, 6, N, D) for t in (k, v))
    return (q @ k.mT * 0.25).softmax(-1) @ v


@row(*qkv(h=6, hk=2), program=PLAIN)
def grouped_repeat_interleave(q, k, v):
    k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
    return (q @ k.mT * 0.25).softmax(-1) @ v


@row(*floats((B, H, M, D), (B, 1, N, D), (B, 1, N, D)), program=PLAIN)
def multi_query(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1) @ v


@row(*floats((B, M, H, D), (B, N, D), (B, N, D)), program=CAUSAL)
def multi_query_by_einsum(q, k, v):
    s = torch.einsum("bmhd,bnd->bhmn", q, k) * 0.25
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    return torch.einsum("bhmn,bnd->bmhd", s.masked_fill(~keep, -INF).softmax(-1), v)


@row(*floats((B, M, 2, 3, D), (B, N, 2, D), (B, N, 2, D)), program=PLAIN)
def grouped_query_by_einsum(q, k, v):
    s = torch.einsum("bmkgd,bnkd->bkgmn", q, k) * 0.25
    return torch.einsum("bkgmn,bnkd->bmkgd", s.softmax(-1), v)


@row(*floats((B, H, M, D), (B, H, N, D), (N, D)), program=PLAIN)
def values_shared_by_batch_and_heads(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1) @ v


@row(*floats((B, H, M, D), (B, H, N, D)), program=PLAIN)
def expected_position_as_a_product(q, k):
    return (q @ k.mT * 0.25).softmax(-1) @ torch.linspace(-1.0, 1.0, k.size(-2), dtype=k.dtype)


@row(*floats((B, M, D), (B, N, D), (B, N, D), (B, M, D)), program=PLAIN)
def residual_in_the_value_product(q, k, v, residual):
    return torch.baddbmm(residual, (q @ k.mT * 0.25).softmax(-1), v, beta=0.5)


@row(*qkv(dv=24), program=PLAIN)
def other_value_dim(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1) @ v


@row(*floats((B, 6, M, D), (B, 2, N, D), (B, 3, N, D), kind="plain"), program=PLAIN)
def heads_in_unequal_groups(q, k, v):
    k, v = k.repeat_interleave(3, dim=1), v.repeat(1, 2, 1, 1)
    return (q @ k.mT * 0.25).softmax(-1) @ v


def half_power(q, k, v):
    return (q @ k.mT * 0.125).softmax(-1) @ v


for _d in (1, 20, 80, 256):
    CASES.append(Case(f"head_dim_{_d}", lambda: half_power, qkv(d=_d), program=("score = score * 0.125",)))
CASES.append(Case("head_dim_600", lambda: half_power, qkv(d=600), verdict="leave", reason="head-dim"))
CASES.append(Case("head_dim_320", lambda: half_power, qkv(m=330, n=340, d=320), program=("score = score * 0.125",)))
CASES.append(Case("channels_that_attend_to_channels", lambda: half_power, qkv(d=320), verdict="leave", reason="cost"))
CASES.append(Case("float64", lambda: half_power, qkv(dtype=torch.float64), verdict="leave", reason="dtype"))


@row(*qkv(), program=PLAIN)
def softmax_in_float64(q, k, v):
    return F.softmax(q @ k.mT * 0.25, -1, dtype=torch.float64).to(q.dtype) @ v


@left(*qkv(), reason="dtype")
def scores_changed_in_float64(q, k, v):
    return (((q @ k.mT).double() + 1e12) * 0.25).softmax(-1).to(q.dtype) @ v


CASES.append(Case("single_query", lambda: half_power, qkv(m=1), program=("score = score * 0.125",)))
CASES.append(Case("single_key", lambda: half_power, qkv(n=1), verdict="leave", reason="one-key"))


@row(*floats((B, 6, M, D), (B, 6, N, D), (B, 3, N, 2 * D)), sites=2, program=(PLAIN, PLAIN + "; weight = 0.5"))
def differences_of_neighbouring_heads(q, k, v):
    weights = (q @ k.mT * 0.25).softmax(-1).unflatten(1, (3, 2))
    return (weights[:, :, 0] - 0.5 * weights[:, :, 1]) @ v


# *** softmax by hand ***


@row(*qkv(), program=PLAIN)
def exp_over_its_sum(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@row(*qkv(), program=PLAIN)
def inverse_of_a_total_that_drops_its_dimension(q, k, v):
    s = q @ k.mT * 0.25
    e = (s - s.max(-1).values[..., None]).exp()
    inverse = 1 / e.sum(-1)
    return (e @ v) * inverse.unsqueeze(-1)


@row(*qkv(), program="score = score * 0.25; sink = -6.907755278982137")
def epsilon_on_a_total_that_drops_its_dimension(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return e / (e.sum(-1) + 1e-3)[..., None] @ v


@left(*qkv(m=N), reason="exponentials")
def totals_over_queries_put_back_over_keys(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return e * (1 / e.sum(-2)).unsqueeze(-1) @ v


@row(*qkv(), program=PLAIN)
def epsilon_that_is_lost_beside_the_greatest_term(q, k, v):
    s = q @ k.mT * 0.25
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-16) @ v


@left(*qkv(), reason="exponentials")
def epsilon_that_counts_beside_the_greatest_term(q, k, v):
    s = q @ k.mT * 0.25
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-2) @ v


@row(*qkv(), program=PLAIN)
def logarithm_of_a_total_that_drops_its_dimension(q, k, v):
    s = q @ k.mT * 0.25
    greatest = s.amax(-1)
    total = greatest + (s - greatest[..., None]).exp().sum(-1).log()
    return (s - total[..., None]).exp() @ v


@row(*qkv(), program=PLAIN)
def exp_shifted_by_the_maximum(q, k, v):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


@row(*qkv(), T((B, 1, M, N), "keep"), program="score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]")
def exp_times_mask(q, k, v, keep):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.detach().amax(-1, keepdim=True)) * keep
    return (e / e.sum(-1).unsqueeze(-1)) @ v


@row(*qkv(), program="score = score * 0.25; sink = -13.815510557964274")
def exp_over_its_sum_and_epsilon(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@row(*qkv(), program=PLAIN)
def divided_after_the_value_product(q, k, v):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


@row(*qkv(), program=PLAIN)
def sum_clamped(q, k, v):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True).clamp_min(1e-9)) @ v


@row(*qkv(), program=PLAIN)
def maximum_of_the_sum_and_a_constant(q, k, v):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / torch.maximum(e.sum(-1, keepdim=True), torch.tensor(1e-6))) @ v


@row(*qkv(), program=PLAIN)
def an_epsilon_of_zero(q, k, v):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 0.0)) @ v


@row(*qkv(), program="score = score * 0.25; sink = -13.815510560489031")
def exp_over_its_sum_and_a_constant(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e / (e.sum(-1, keepdim=True) + torch.tensor(1e-6))) @ v


@row(*qkv(), program=PLAIN)
def divided_by_an_einsum(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e @ v) / torch.einsum("bhmn->bhm", e)[..., None]


@left(*qkv(), reason="exponentials")
def divided_by_a_product_with_ones(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e @ v) / (e @ v.new_ones(k.size(2), 1))


@left(*qkv(), reason="exponentials")
def divided_by_a_column_of_the_product(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    out = e @ F.pad(v, (0, 1), value=1.0)
    return out[..., :-1] / out[..., -1:]


@left(*qkv(), reason="exponentials")
def divided_by_their_mean(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e / e.mean(-1, keepdim=True) / k.size(2)) @ v


@left(*qkv(), reason="exponentials")
def shifted_by_the_maximum_and_epsilon(q, k, v):
    s = q @ k.mT * 0.25
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 1e-2)) @ v


@row(*qkv(), program=PLAIN)
def exp_of_log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT * 0.25, -1).exp() @ v


@row(*qkv(), program="score = -(score * 0.25)")
def softmin_of_distances(q, k, v):
    return F.softmin(q @ k.mT * 0.25, dim=-1) @ v


@row(*qkv(), program=PLAIN)
def exp_of_difference_with_logsumexp(q, k, v):
    s = q @ k.mT * 0.25
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@row(*qkv(), KEEP, program="score = where(c0[b, 0, 0, kv_idx], -10000.0, score)")
def exp_of_difference_with_logsumexp_of_filled_scores(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep, -1e4)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@left(*qkv(), KEEP, reason="exponentials")
def exp_of_difference_with_logsumexp_of_huge_fills(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep, -1e30)  # a row without keys has weights of 1: log(n) is lost beside -1e30
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@row(*qkv(), program=PLAIN)
def exp_of_difference_with_the_logarithm_of_the_sum(q, k, v):
    s = q @ k.mT * 0.25
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log()) @ v


@row(*qkv(), T((B, 1, M, N), "some"), program="score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]")
def exp_of_difference_with_a_stable_logarithm_of_the_sum(q, k, v, keep):
    s = (q @ k.mT * 0.25).masked_fill(~keep, -INF)
    m = s.amax(-1, keepdim=True)
    return torch.exp(s - (m + (s - m).exp().sum(-1, keepdim=True).log())) @ v


@row(*qkv(), KEEP, program="score = where(c0[b, 0, 0, kv_idx], -1.0000000150474662e+30, score)")
def shifted_scores_less_the_logarithm_of_their_sum(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep, -1e30)
    s = s - s.amax(-1, keepdim=True)
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log()) @ v


@left(*qkv(), KEEP, reason="exponentials")
def stable_logarithm_of_huge_fills(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep, -1e30)  # log(n) is lost beside -1e30
    m = s.amax(-1, keepdim=True)
    return torch.exp(s - (m + (s - m).exp().sum(-1, keepdim=True).log())) @ v


@left(*qkv(), KEEP, reason="score-not-pointwise")
def logarithm_of_the_sum_of_fills(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep, -1e4)  # a row of fills is exp(inf)
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log()) @ v


@row(*qkv(), program="score = score * 0.25; sink = 0.0")
def softmax_plus_one(q, k, v):
    s = q @ k.mT * 0.25
    shift = s.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - shift)
    return (e / (torch.exp(-shift) + e.sum(-1, keepdim=True))) @ v


@row(*qkv(), T((H,)), program="score = score * 0.25; sink = c0[h]")
def sink_as_a_column(q, k, v, sinks):
    s = q @ k.mT * 0.25
    s = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), -1)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ v


@left(*qkv(), T((H,)), reason="softmax-axis")
def sink_column_first(q, k, v, sinks):
    s = torch.cat([sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), -1), q @ k.mT * 0.25], dim=-1)
    return s.softmax(-1)[..., :-1] @ v


@row(*qkv(), program="score = score * 0.25 * 0.6931471805599453")
def powers_of_two_over_their_sum(q, k, v):
    s = q @ k.mT * 0.25
    return torch.exp2(s) / torch.exp2(s).sum(-1, keepdim=True) @ v


@row(*qkv(), program=PLAIN)
def times_the_sum_to_the_power_of_minus_one(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e * e.sum(-1, keepdim=True).pow(-1)) @ v


@row(*qkv(), program=PLAIN)
def normalised_after_a_shift(q, k, v):
    s = q @ k.mT * 0.25
    return F.normalize(torch.exp(s - s.amax(-1, keepdim=True)), p=1, dim=-1) @ v


@left(*qkv(), reason="exponentials")
def divided_by_an_epsilon_and_the_sum_after_the_product(q, k, v):
    s = q @ k.mT * 0.25
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e @ v) / (e.sum(-1, keepdim=True) + 1e-6)


@row(*qkv(), verdict="leave", sites=0)
def exponentials_over_one_more(q, k, v):
    e = (q @ k.mT * 0.25).exp()
    return (e / (1 + e)) @ v


@left(*qkv(), reason="exponentials")
def normalised_without_a_shift(q, k, v):
    return F.normalize(torch.exp(q @ k.mT * 0.25), p=1, dim=-1) @ v


@left(*qkv(), reason="weights-used")
def sink_made_from_the_scores(q, k, v):
    s = q @ k.mT * 0.25
    return (s - torch.logaddexp(s.logsumexp(-1, keepdim=True), s.mean(-1, keepdim=True))).exp() @ v


@row(*qkv(), T((H,)), program="score = score * 0.25; sink = c0[h]")
def sink_column_first_and_dropped(q, k, v, sinks):
    s = torch.cat([sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), -1), q @ k.mT * 0.25], dim=-1)
    return s.softmax(-1)[..., 1:] @ v


@row(*qkv(), program="score = score * 0.25; sink = 0.0")
def padded_by_a_column(q, k, v):
    return F.pad(q @ k.mT * 0.25, (0, 1)).softmax(-1)[..., :-1] @ v


@row(*qkv(), program="score = score * 0.25; sink = 1.5")
def padded_in_front(q, k, v):
    return F.pad(q @ k.mT * 0.25, (1, 0), value=1.5).softmax(-1).narrow(-1, 1, k.size(2)) @ v


@row(*qkv(), T((H,)), program="score = score * 0.25; sink = c0[h]")
def sink_column_split_off(q, k, v, sinks):
    sink = sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), -1)
    weights, _ = torch.cat([q @ k.mT * 0.25, sink], dim=-1).softmax(-1).split([k.size(2), 1], dim=-1)
    return weights @ v


@row(*qkv(), T((H,)), program="score = score * 0.25; sink = c0[h]")
def sink_added_to_the_logarithm(q, k, v, sinks):
    s = q @ k.mT * 0.25
    return (s - torch.logaddexp(s.logsumexp(-1, keepdim=True), sinks[:, None, None])).exp() @ v


@row(*qkv(), T((H,)), program="score = score * 0.25; sink = c0[h]")
def logarithm_of_scores_and_sink(q, k, v, sinks):
    s = q @ k.mT * 0.25
    both = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), -1)], dim=-1)
    return (s - both.logsumexp(-1, keepdim=True)).exp() @ v


@row(*qkv(), program="score = score * 0.25 / 32.0 * 32.0")
def shift_between_two_scales(q, k, v):
    s = q @ k.mT * 0.25 / 32.0
    return ((s - s.amax(-1, keepdim=True)) * 32.0).softmax(-1) @ v


@row(*qkv(), program=PLAIN)
def shifted_by_the_mean(q, k, v):
    s = q @ k.mT * 0.25
    return (s - s.mean(-1, keepdim=True)).softmax(-1) @ v


@left(*qkv(), KEEP, reason="score-not-pointwise")
def shifted_by_the_mean_of_filled_scores(q, k, v, keep):
    s = (q @ k.mT * 0.25).masked_fill(~keep, -1e9)
    return (s - s.mean(-1, keepdim=True)).softmax(-1) @ v


@row(*qkv(), T((B, 1, 1, N), "keep"), program="score = score * 0.25; keep = ~c0[b, 0, 0, kv_idx]; empty = 0.0")
def nan_to_num_of_weights(q, k, v, keep):
    return (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1).nan_to_num() @ v


@row(*qkv(), T((B, 1, 1, N), "keep"), program="score = score * 0.25; keep = ~c0[b, 0, 0, kv_idx]; empty = 0.0")
def isnan_of_weights_filled(q, k, v, keep):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return w.masked_fill(w.isnan(), 0.0) @ v


@row(*qkv(), T((B, 1, M, N), "some"), program="score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]; empty = 0.0")
def weights_unlike_themselves_filled(q, k, v, keep):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return w.masked_fill(w != w, 0.0) @ v


@row(*qkv(), T((B, 1, M, N), "some"), program="score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]; empty = 0.0")
def weights_kept_where_equal_to_themselves(q, k, v, keep):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return torch.where(w == w, w, 0.0) @ v


@row(*qkv(), T((B, 1, M, N), "some"), program="score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]; empty = 0.0")
def rows_with_any_nan_filled(q, k, v, keep):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return torch.where(w.isnan().any(-1, keepdim=True), 0.0, w) @ v


@row(
    *qkv(), T((B, 1, 1, N), "keep"),
    program="score = score * 0.25; keep = ~c0[b, 0, 0, kv_idx]; empty = 0.0",
)  # fmt: skip
def weights_zeroed_by_the_same_mask(q, k, v, keep):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return w.masked_fill(~keep, 0.0) @ v


@left(*qkv(), *(T((B, 1, 1, N), "keep"),) * 2, reason="weight-not-pointwise")
def weights_zeroed_by_another_mask(q, k, v, keep, other):
    w = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return w.masked_fill(~other, 0.0) @ v


@row(*qkv(), T((H, 1, 1)), program=(PLAIN, "score = score * 0.25; weight = c0[h, 0, 0]"), sites=2)
def difference_of_two(q, k, v, balance):
    first, second = (q @ k.mT * 0.25).softmax(-1), (q @ k.flip(2).mT * 0.25).softmax(-1)
    return (first - balance * second) @ v


@row(*qkv(), program=(PLAIN, "score = score * 0.5", "score = score * 0.75"), sites=3)
def sum_of_three(q, k, v):
    s = q @ k.mT * 0.25
    return (s.softmax(-1) + (2 * s).softmax(-1) + (3 * s).softmax(-1)) @ v


@row(
    *qkv(), T((H, 1, 1)), sites=4,
    program=(
        "weight = c0[h, 0, 0] * 0.5", "score = score * 2.0; weight = c0[h, 0, 0] * 0.5",
        "score = score * 3.0; weight = 1.0 / 3.0", "score = score * 4.0",
    ),
)  # fmt: skip
def difference_of_scaled_sums(q, k, v, balance):
    s = q @ k.mT
    inner = 0.5 * (s.softmax(-1) - (2 * s).softmax(-1))
    return (inner * balance - ((3 * s).softmax(-1) / 3 + (4 * s).softmax(-1))) @ v


@row(*qkv(), program=tuple(f"score = score * {s}; weight = 1.0 / 3.0" for s in (0.25, 0.5, 0.75)), sites=3)
def mean_of_three_by_the_sum_of_python(q, k, v):
    return (sum((q @ k.mT * scale).softmax(-1) for scale in (0.25, 0.5, 0.75)) / 3) @ v


# *** rows without a key ***

SOME_EMPTY = T((B, 1, M, N), "some")
EMPTY_ROWS = "score = score * 0.25; keep = c0[b, 0, q_idx, kv_idx]; empty = 0.0"


@row(*qkv(), SOME_EMPTY, program=EMPTY_ROWS)
def zero_where_all_scores_are_infinite(q, k, v, keep):
    s = (q @ k.mT * 0.25).masked_fill(~keep, -INF)
    return torch.where((s == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


@row(*qkv(), SOME_EMPTY, program=EMPTY_ROWS)
def zero_where_the_maximum_is_infinite(q, k, v, keep):
    s = (q @ k.mT * 0.25).masked_fill(~keep, -INF)
    return s.softmax(-1).masked_fill(s.amax(-1, keepdim=True) == -INF, 0.0) @ v


@row(*qkv(), SOME_EMPTY, program=EMPTY_ROWS)
def zero_where_no_key_is_kept(q, k, v, keep):
    weights = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return weights.masked_fill(~keep.any(-1, keepdim=True), 0.0) @ v


@row(*qkv(), SOME_EMPTY, program=EMPTY_ROWS)
def zero_where_all_keys_are_dropped(q, k, v, keep):
    weights = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return torch.where((~keep).all(-1)[..., None], 0.0, weights) @ v


@row(*qkv(), T((B, N), "some"), program="score = score * 0.25; keep = ~c0[b, 0, 0, kv_idx]; empty = 0.0")
def zero_where_keys_count_to_nothing(q, k, v, keep):
    weights = (q @ k.mT * 0.25).masked_fill(~keep[:, None, None], -INF).softmax(-1)
    return weights.masked_fill(keep.sum(-1)[:, None, None, None] == 0, 0.0) @ v


@left(*qkv(m=N), T((B, 1, N, N), "some"), reason="weight-not-pointwise")
def zero_where_no_key_is_kept_but_for_causality(q, k, v, keep):
    both = keep & torch.ones(N, N, dtype=torch.bool).tril()
    weights = (q @ k.mT * 0.25).masked_fill(~both, -INF).softmax(-1)
    return weights.masked_fill(~keep.any(-1, keepdim=True), 0.0) @ v


@left(*qkv(m=N), T((B, 1, N, N), "some"), reason="weight-not-pointwise")
def zero_where_no_query_reads_the_key(q, k, v, keep):
    weights = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return weights.masked_fill(~keep.any(-2)[..., None], 0.0) @ v


@left(*qkv(m=N), T((N, N), "some"), reason="weight-not-pointwise")
def zero_where_the_row_of_the_key_is_empty(q, k, v, keep):
    weights = (q @ k.mT * 0.25).masked_fill(~keep.diagonal(), -INF).softmax(-1)
    return weights.masked_fill(~keep.any(-1), 0.0) @ v


# *** writes into scores and masks ***


@row(*qkv(), T((B, 1, 1, N), "keep"), program="score = score * 0.25; keep = c0[b, 0, 0, kv_idx]")
def scores_written_where_masked(q, k, v, keep):
    s = q @ k.mT * 0.25
    s[~keep.expand_as(s)] = -INF
    return s.softmax(-1) @ v


@row(*qkv(), program="score = score * 0.25; keep = kv_idx != 2")
def mask_written_at_one_key(q, k, v):
    mask = torch.zeros(k.size(2))
    mask[2] = -INF
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


@row(
    *qkv(), T((B, H, M - 1, N - 1)),
    program="t0 = q_idx >= 1; t1 = kv_idx >= 1; t2 = score * 0.25; score = where(t0, where(t1, t2 + c0["
    "where(t0, where(t1, b, 0), 0), where(t0, where(t1, h, 0), 0), where(t0, where(t1, q_idx - 1, 0), 0), "
    "where(t0, where(t1, kv_idx - 1, 0), 0)], t2), t2)",
)  # fmt: skip
def bias_written_beside_the_class_token(q, k, v, bias):
    s = q @ k.mT * 0.25
    s[:, :, 1:, 1:] = s[:, :, 1:, 1:] + bias
    return s.softmax(-1) @ v


@row(*qkv(kind="plain"), program=PLAIN)
def results_given_as_out(q, k, v):
    with torch.no_grad():
        s = torch.empty(*q.shape[:3], k.size(2), dtype=q.dtype)
        torch.matmul(q, k.mT, out=s)
        s.mul_(0.25)
        torch.softmax(s, -1, out=s)
        return torch.matmul(s, v)


@row(*qkv(kind="plain"), program=PLAIN)
def value_product_given_as_out(q, k, v):
    with torch.no_grad():
        out = torch.empty(*q.shape[:3], v.size(3), dtype=q.dtype)
        torch.matmul((q @ k.mT * 0.25).softmax(-1), v, out=out)
        return out


@row(*qkv(m=N), program="score = where(kv_idx == q_idx, -10000.0, score * 0.25)")
def diagonal_filled(q, k, v):
    s = q @ k.mT * 0.25
    s.diagonal(dim1=-2, dim2=-1).fill_(-1e4)
    return s.softmax(-1) @ v


@left(*qkv(m=N), reason="weights-used")
def diagonal_read_before_it_is_filled(q, k, v):
    s = q @ k.mT * 0.25
    held = s.diagonal(dim1=-2, dim2=-1).clone()
    s.diagonal(dim1=-2, dim2=-1).fill_(-1e4)
    return s.softmax(-1) @ v + held[..., None]


@row(*qkv(), program="score = where(kv_idx == 0, 0.0, score * 0.25)")
def number_written_into_the_first_column(q, k, v):
    s = q @ k.mT * 0.25
    s[..., 0] = 0
    return s.softmax(-1) @ v


@row(*qkv(), program="keep = ~c0[kv_idx]")
def keys_filled_by_index(q, k, v):
    return (q @ k.mT).index_fill(-1, torch.tensor([0, 3]), -INF).softmax(-1) @ v


@row(*qkv(), program="score = where(c0[q_idx], 0.5, score)")
def queries_filled_by_index_with_a_tensor(q, k, v):
    return (q @ k.mT).index_fill(2, torch.tensor([1]), torch.tensor(0.5)).softmax(-1) @ v


@row(*qkv(), program="score = score * 0.25; keep = (q_idx < 4) | (kv_idx < 4)")
def block_written_with_minus_infinity(q, k, v):
    s = q @ k.mT * 0.25
    s[:, :, 4:, 4:] = -INF
    return s.softmax(-1) @ v


@row(
    *qkv(),
    program="score = where(kv_idx == 12, -10000.0, score * 0.25)",
    dynamic="score = where(kv_idx == kv_len - 1, -10000.0, score * 0.25)",
)
def last_column_filled(q, k, v):
    s = q @ k.mT * 0.25
    s[..., -1] = -1e4
    return s.softmax(-1) @ v


@row(*qkv(m=N), program="score = where(kv_idx < q_idx, score * 0.25, -1000000000.0); weight = where(q_idx < 1, 0.0, 1.0)")
def first_query_without_weights(q, k, v):
    earlier = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(-1)
    w = torch.where(earlier, q @ k.mT * 0.25, -1e9).softmax(-1)
    return torch.cat([torch.zeros_like(w[:, :, :1]), w[:, :, 1:]], 2) @ v


@row(*qkv(), program=f"{CAUSAL}; weight = where(q_idx == 0, 0.0, 1.0); empty = 0.0")
def first_query_zeroed_under_a_causal_mask(q, k, v):
    future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
    w = (q @ k.mT * 0.25).masked_fill(future, -INF).softmax(-1).clone()
    w[:, :, 0] = 0
    return w @ v


@row(
    *qkv(),
    program="score = where(kv_idx < 12, score * 0.25, -1000000000.0)",
    dynamic="score = where(kv_idx < kv_len - 1, score * 0.25, -1000000000.0)",
)
def last_column_padded(q, k, v):
    return F.pad((q @ k.mT * 0.25)[..., :-1], (0, 1), value=-1e9).softmax(-1) @ v


# *** functions that hold a whole attention ***


@row(*floats((B, M, H, D), (B, N, H, D), (B, N, H, D), (H, D, 8)), program=PLAIN)
def einsum_with_the_output_projection(q, k, v, out):
    w = (torch.einsum("bmhd,bnhd->bhmn", q, k) * 0.25).softmax(-1)
    return torch.einsum("bhmn,bnhd,hde->bme", w, v, out)


@row(*floats((B, M, 2 * D)), program="")
class MultiheadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(2 * D, 2, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x)[0]


@row(
    *floats((B, M, H, D), (B, N, H, D), (B, N, H, D), (M, N, D)),
    program="score = (score + c0[b, h, q_idx, kv_idx]) * 0.25",
)
def relative_key_vectors(q, k, v, relative):
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) + torch.einsum("bmhd,mnd->bhmn", q, relative)
    return torch.einsum("bhmn,bnhd->bmhd", (s * 0.25).softmax(-1), v)


@row(*qkv(m=N), program=(PLAIN,) * 2, sites=2)
def one_score_matrix_read_both_ways(q, k, v):
    s = q @ k.mT * 0.25
    return s.softmax(-1) @ v + s.mT.softmax(-1) @ q


# *** reported though no attention ***


@left(*qkv(), reason="score-not-pointwise")
class HeadsMixedByALinearLayer(nn.Module):
    row_name = "heads_mixed_by_a_linear_layer"

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(H, H)

    def forward(self, q, k, v):
        scores = q @ k.mT * 0.25
        return self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v


@left(*qkv(), reason="weight-not-pointwise")
class WeightsMixedByAConvolution(nn.Module):
    row_name = "weights_mixed_by_a_convolution"

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(H, H, 1)

    def forward(self, q, k, v):
        return self.mix((q @ k.mT * 0.25).softmax(-1)) @ v


@left(*qkv(), T((H, H)), reason="heads-mixed")
def weights_mixed_by_an_einsum(q, k, v, mix):
    return torch.einsum("bhmn,hg->bgmn", (q @ k.mT * 0.25).softmax(-1), mix) @ v


@left(*qkv(), reason="score-not-pointwise")
def scores_normalised_by_a_layer(q, k, v):
    return F.layer_norm(q @ k.mT * 0.25, (k.size(2),)).softmax(-1) @ v


class OwnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


@left(*qkv(), reason="hidden")
def softmax_with_a_backward_of_its_own(q, k, v):
    return OwnSoftmax.apply(q @ k.mT * 0.25) @ v


@left(*qkv(), reason="score-not-pointwise")
def top_k_scattered(q, k, v):
    scores = q @ k.mT * 0.25
    best = scores.topk(5, -1)
    return torch.full_like(scores, -INF).scatter(-1, best.indices, best.values).softmax(-1) @ v


@left(*qkv(), reason="weight-not-pointwise")
def top_k_of_the_weights(q, k, v):
    weights = (q @ k.mT * 0.25).softmax(-1)
    best = weights.topk(5, -1)
    return torch.zeros_like(weights).scatter(-1, best.indices, best.values) @ v


@left(*qkv(), reason="hidden", random=True)
def gumbel_softmax(q, k, v):
    return F.gumbel_softmax(q @ k.mT * 0.25, dim=-1) @ v


@left(*qkv(), reason="score-not-pointwise", random=True)
def dropout_of_scores(q, k, v):
    return F.dropout(q @ k.mT * 0.25, 0.25).softmax(-1) @ v


@left(*qkv(), reason="hidden", random=True)
def dropout_of_whole_heads(q, k, v):
    return F.dropout2d((q @ k.mT * 0.25).softmax(-1), 0.25) @ v


@left(*qkv(), reason="weight-not-pointwise")
def weights_renormalised(q, k, v):
    weights = (q @ k.mT * 0.25).softmax(-1) * (torch.arange(k.size(2)) < 9)
    return (weights / weights.sum(-1, keepdim=True)) @ v


@left(*qkv(), reason="score-not-pointwise")
def two_score_products_joined(q, k, v):
    scores = torch.cat([q @ k.mT, q @ k.flip(1).mT], -1) * 0.25
    return scores.softmax(-1) @ torch.cat([v, v.flip(1)], 2)


@left(*qkv(), reason="softmax-axis", sites=2)
def two_score_products_joined_and_parted(q, k, v):
    weights = (torch.cat([q @ k.mT, q @ k.flip(1).mT], -1) * 0.25).softmax(-1)
    return weights[..., : k.size(2)] @ v + weights[..., k.size(2) :] @ v.flip(1)


@left(*qkv(), reason="weight-not-pointwise")
def logarithms_of_weights(q, k, v):
    return F.log_softmax(q @ k.mT * 0.25, -1) @ v


@row(*qkv(), verdict="leave", sites=0)
def sparsemax(q, k, v):
    scores = q @ k.mT * 0.25
    ordered = scores.sort(-1, descending=True).values
    total, rank = ordered.cumsum(-1), torch.arange(1, k.size(2) + 1)
    support = (1 + rank * ordered > total).sum(-1, keepdim=True)
    return (scores - (total.gather(-1, support - 1) - 1) / support).clamp(min=0) @ v


@left(*qkv(), reason="weight-not-pointwise")
def weights_accumulated_over_keys(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1).cumsum(-1) @ v


@left(*qkv(), T((M, N)), reason="weight-not-pointwise")
def weights_mixed_with_others_and_normalised_again(q, k, v, positions):
    w = 0.7 * (q @ k.mT * 0.25).softmax(-1) + 0.3 * positions.softmax(-1)
    return w / w.sum(-1, keepdim=True) @ v


@left(*qkv(), reason="weight-not-pointwise")
def weights_padded_to_a_band(q, k, v):
    w = F.pad((q @ k.mT * 0.25).softmax(-1), (0, M)).flatten(-2)[..., :-M].view(B, H, M, M + N - 1)
    return w @ F.pad(v, (0, 0, 0, M - 1))


@left(*qkv(), reason="score-not-pointwise")
def scores_of_a_layer_norm(q, k, v):
    s = q @ k.mT
    s = (s - s.mean(-1, keepdim=True)) / (s.var(-1, keepdim=True) + 1e-5).sqrt()
    return s.softmax(-1) @ v


# *** regions ***


@left(*qkv(), reason="transformed")
def beside_vmap(q, k, v):
    return (torch.vmap(lambda x: x * 0.25)(q) @ k.mT).softmax(-1) @ v



@row(*floats((B, 6, M, D), (B, 2, N, D), (B, 2, N, D)), program=PLAIN, lossy=torch.bfloat16)
def grouped_keys_rounded_by_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        v = v @ torch.eye(D, dtype=v.dtype)
        return (q @ (k * 1.5).repeat_interleave(3, 1).mT * 0.25).softmax(-1) @ v.repeat_interleave(3, 1)


@row(*qkv(), program=PLAIN)
def under_checkpoint(q, k, v):
    return checkpoint(matmul_operator, q, k, v, use_reentrant=False)


@row(*qkv(), program=PLAIN, lossy=torch.bfloat16)
def under_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return matmul_operator(q, k, v)


@row(*qkv(m=N), program=PLAIN)
def under_no_grad(q, k, v):
    with torch.no_grad():
        seen = matmul_operator(q, k, v)
    return v * seen + q


@row(*qkv(m=N), program=(PLAIN,) * 3, sites=3)
def chain_of_three(q, k, v):
    for _ in range(3):
        q = matmul_operator(q, k, v)
    return q


BY_NAME = {c.name: c for c in CASES}
assert len(BY_NAME) == len(CASES), "two rows share a name"
