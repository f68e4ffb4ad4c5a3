"""The programs of `tests/field.py`: what the matcher must see, and the numbers it must keep. Reports 1 to 13."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from field import QKV, B, D, H, L, report, sm
from zoo import T, floats

INF = math.inf
CUBE = floats(*((4, 4, 4, 4),) * 3)


def of_lengths(m, n, batch=1, heads=2, d=D, dtype=torch.float32):
    return floats((batch, heads, m, d), (batch, heads, n, d), (batch, heads, n, d), dtype=dtype)


# *** 1: the axis of the softmax ***

for _dim in (0, 1, 2, -2, 3, -1):
    _reason = () if _dim in (3, -1) else ("softmax-axis",)

    @report(1, *CUBE, name=f"cube_{_dim}", left=_reason)
    def _cube(q, k, v, dim=_dim):
        return ((q @ k.mT) / 8).softmax(dim) @ v


@report(1, *floats((4, 4, 2, 8), (4, 4, 3, 8), (4, 4, 3, 8)), left=["softmax-axis"])
def over_the_batch_with_dropout(q, k, v):
    return F.dropout(((q @ k.mT) / 128).softmax(0), 0.23, training=False) @ v


# *** 2: keys through permutations that are no transposition ***


@report(2, *floats((2, 4, 32), (32, 32)), name="keys_made_transposed_4")
@report(2, *floats((2, 6, 32), (32, 32)), name="keys_made_transposed_6")
def keys_made_transposed(x, w):
    heads = (2, x.size(1), 4, 8)
    q, k = x.view(heads).permute(0, 2, 1, 3), (x @ w).view(heads).permute(0, 2, 3, 1)
    return sm(q @ k) @ q


@report(2, *floats(*((4, 4, 4),) * 3))
def three_axes_turned(q, k, v):
    return sm(q @ k.permute(1, 2, 0)) @ v


@report(2, *CUBE)
def four_axes_turned(q, k, v):
    return sm(q @ k.permute(2, 1, 0, 3)) @ v


# *** 3: the user's scale ***

for _scale in (1.0, 3.7, -0.5, 0.0, 1 / 3 / math.sqrt(D)):

    @report(3, name=f"multiplied_{_scale:.2f}")
    def _multiplied(q, k, v, scale=_scale):
        return sm((q @ k.mT) * scale) @ v

    @report(3, name=f"on_the_query_{_scale:.2f}")
    def _on_the_query(q, k, v, scale=_scale):
        return sm((q * scale) @ k.mT) @ v


@report(3)
def no_scale(q, k, v):
    return sm(q @ k.mT) @ v


@report(3)
def root_of_the_scale_on_both(q, k, v):
    root = math.sqrt(1 / math.sqrt(q.size(-1)))
    return sm((q * root) @ (k * root).mT) @ v


@report(3, settings={"dynamic": True})
def head_dim_at_run_time(q, k, v):
    return sm(q @ k.mT / math.sqrt(q.size(-1))) @ v


@report(3, T((1, 16, 64, 64)))
def divided_by_an_inverse(x):
    q = x.permute(0, 2, 1, 3) * 0.05  # scores near 100 would leave nothing of the gradient but rounding
    return sm((q @ q.mT).div(1 / math.sqrt(8)) + torch.zeros(1, 1, 16, 16)) @ q


# *** 4: rows filled with a finite number ***


def first_rows(m, n):
    return (torch.arange(m) < 3)[:, None].expand(m, n)


FILLS = {"1e4": -1e4, "1e9": -1e9, "min": None}
for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    for _name, _number in FILLS.items():
        _fill = torch.finfo(_dtype).min if _number is None else _number
        _label = f"{_name}_{str(_dtype)[6:]}"
        if abs(_fill) <= torch.finfo(_dtype).max:
            for _m, _n in ((8, 8), (130, 130), (8, 130)):

                @report(4, *of_lengths(_m, _n, dtype=_dtype), name=f"filled_{_label}_{_m}_{_n}")
                def _filled(q, k, v, fill=_fill):
                    return sm((q @ k.mT * 0.25).masked_fill(first_rows(q.size(2), k.size(2)), fill)) @ v

            # half precision: the truth is float64, where an added -1e4 keeps the raw scores; the kernel keeps them too
            @report(4, *of_lengths(8, 130, dtype=_dtype), name=f"added_{_label}")
            def _added(q, k, v, fill=_fill):
                mask = torch.zeros(q.size(2), k.size(2), dtype=q.dtype)
                return sm(q @ k.mT * 0.25 + mask.masked_fill(first_rows(q.size(2), k.size(2)), fill)) @ v


@report(4, *of_lengths(9, 9, batch=2))
def left_padding_and_causal(q, k, v):
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    keep = torch.ones(9, 9, dtype=torch.bool).tril() & real[:, None, None]
    return sm((q @ k.mT * 0.25).masked_fill(~keep, torch.finfo(q.dtype).min)) @ v


# *** 5: rows without a key ***


@report(5, *of_lengths(257, 257, d=8))
def first_keys_hidden(q, k, v):
    late = (torch.arange(257)[:, None] % 2 == 1) & (torch.arange(257) < 128)
    return sm((q @ k.mT * 0.25).masked_fill(late, -INF)) @ v


@report(5, *of_lengths(130, 130, batch=2), empty_rows=True)
def left_padding_and_causal_where(q, k, v):
    real = torch.arange(130) >= torch.tensor([[0], [3]])
    keep = torch.ones(130, 130, dtype=torch.bool).tril() & real[:, None, None]
    weights = sm(torch.where(keep, q @ k.mT * 0.25, -INF))
    return torch.where(weights.isnan(), 0.0, weights) @ v


# *** 6: the diagonal ***

SIZES = (
    (2, 5, 0), (2, 5, 3), (5, 2, 0), (5, 2, -3), (1, 16, 0), (1, 16, 15), (130, 257, 0), (130, 257, 127),
    (257, 130, -127), (9, 9, 1), (9, 9, -1),
)  # fmt: skip
for _m, _n, _d in SIZES:

    @report(6, *of_lengths(_m, _n), name=f"tril_{_m}_{_n}_{_d}")
    def _tril(q, k, v, d=_d):
        keep = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(d)
        return sm((q @ k.mT * 0.25).masked_fill(~keep, -1e9)) @ v

    # rows without a key are NaN in eager, whose gradients of keys and values are then NaN throughout
    @report(6, *of_lengths(_m, _n), name=f"triu_{_m}_{_n}_{_d}", empty_rows=_d < 0)
    def _triu(q, k, v, d=_d):
        return sm(q @ k.mT * 0.25 + torch.full((q.size(2), k.size(2)), -INF).triu(d + 1)) @ v

    @report(6, *of_lengths(_m, _n), name=f"triu_guarded_{_m}_{_n}_{_d}", empty_rows=_d < 0)
    def _triu_guarded(q, k, v, d=_d):
        return sm(q @ k.mT * 0.25 + torch.full((q.size(2), k.size(2)), -INF).triu(d + 1)).nan_to_num() @ v

    @report(6, *of_lengths(_m, _n), name=f"arange_{_m}_{_n}_{_d}")
    def _arange(q, k, v, d=_d):
        keep = torch.arange(k.size(2)) <= torch.arange(q.size(2))[:, None] + d
        return sm(torch.where(keep, q @ k.mT * 0.25, torch.finfo(q.dtype).min)) @ v


@report(6, *of_lengths(2, 5), lambda: torch.ones(1, 1, 32, 32, dtype=torch.bool).tril())
def slice_of_a_buffer(q, k, v, buffer):
    n, s = q.size(2), k.size(2)
    return sm(torch.where(buffer[:, :, s - n : s, :s], q @ k.mT * 0.25, torch.finfo(q.dtype).min)) @ v


# *** 7: gradients of broadcast biases ***

for _dtype in (torch.float32, torch.bfloat16):
    for _shape in ((40, 40), (1, 4, 40, 40), (3, 1, 1, 40), (1, 1, 40, 1), (4, 1, 1), (40,), ()):
        _args = floats(*((3, 4, 40, 32),) * 3, _shape, dtype=_dtype)

        @report(7, *_args, name=f"bias_{'x'.join(map(str, _shape)) or 'scalar'}_{str(_dtype)[6:]}")
        def _bias(q, k, v, bias):
            return sm(torch.tanh(q @ k.mT / 6 + bias)) @ v  # a tanh, or a bias of rows would have no gradient


@report(7, *floats((64, 4, 40, 32), (64, 4, 40, 32), (64, 4, 40, 32), (1, 4, 40, 40), dtype=torch.bfloat16))
def bias_over_a_large_batch(q, k, v, bias):
    return sm(q @ k.mT / 6 + bias) @ v


@report(7, *floats((3, 4, 40, 32), (3, 4, 40, 32), (3, 4, 40, 32), (32, 4)))
def buckets_of_t5(q, k, v, table):
    distance = torch.arange(40) - torch.arange(40)[:, None]
    bias = F.embedding((distance + 40) % 32, table).permute(2, 0, 1).unsqueeze(0)
    return sm(q @ k.mT + bias) @ v


# *** 8: operands that are slices ***


@report(8, T((2, 33, 3, 4, 16)))
def cut_from_one_projection(qkv):
    q, k, v = qkv.unbind(2)
    return sm(q.transpose(1, 2) @ k.transpose(1, 2).mT * 0.25) @ v.transpose(1, 2)


@report(8, T((2, 4, 5, 16)), T((2, 4, 40, 16)), T((2, 4, 40, 16)))
def part_of_a_longer_buffer(q, k, v):
    k, v = k[:, :, 3:-9], v[:, :, 3:-9]
    return sm(q @ k.mT * 0.25) @ v


@report(8, *(lambda: torch.zeros(1, 2, 33, 16, requires_grad=True),) * 3)
def zeros_as_data(q, k, v):
    return sm(q @ k[:, :, :-5].mT) @ v[:, :, :-5]


# *** 9: a bias that grows with the position, and a length that is no multiple of a block ***

for _sign in (1, -1):
    for _m, _n in ((257, 257), (1, 3), (3, 129), (127, 3), (129, 129)):

        @report(9, *of_lengths(_m, _n, heads=1, d=64, dtype=torch.bfloat16), name=f"alibi_{_sign}_{_m}_{_n}")
        def _alibi(q, k, v, sign=_sign):
            m, n = q.size(2), k.size(2)
            distance = torch.arange(m)[:, None] - torch.arange(n)
            scores = q @ k.mT * 3 / 8 + sign * distance.to(q.dtype)
            return (sm(scores.masked_fill(distance < 0, -INF)) @ v) * 0.01


# *** 10: masks of another dtype ***


def lowest(m, n, dtype):
    """Causal, and one row that is filled throughout."""
    mask = torch.full((1, 1, m, n), torch.finfo(torch.float32).min).triu(1)
    mask[..., 2, :] = torch.finfo(torch.float32).min
    return mask.to(dtype) if dtype is not torch.float16 else mask.clamp(min=-60000.0).to(dtype)


for _dtype, _mask in (
    (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float16),
    (torch.float32, torch.float64),
):  # fmt: skip

    @report(
        10, *floats(*((1, 4, 4, 8),) * 3, dtype=_dtype), lambda _mask=_mask: lowest(4, 4, _mask),
        name=f"mask_{str(_mask)[6:]}_of_{str(_dtype)[6:]}", left=["dtype"] if _mask is torch.float64 else (),
    )  # fmt: skip
    def _masked(q, k, v, mask):
        return sm((q @ k.mT + mask).to(mask.dtype if q.dtype is torch.float64 else torch.float32)).to(q.dtype) @ v


# *** 11: masks of 0 and 1 ***

CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()


@report(11, *QKV, CAUSAL.clone)
def bool_added(q, k, v, mask):
    return sm(q @ k.mT + mask) @ v


@report(11, *floats(*((4, 2, 10, 8),) * 3))
def positions_added(q, k, v):
    return sm(q @ k.mT + torch.arange(10)[None, None]) @ v


@report(11, *QKV, CAUSAL.clone)
def bool_multiplied(q, k, v, mask):
    return sm((q @ k.mT) * mask) @ v


@report(11, *QKV, CAUSAL.clone)
def kept_where(q, k, v, mask):
    return sm(torch.where(mask, q @ k.mT, -INF)) @ v


@report(11, *QKV, CAUSAL.clone)
def filled_where_zero(q, k, v, mask):
    return sm((q @ k.mT).masked_fill(mask == 0, -1e9)) @ v


@report(11, *QKV, CAUSAL.clone)
def filled_where_not(q, k, v, mask):
    return sm((q @ k.mT).masked_fill(~mask, -INF)) @ v


@report(11, *QKV, CAUSAL.triu().clone)
def filled_where_so(q, k, v, mask):
    return sm((q @ k.mT).masked_fill(mask, -INF)) @ v


@report(11, *QKV, CAUSAL.to(torch.uint8).clone)
def bytes_filled(q, k, v, mask):
    return sm((q @ k.mT).masked_fill(mask == 0, -1e9)) @ v


@report(11, *QKV, CAUSAL.clone)
def ten_thousand_less(q, k, v, mask):
    return sm(q @ k.mT - 10000 * (1 - mask.float())) @ v


# *** 13: run-time sizes; `test_field_reports.py` changes them ***


def dynamic_attention(q, k, v, mask):
    m, n = q.size(2), k.size(2)
    keep = mask[:, :, :m, :n]
    return sm((q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~keep, -INF)) @ v


assert (B, H, L) == (2, 4, 8), "shapes above are written for these"
