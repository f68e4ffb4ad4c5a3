"""Random attentions for hypothesis: one spelling for each stage, put together into a function of tensors.

A `Plan` is drawn; `Plan.build()` gives the function and its float64 arguments. Plans with a `twist` change what the
function means (another softmax axis, renormalised weights, ...): whatever is then rewritten must still be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

Stage = Callable[..., Tensor]

# *** layouts: from what the function is given to [B, H, L, D], and the two products ***

LAYOUTS: dict[str, tuple[str, str, str]] = {  # letters of the arguments, einsum of the scores, of the values
    "bhmd": ("bhld", "bhmd,bhnd->bhmn", "bhmn,bhnd->bhmd"),
    "bmhd": ("blhd", "bmhd,bnhd->bhmn", "bhmn,bnhd->bmhd"),
    "mbhd": ("lbhd", "mbhd,nbhd->bhmn", "bhmn,nbhd->mbhd"),
    "bhdm": ("bhdl", "bhdm,bhdn->bhmn", "bhmn,bhdn->bhmd"),
}
PRODUCTS = ("einsum", "matmul", "bmm", "transposed", "summed", "rows")


def score_product(plan: Plan, q: Tensor, k: Tensor) -> Tensor:
    letters, equation, _ = LAYOUTS[plan.layout]
    if plan.product == "einsum":
        return torch.einsum(equation, q, k)
    q, k = (t.permute([letters.index(c) for c in "bhld"]) for t in (q, k))
    if plan.product == "matmul":
        return torch.matmul(q, k.transpose(-1, -2))
    if plan.product == "transposed":
        return (k @ q.mT).mT
    if plan.product == "summed":
        return (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1)
    if plan.product == "rows":  # every query is a batch
        return (q.unsqueeze(3) @ k.unsqueeze(2).mT).squeeze(3)
    folded = (t.reshape(-1, *t.shape[2:]) for t in (q, k))
    return torch.bmm(next(folded), next(folded).transpose(1, 2)).view(q.size(0), q.size(1), q.size(2), k.size(2))


def value_product(plan: Plan, w: Tensor, v: Tensor) -> Tensor:
    letters, _, equation = LAYOUTS[plan.layout]
    if plan.product == "einsum":
        return torch.einsum(equation, w, v)
    v = v.permute([letters.index(c) for c in "bhld"])
    if plan.product == "matmul":
        return torch.matmul(w, v).transpose(1, 2).reshape(w.size(0), w.size(2), -1)
    if plan.product == "transposed":
        return v.mT @ w.mT
    if plan.product == "summed":
        return (w.unsqueeze(-1) * v.unsqueeze(2)).sum(3)
    if plan.product == "rows":
        return (w.unsqueeze(3) @ v.unsqueeze(2)).squeeze(3)
    out = torch.bmm(w.reshape(-1, *w.shape[2:]), v.reshape(-1, *v.shape[2:]))
    return out.view(*w.shape[:3], -1)


# *** scores ***


def causal(s: Tensor, _: Tensor, fill: float) -> Tensor:
    keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    return torch.where(keep, s, fill)


def window(s: Tensor, _: Tensor, fill: float) -> Tensor:
    i, j = torch.arange(s.size(-2))[:, None], torch.arange(s.size(-1))
    return s.masked_fill((i - j).abs() > 3, fill)


def additive_triangle(s: Tensor, _: Tensor, fill: float) -> Tensor:
    return s + torch.full(s.shape[-2:], fill, dtype=s.dtype).triu(1)


def written(s: Tensor, mask: Tensor, fill: float) -> Tensor:
    s = s.clone()
    s[~(mask > -0.5).expand_as(s)] = fill
    return s


SCORES: dict[str, tuple[str, Callable[[Tensor, Tensor, float], Tensor]]] = {  # shape of the extra tensor, stage
    "scale": ("", lambda s, _, f: s * 0.3),
    "divide": ("", lambda s, _, f: s / math.sqrt(7)),
    "negative": ("", lambda s, _, f: s * -0.2),
    "temperature": ("h11", lambda s, c, f: s * c.exp() / 3),
    "softcap": ("", lambda s, _, f: torch.tanh(s / 2.0) * 2.0),
    "clamp": ("", lambda s, _, f: s.clamp(-1.5, 1.5)),
    "logsigmoid": ("", lambda s, _, f: F.logsigmoid(s)),
    "without_nan": ("", lambda s, _, f: s.nan_to_num(neginf=-2.0)),
    "bias": ("hmn", lambda s, c, f: s + c),
    "bias_b1mn": ("b1mn", lambda s, c, f: s + c),
    "key_bias": ("b11n", lambda s, c, f: s - c),
    "row_bias": ("bhm1", lambda s, c, f: s + c),
    "slopes": ("h11", lambda s, c, f: s + c * (torch.arange(s.size(-1)) - torch.arange(s.size(-2))[:, None])),
    "causal": ("", causal),
    "window": ("", window),
    "triangle": ("", additive_triangle),
    "padding": ("b11n", lambda s, c, f: s.masked_fill(c < -0.5, f)),
    "extended": ("b11n", lambda s, c, f: s + (1.0 - (c > -0.5).to(s.dtype)) * f),
    "written": ("b11n", written),
    "first_key": ("", lambda s, _, f: s.index_fill(-1, torch.tensor([0]), f)),
    "float": ("", lambda s, _, f: s.float().to(s.dtype) if s.dtype is not torch.float64 else s),
}

# *** softmax ***


def by_hand(s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def put_back(s: Tensor) -> Tensor:
    e = torch.exp(s - s.max(-1).values.unsqueeze(-1))
    inverse = 1 / e.sum(-1)
    return e * inverse[..., None]


def log_put_back(s: Tensor) -> Tensor:
    greatest = s.amax(-1)
    total = greatest + (s - greatest[..., None]).exp().sum(-1).log()
    return (s - total[..., None]).exp()


def lost_epsilon(s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / (e.sum(-1, keepdim=True) + 1e-16)


def plus_one(s: Tensor) -> Tensor:
    e = s.exp()
    return e / (1 + e.sum(-1, keepdim=True))


def with_sink(s: Tensor) -> Tensor:
    return torch.cat([s, torch.full_like(s[..., :1], 0.5)], -1).softmax(-1)[..., :-1]


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda s: s.softmax(-1),
    "functional": lambda s: F.softmax(s, dim=3),
    "module": lambda s: torch.nn.Softmax(dim=-1)(s),
    "hand": by_hand,
    "put_back": put_back,
    "log_put_back": log_put_back,
    "lost_epsilon": lost_epsilon,
    "unshifted": lambda s: s.exp() / s.exp().sum(-1, True),
    "log": lambda s: F.log_softmax(s, -1).exp(),
    "logsumexp": lambda s: torch.exp(s - torch.logsumexp(s, -1, keepdim=True)),
    "plus_one": plus_one,
    "sink": with_sink,
    "shifted": lambda s: ((s / 4 - (s / 4).amax(-1, keepdim=True)) * 4).softmax(-1),
    "guarded": lambda s: torch.nan_to_num(s.softmax(-1)),
    "folded": lambda s: s.flatten(0, 1).softmax(-1).view_as(s),
}

# *** weights ***

WEIGHTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "factor": ("h11", lambda w, c: w * c),
    "gate": ("bhm1", lambda w, c: w * torch.sigmoid(c)),
    "key_mask": ("b11n", lambda w, c: w * (c > -0.5).to(w.dtype)),
    "no_dropout": ("", lambda w, _: F.dropout(w, 0.0, True)),
    "zeroed": ("b11n", lambda w, c: w.masked_fill(c < -0.5, 0.0)),
}

# *** changes of meaning ***

TWISTS: dict[str, Callable[[Tensor], Tensor]] = {
    "other_axis": lambda s: s.softmax(-2),
    "heads_axis": lambda s: s.softmax(1),
    "renormalised": lambda s: (lambda w: w / w.sum(-2, keepdim=True))(s.softmax(-1)),
    "double": lambda s: s.softmax(-1).softmax(-1),
    "rolled_heads": lambda s: s.roll(1, 1).softmax(-1),
    "summed_over_keys": lambda s: s.softmax(-1).cumsum(-1),
    "top": lambda s: s.masked_fill(s < s.topk(2, -1).values[..., -1:], -math.inf).softmax(-1),
    "row_mean": lambda s: (s - s.mean(-2, keepdim=True)).softmax(-1),
    "epsilon": lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 0.1))((s - s.amax(-1, keepdim=True)).exp()),
    "hand_of_other_axis": lambda s: s.exp() * (1 / s.exp().sum(-2)).unsqueeze(-2),
    "squared": lambda s: s.softmax(-1).square(),
    "flipped": lambda s: s.softmax(-1).flip(-1),
    "sink_first": lambda s: torch.cat([s[..., :1] * 0, s], -1).softmax(-1)[..., :-1],
    "max_of_other_row": lambda s: (lambda e: e / e.sum(-1, keepdim=True).roll(1, -2))(s.exp()),
}


@dataclass(frozen=True)
class Plan:
    """One attention: a spelling for each stage."""

    layout: str = "bhmd"
    product: str = "matmul"
    scores: tuple[str, ...] = ("scale",)
    fill: float = -math.inf
    softmax: str = "method"
    weights: tuple[str, ...] = ()
    twist: str | None = None
    dynamic: bool = False
    seed: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: {"b": 2, "h": 3, "m": 7, "n": 7, "d": 8})

    def extras(self) -> list[str]:
        """Shapes, as letters, of the tensors that scores and weights take."""
        return [s for s in (*(SCORES[n][0] for n in self.scores), *(WEIGHTS[n][0] for n in self.weights)) if s]

    def build(self) -> tuple[Callable[..., Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(letters: str, length: str = "m") -> Tensor:
            sizes = {**self.sizes, "1": 1, "l": self.sizes[length]}
            return torch.randn([sizes[c] for c in letters], generator=generator, dtype=torch.float64)

        letters = LAYOUTS[self.layout][0]
        return self.run, [draw(letters, "m"), draw(letters, "n"), draw(letters, "n"), *map(draw, self.extras())]

    def run(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> Tensor:
        given = iter(extras)
        s = score_product(self, q, k)
        for name in self.scores:
            shape, stage = SCORES[name]
            s = stage(s, next(given) if shape else s, self.fill)
        w = SOFTMAXES[self.softmax](s) if self.twist is None else TWISTS[self.twist](s)
        for name in self.weights:
            shape, change = WEIGHTS[name]
            w = change(w, next(given) if shape else w)
        return value_product(self, w, v)


def _some(names: Sequence[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(list(names)), max_size=most).map(tuple)


def plans(*, twisted: bool) -> st.SearchStrategy[Plan]:
    """Plans that mean attention, or with `twisted` something that only resembles it."""
    sizes = st.fixed_dictionaries({
        "b": st.integers(1, 3), "h": st.sampled_from([1, 2, 4]), "m": st.sampled_from([1, 2, 7, 9]),
        "n": st.sampled_from([2, 7, 9]), "d": st.sampled_from([2, 8, 9]),
    })  # fmt: skip
    return st.builds(
        Plan, layout=st.sampled_from(list(LAYOUTS)), product=st.sampled_from(PRODUCTS), scores=_some(list(SCORES), 4),
        fill=st.sampled_from([-math.inf, -1e30, -1e4]), softmax=st.sampled_from(list(SOFTMAXES)),
        weights=_some(list(WEIGHTS), 2), twist=st.sampled_from(list(TWISTS)) if twisted else st.none(),
        dynamic=st.booleans(), seed=st.integers(0, 3), sizes=sizes,
    )  # fmt: skip
