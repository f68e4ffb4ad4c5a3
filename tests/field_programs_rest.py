"""The programs of `tests/field.py`: what the matcher must see, and the numbers it must keep. Reports from 15 on."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from field import QKV, report, sm
from zoo import T, floats

INF = math.inf
PLAIN = floats(*((2, 4, 8, 16),) * 3, kind="plain")


def scaled(q, k, v):
    return sm(q @ k.mT * 0.25) @ v


# *** 15: head dimensions ***


def scaled_little(q, k, v):
    return sm(q @ k.mT / 16) @ v


for _d in (1, 3, 8, 15, 17, 40, 72, 80, 96, 120, 160, 192, 256):
    report(15, *floats(*((1, 2, 40, _d),) * 3), name=f"head_dim_{_d}")(scaled_little)
for _d, _dv in ((16, 40), (64, 128), (192, 128), (96, 64)):
    report(15, *floats((1, 2, 40, _d), (1, 2, 33, _d), (1, 2, 33, _dv), dtype=torch.float16), name=f"{_d}_{_dv}")(
        scaled
    )
report(15, *floats(*((1, 2, 40, 128),) * 2, (1, 2, 40, 600)), name="128_600", left=["head-dim"])(scaled_little)


# *** 18: where dropout stands; with eval or p = 0 there is none ***


@report(18)
def dropout_of_nothing(q, k, v):
    return F.dropout(F.dropout(sm(q @ k.mT), 0.0) @ v, 0.5, training=False)


@report(18, left=["dropout"])
def dropout_of_everything(q, k, v):
    return F.dropout(sm(q @ k.mT), 1.0) @ v + q


# *** 20: strides ***


@report(20, *floats((2, 8, 7, 7), (30, 8, 1, 1)))
def from_a_convolution(x, w):
    x = F.conv2d(x.contiguous(memory_format=torch.channels_last), w)
    q, k, v = x.moveaxis(1, -1).reshape(2, 49, 30).chunk(3, -1)
    return F.max_pool2d((sm(q @ k.mT) @ v).mT.reshape(2, 10, 7, 7), 2)


@report(20, *floats((2, 4, 16, 49), (2, 4, 16, 49), (2, 4, 16, 49)))
def head_dims_before_lengths(q, k, v):
    return sm(q.mT @ k * 0.25) @ v.mT


@report(20, *floats((2, 4, 49, 32), (2, 4, 49, 32), (2, 4, 49, 32)))
def every_other_column(q, k, v):
    q, k, v = (t[..., ::2] for t in (q, k, v))
    return sm(q @ k.mT * 0.25) @ v


# *** 25: the scale is a tensor ***


@report(25, *floats(*((1, 2, 8, 8),) * 3), lambda: torch.tensor(0.5))
def scalar_tensor_and_mask(q, k, v, scale):
    return sm(q @ k.mT / scale + torch.full((8, 8), -1e9).triu(1)) @ v


report(25, *floats(*((1, 4, 8, 8),) * 3, ()), name="learned")(lambda q, k, v, s: sm(q @ k.mT * s) @ v)
report(25, *floats(*((1, 4, 8, 8),) * 3, (4, 1, 1)), name="by_head")(lambda q, k, v, s: sm(q @ k.mT * s) @ v)
report(25, *floats(*((1, 4, 8, 8),) * 3, (1, 1, 8, 1)), name="by_query")(lambda q, k, v, s: sm(q @ k.mT * s) @ v)
report(25, name="computed")(lambda q, k, v: sm(q @ k.mT / k.std()) @ v)


@report(25, *PLAIN, lambda: torch.tensor(0.5))
def under_inference_mode(q, k, v, scale):
    with torch.inference_mode():
        return sm(q @ k.mT / scale) @ v


# *** 26: chains of dtypes that eager allows ***


def wide_chain(q, k, v):
    return sm(q @ k.mT) @ v


@report(26, *floats(*((2, 4, 8, 16),) * 3, dtype=torch.float16), wide=wide_chain)
def half_scores_float_softmax_half_values(q, k, v):
    return torch.softmax((q @ k.mT).float(), -1).half() @ v


@report(26, *floats(*((2, 4, 8, 16),) * 3, dtype=torch.float16), wide=wide_chain)
def float_scores_half_values(q, k, v):
    return (sm(q.float() @ k.float().mT) @ v.float()).half()


report(26, *floats(*((2, 4, 8, 16),) * 3, dtype=torch.float64), name="all_float64", left=["dtype"])(scaled)


# *** 29: something is changed in place between the two products ***


@report(29, *PLAIN)
def operands_changed(q, k, v):
    s = q @ k.mT / 4
    k.zero_()
    v.mul_(2)
    return sm(s) @ v


def attend_to(q, buffer, end):
    return sm(q @ buffer[0, :, :, :end].mT * 0.25) @ buffer[1, :, :, :end]


@report(29, T((2, 4, 2, 16), "plain"), T((2, 2, 4, 12, 16), "plain"), fused=2)
def cache_written_by_a_slice(new, buffer):
    outs = []
    for end in (5, 7):
        buffer[:, :, :, end - 2 : end] = new * end
        outs.append(attend_to(new, buffer, end))
    return outs


@report(29, T((2, 4, 1, 16), "plain"), T((2, 2, 4, 12, 16), "plain"), fused=2)
def cache_written_by_index(new, buffer):
    outs = []
    for end in (5, 6):
        buffer.index_copy_(3, torch.tensor([end - 1]), (new * end).expand(2, 2, 4, 1, 16))
        outs.append(attend_to(new, buffer, end))
    return outs


@report(29, T((2, 4, 1, 16), "plain"), T((2, 2, 4, 12, 16), "plain"))
def cache_written_by_index_put(new, buffer):
    buffer.index_put_((torch.tensor([1]), torch.tensor([0]), torch.tensor([2]), torch.tensor([3])), new[0, :1, 0])
    return attend_to(new, buffer, 6)


@report(29, T((2, 4, 8, 32), "plain"))
def query_and_value_in_one_memory(both):
    q, v = both[..., :16], both[..., 16:]
    s = q @ q.mT * 0.25
    both.mul_(0.5)
    return sm(s) @ v


# *** 30: operands that are made late ***


@report(30, *QKV, T((16, 16)), T((8, 8)))
def bias_and_values_made_after_the_scores(q, k, v, w, position):
    scores = q @ k.mT
    bias = torch.tanh(position @ position)
    values = v @ w
    return sm(scores + bias) @ values


@report(30, *QKV, fused=2)
def two_interleaved(q, k, v):
    s1, s2 = q @ k.mT, k @ q.mT
    p1, p2 = sm(s1 * 0.25), sm(s2 * 0.5)
    o2 = p2 @ v
    return p1 @ v, o2


@report(30, *QKV, fused=2)
def values_of_another_attention(q, k, v):
    scores = q @ k.mT * 0.25
    return sm(scores) @ (sm(k @ q.mT * 0.5) @ v)


# *** 31: masks that look like something else ***

ROWS = {
    "holes": [1, 1, 0, 1, 0, 0, 1, 1], "left_padded": [0, 0, 1, 1, 1, 1, 1, 1], "open": [1] * 8,
    "one_open": [0, 0, 0, 1, 0, 0, 0, 0], "closed": [0] * 8,
}  # fmt: skip
for _name, _keys in ROWS.items():
    _mask = torch.tensor([[1] * 8, _keys], dtype=torch.bool)

    @report(31, *QKV, _mask.clone, name=f"keys_{_name}")
    def _keys_kept(q, k, v, mask):
        return sm((q @ k.mT * 0.25).masked_fill(~mask[:, None, None], -1e9)) @ v


def lower_left():
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[6, 1] = mask[7, 4] = False
    mask[1, 6] = True
    return mask


@report(31, *QKV, lower_left)
def nearly_causal(q, k, v, mask):
    return sm(torch.where(mask, q @ k.mT * 0.25, -INF)) @ v


@report(31, *floats(*((4, 4, 4, 4),) * 3), T((4, 4), "keep"), name="all_sizes_alike_2d")
@report(31, *floats(*((4, 4, 4, 4),) * 3), T((4, 4, 4), "keep"), name="all_sizes_alike_3d")
@report(31, *floats(*((4, 4, 4, 4),) * 3), T((4, 1, 1, 4), "keep"), name="all_sizes_alike_4d")
def broadcast_from_the_right(q, k, v, mask):
    return sm((q @ k.mT).masked_fill(~mask, -1e9)) @ v


# *** 35: scores beyond half precision ***

HALF = torch.float16


def sixty():
    return torch.full((1, 1, 4, 64), 60.0, dtype=HALF)


@report(35, sixty, sixty, T((1, 1, 4, 64), dtype=HALF), wide=lambda q, k, v: sm(q / 8 @ k.mT / 8) @ v)
def scaled_first(q, k, v):
    return sm((q / 8) @ (k / 8).mT) @ v


@report(35, *floats(*((1, 2, 40, 64),) * 3, dtype=HALF))
def wide_scores(q, k, v):
    return sm((q * 3) @ (k * 3).mT / 8) @ v


@report(35, *floats((1, 1, 3, 16), (1, 1, 4096, 16), (1, 1, 4096, 16), dtype=HALF))
def many_small_weights(q, k, v):
    return sm(q * 0.01 @ k.mT) @ (v * 100)


@report(35, *floats(*((1, 2, 40, 64),) * 3, dtype=HALF), wide=scaled)
def float_softmax(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).half() @ v


# *** 39: guards of rows without a key ***


def one_empty_row(q, k, v, mask):
    return (q @ k.mT * 0.25).masked_fill(~mask, -INF)


def mask_with_an_empty_row():
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[3] = False
    return mask


@report(39, *QKV, mask_with_an_empty_row, empty_rows=True)
def nan_replaced(q, k, v, mask):
    weights = sm(one_empty_row(q, k, v, mask))
    return torch.where(torch.isnan(weights), 0, weights) @ v


@report(39, *QKV, mask_with_an_empty_row, empty_rows=True)
def zeros_where_all_are_hidden(q, k, v, mask):
    scores = one_empty_row(q, k, v, mask)
    hidden = (scores == -INF).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, sm(scores)) @ v


# *** 41: side effects beside the attention ***


@report(41, *PLAIN, T((2, 4, 8, 16), "plain"), lambda: torch.zeros((), dtype=torch.int64))
def cache_and_counter(q, k, v, cache, counter):
    cache.copy_(k)
    counter += 1
    return sm(q @ cache.mT * 0.25) @ v
