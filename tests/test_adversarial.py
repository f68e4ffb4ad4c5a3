"""Functions that once broke the rewrite, or easily could: outputs and gradients must be eager's, and nothing may crash."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flash_fx

B, H, M, N, D = 2, 3, 8, 10, 4
INF = math.inf


def sm(s):
    return torch.softmax(s, -1)


def bool_product_negated(q, k, v):
    keep = torch.ones(M, N, dtype=torch.bool).tril(2) * (torch.arange(N) < 9)
    return sm((q @ k.mT).masked_fill(~keep, -1e9)) @ v


def bool_sum_and(q, k, v):
    keep = ((torch.arange(N) < 4) + (torch.arange(N) > 6)) & torch.ones(M, N, dtype=torch.bool).tril(3)
    return sm((q @ k.mT).masked_fill(~keep, -1e9)) @ v


def weights_zeroed_in_empty_rows(q, k, v):
    drop = torch.zeros(M, N, dtype=torch.bool)
    drop[0] = True
    return sm((q @ k.mT).masked_fill(drop, -INF)).masked_fill(drop, 0.0) @ v


def slice_from_the_end(q, k, v):
    m, n = q.shape[-2], k.shape[-2]
    positions = torch.arange(n)
    return sm((q @ k.mT).masked_fill(~(positions[-m:][:, None] >= positions), -INF)) @ v


def flipped_slice_from_the_end(q, k, v):
    m, n = q.shape[-2], k.shape[-2]
    positions = torch.arange(n).flip(0)[-m:]
    return sm((q @ k.mT).masked_fill(positions[:, None] < torch.arange(n) - 4, -1e4)) @ v


def write_under_no_grad(q, k, v):
    s = q @ k.mT
    with torch.no_grad():
        s.div_(2.0)
    return sm(s) @ v


def softmax_under_no_grad(q, k, v):
    s = q @ k.mT
    with torch.no_grad():
        w = sm(s)
    return w @ v


def product_under_no_grad(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    with torch.no_grad():
        s = torch.bmm(q, k.mT)
    return torch.bmm(sm(s * 2), v)


def keys_expanded_over_the_batch(q, k, v):
    return sm(q @ k[:1, :1].expand(B, H, N, D).mT) @ v[:1, :1].expand(B, H, N, D)


def write_into_the_result(q, k, v):
    return (sm(q @ k.mT) @ v).add_(1).mul_(2)


def copy_that_is_written(q, k, v):
    t = (sm(q @ k.mT) @ v).transpose(1, 2)
    y = t.reshape(B, M, -1)
    y.add_(1)
    return torch.cat([y.flatten(), t.flatten()])


def view_of_a_transposed_result(q, k, v):
    return (v.mT @ sm(q @ k.mT).mT).view(B, H * D, M)


def view_after_two_transpositions(q, k, v):
    return (sm(q @ k.mT) @ v).transpose(1, 2).transpose(1, 2).view(B, -1)


def einsum_result_viewed(q, k, v):
    return torch.einsum("bhmn,bhnd->bmhd", sm(q @ k.mT), v).transpose(1, 2).view(B * H, M, D)


def half_stopped(q, k, v):
    s = q @ k.mT
    return sm(0.5 * s + 0.5 * s.detach()) @ v


def float64_mask(q, k, v):
    time = torch.arange(N).double() + 1.7e9
    return sm((q @ k.mT).masked_fill(time[:M, None] < time, -INF)) @ v


def int32_wraps(q, k, v):
    i = torch.arange(N, dtype=torch.int32) * 2**29
    return sm((q @ k.mT).masked_fill(i[:M, None] < i, -1e4)) @ v


def half_positions(q, k, v):
    p = (torch.arange(N) * 100).to(torch.bfloat16)
    return sm((q @ k.mT).masked_fill(~(p[:M, None] >= p - 3), -1e9)) @ v


def compared_with_a_half(q, k, v):
    distance, limit = torch.arange(N) - torch.arange(M)[:, None] + 250, torch.full((N,), 256.0, dtype=torch.bfloat16)
    return sm((q @ k.mT).masked_fill(distance > limit, -INF)) @ v


def scaled_by_a_half_and_compared(q, k, v):
    distance = torch.arange(N) - torch.arange(M)[:, None] + 250
    return sm((q @ k.mT).masked_fill(distance * torch.ones((), dtype=torch.bfloat16) > 256, -1e9)) @ v


def relu_in_place_between(q, k, v):
    q = q * 1.0
    s = q @ k.detach().mT
    F.relu(q, inplace=True)
    return sm(s) @ v + q


def hardtanh_in_place_by_position(q, k, v):
    q = q * 1.0
    F.hardtanh(q, -0.5, 0.5, True)
    return sm(q @ k.mT) @ v + q


def write_inside_checkpoint(q, k, v):
    def body(x):
        x = x.clone()
        x.mul_(3)
        return x.sum()

    return sm(q @ k.mT) @ v + checkpoint(body, q, use_reentrant=False)


def vmap_beside(q, k, v):
    return sm(q @ k.mT) @ v + torch.vmap(lambda x: x * 2)(q)


def two_products_one_edited(q, k, v):
    w = sm(q @ k.mT)
    w = w * 2.0
    return w @ v + (w.mT @ (w @ v)).sum()


def weights_both_ways(q, k, v):
    w = sm(q @ k.mT)
    return (w @ v).sum() + (w.mT @ q).sum()


# *** softmax by hand that is none ***


def ex(q, k):
    return (q @ k.mT * 0.3).exp()


def total_detached(q, k, v):
    e = ex(q, k)
    return (e / e.sum(-1, keepdim=True).detach()) @ v


def total_without_grad(q, k, v):
    e = ex(q, k)
    with torch.no_grad():
        total = e.sum(-1, keepdim=True)
    return (e @ v) / total


def numerator_detached(q, k, v):
    e = ex(q, k)
    return (e.detach() / e.sum(-1, keepdim=True)) @ v


def exponent_detached(q, k, v):
    s = q @ k.mT * 0.3
    return torch.exp((s - s.amax(-1, keepdim=True)).detach()) @ v


def maximum_detached(q, k, v):
    s = q @ k.mT * 0.3
    e = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return (e / e.sum(-1, keepdim=True)) @ v


def logsumexp_detached(q, k, v):
    s = q @ k.mT * 0.3
    return torch.exp(s - s.logsumexp(-1, keepdim=True).detach()) @ v


def log_softmax_detached(q, k, v):
    return F.log_softmax(q @ k.mT * 0.3, -1).detach().exp() @ v + q


def guard_detached(q, k, v):
    return sm(q @ k.mT * 0.3).detach().nan_to_num() @ v + q


def difference_detached(q, k, v):
    return (sm(q @ k.mT) - sm(q @ k.mT * 0.5)).detach() @ v + q


def rows_moved_before_the_quotient(q, k, v):
    e = ex(q, k)
    return (e @ v).flip(2) / e.sum(-1, keepdim=True)


def total_in_integers(q, k, v):
    e = ex(q, k)
    return (e / e.sum(-1, keepdim=True).int()) @ v


def total_of_everything(q, k, v):
    e = ex(q, k)
    return (e / e.sum()) @ v + sm(q @ k.mT) @ v


def quotient_of_more_axes(q, k, v):
    e = ex(q[0, 0], k[0, 0])
    return (e / e.sum(-1, keepdim=True).expand(3, -1, -1)) @ v[0, 0] + 0 * (q.sum() + k.sum() + v.sum())


def total_over_the_queries(q, k, v):
    e = ex(q, k)
    return (e / e.sum(-2, keepdim=True)) @ v


# *** scores written into part of a larger tensor ***


def null_key_in_front(q, k, v):
    s = q.new_zeros(*q.shape[:3], k.size(2))
    s[..., 1:] = q @ k[:, :, 1:].mT
    return sm(s) @ v


def null_key_at_the_end(q, k, v):
    s = q.new_zeros(*q.shape[:3], k.size(2))
    s[..., :-1] = q @ k[:, :, 1:].mT
    return sm(s) @ v


def some_rows_written(q, k, v):
    s = q.new_zeros(*q.shape[:2], q.size(2) + 2, k.size(2))
    s[:, :, 2:] = q @ k.mT
    return sm(s) @ v


# *** what is written around the attention ***


def bias_written_under_no_grad(q, k, v):
    bias = k[..., 0].unsqueeze(-2) * 2
    s = q @ k.mT + bias
    with torch.no_grad():
        bias.zero_()
    return sm(s) @ v


def bias_accumulated_under_no_grad(q, k, v):
    bias, out = k[..., 0].unsqueeze(-2) * 1.5, 0
    for _ in range(3):
        s = q @ k.mT + bias
        with torch.no_grad():
            bias.add_(0.5)
        out = out + sm(s) @ v
    return out


def bias_written_after_each_layer(q, k, v):
    bias = k[..., 0].unsqueeze(-2).clone()
    for _ in range(2):
        q = sm(q @ k.mT + bias) @ v
        bias += 0.1
    return q


# *** rows without a key ***


def zeroed_where_a_sum_of_fills_overflows(q, k, v):
    keep = torch.arange(M)[:, None] > 2
    bias = (1 - keep.float()) * torch.finfo(torch.float32).min
    return sm(q @ k.mT + bias + bias).masked_fill(~keep, 0.0) @ v


def zeroed_under_the_logarithm_of_a_mask(q, k, v):
    keep = torch.arange(M)[:, None] > 2
    return sm(q @ k.mT + keep.float().log()).masked_fill(~keep, 0.0) @ v


def shifted_by_a_mean_that_is_infinite(q, k, v):
    s = (q @ k.mT).masked_fill(torch.arange(N) > 6, -INF)
    w = sm(s - s.mean(-1, keepdim=True))
    return torch.where(w.isnan(), 0.0, w) @ v


def table_longer_than_the_folded_heads(q, k, v):
    table = torch.linspace(-1, 1, (B * H + 1) * N).view(B * H + 1, N)
    s = q.flatten(0, 1) @ k.flatten(0, 1).mT + table[: B * H, None, :]
    return (sm(s) @ v.flatten(0, 1)).view_as(q)


def nan_guard_of_scores_that_are_all_nan(q, k, v):
    keep = (torch.arange(N) < 5).float()
    return torch.nan_to_num(sm(q @ k.mT + (1 - keep) * -INF)) @ v  # 0 * inf


def nan_guard_of_scores_that_are_nan_by_a_captured_mask(q, k, v):
    mask = (1 - (v[:1, :1, :, :1].detach() > -9).float()).mT * -INF
    return torch.nan_to_num(sm(q @ k.mT + mask)) @ v


def nan_guard_of_plus_infinity(q, k, v):
    s = (q @ k.mT).masked_fill(torch.arange(N) > 4, -INF)
    return torch.nan_to_num(sm(s * -0.2)) @ v


def nan_guard_of_a_mask_of_plus_infinity(q, k, v):
    mask = torch.zeros(N).masked_fill(v[0, 0, :, 0].detach() > 0, -INF)
    return torch.nan_to_num(sm(q @ k.mT - mask)) @ v


def logsumexp_beside_a_huge_fill(q, k, v):
    s = (q @ k.mT).masked_fill(torch.arange(M)[:, None] > 2, -1e30)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def logsumexp_beside_a_huge_mask(q, k, v):
    s = q @ k.mT + (torch.arange(M)[:, None] > 2) * torch.finfo(torch.float32).min
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def second_piece_of_three_holds_the_sink(q, k, v):
    s = torch.cat([q.mean(-1, keepdim=True), q @ k.mT], -1)
    _, w, _ = sm(s).split([0, N, 1], -1)
    return w @ v


def nothing_joined_to_the_scores(q, k, v):
    return sm(torch.cat([torch.zeros(0), q @ k.mT], -1)) @ v


def scores_taken_from_a_vector(q, k, v):
    s = torch.linspace(-1, 1, N) - q @ k.mT
    return sm(s) @ v + sm(q @ k.mT - torch.linspace(-1, 1, N)) @ v


def keys_counted_in_eight_bits(q, k, v):
    k, v = (t.repeat(1, 1, 26, 1)[:, :, :256] for t in (k, v))
    keep = torch.ones(1, 256, dtype=torch.bool)
    w = sm((q @ k.mT).masked_fill(~keep, -INF))
    return w.masked_fill(keep.sum(-1, keepdim=True, dtype=torch.uint8) == 0, 0.0) @ v


def factor_infinite_where_weights_are_zeroed(q, k, v):
    distance = (torch.arange(M)[:, None] - torch.arange(N)).abs().float()
    q, k = q.detach(), k.detach()  # eager's gradient is NaN there
    return (sm(q @ k.mT) * distance.log()).masked_fill(distance == 0, 0.0) @ v


def diagonal_of_a_matrix(q, k, v):
    s = q[0, 0] @ k[0, 0].mT
    s.diagonal(1).fill_(-3.0)
    return sm(torch.diagonal_scatter(s, torch.linspace(0, 1, M - 1), offset=-1)) @ v[0, 0]


def clamped_at_scores_of_zeroed_rows(q, k, v):
    q = q * (torch.arange(M) > 2)[:, None]
    return sm((q @ k.mT).clamp(max=0)) @ v + sm((q @ k.mT).clamp(-1.0, 0.0)) @ v


def row_of_fills_without_its_maximum(q, k, v):
    e = (q @ k.mT).masked_fill(torch.arange(M)[:, None] > 2, -1e30).exp()
    return e / e.sum(-1, keepdim=True) @ v


def row_of_multiplied_fills_without_its_maximum(q, k, v):
    e = (q @ k.mT + (torch.arange(M)[:, None] > 2) * -1e9).exp()
    return e / e.sum(-1, keepdim=True) @ v


def plus_one_less_the_maximum_of_rows_without_a_key(q, k, v):
    s = (q @ k.mT).masked_fill(torch.arange(M)[:, None] > 5, -INF)
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    return e / ((-top).exp() + e.sum(-1, keepdim=True)) @ v


def infinity_times_a_mask_beside_rows_without_a_key(q, k, v):
    late = (torch.arange(N) < N - 1).float()
    q, k = q.detach(), k.detach()  # NaN times 0 in their gradients
    s = (q @ k.mT).masked_fill(torch.arange(M)[:, None] > 5, -INF) + late * -INF
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True)) @ v


def weights_moved_down_a_row(q, k, v):
    w = sm(q @ k.mT)
    return torch.cat([torch.zeros(B, H, 1, N), w[:, :, :-1]], 2) @ v


def scores_of_keys_exchanged(q, k, v):
    s = q @ k.mT
    return sm(torch.cat([s[..., 4:], s[..., :4]], -1)) @ v


def scores_joined_from_two_parts(q, k, v):
    s = q @ k.mT
    return sm(torch.cat([s[..., :4], s[..., 4:] * 2], -1)) @ v


def scores_padded_on_two_sides(q, k, v):
    return sm(F.pad((q @ k.mT)[:, :, 1:, 1:], (1, 0, 1, 0))) @ v


def first_head_alone(q, k, v):
    return torch.cat([sm((q @ k.mT)[:, :1]), torch.zeros(B, H - 1, M, N)], 1) @ v


def first_row_zeroed_where_it_may_be_nan(q, k, v):
    w = sm((q @ k.mT).masked_fill(torch.ones(M, N).triu(-1).bool(), -INF)).clone()
    w[:, :, 0] = 0
    return w @ v


def rows_of_all_heads_regrouped(q, k, v):
    return (sm(q @ k.mT).reshape(B, H * M, N) @ v[:, 0]).view(B, M, H, D)


def queries_before_heads(q, k, v):
    return (sm(q @ k.mT).transpose(1, 2).reshape(B, M * H, N) @ v[:, 0]).view(B, M, H, D)


def keys_folded_into_rows(q, k, v):
    return sm(q @ k.mT).reshape(B, -1) @ torch.linspace(-1, 1, H * M * N * D).view(-1, D)


def shared_values_beside_a_use_of_the_weights(q, k, v):
    w = sm(q @ k.mT)
    return w @ v[0, 0] + w.mean()


def some_keys_of_some_heads_before_shared_values(q, k, v):
    w = sm(q @ k.mT)
    parts = w[..., :6] @ v[0, 0, :6], w[:1] @ v[0, 0], w[:, 1:] @ v[0, 0], w[:, 0] @ v[0, 0]
    return torch.cat([p.flatten() for p in parts])


def some_batches_before_values_of_a_head(q, k, v):
    w = sm(q @ k.mT)[:1].transpose(1, 2).reshape(1, M * H, N)
    return w @ v[:1, 0]


def heads_turned_before_shared_values(q, k, v):
    return sm(q @ k.mT).flip(1) @ v[0, 0]


def shared_values_summed_over_heads(q, k, v):
    return torch.einsum("bhmn,nd->bmd", sm(q @ k.mT), v[0, 0])


# *** rows without a key, and neighbours of what is recognised ***

FILLS = (-INF, -1e30, -300.0)


def some_rows_filled(q, k, fill):
    """Some rows are filled throughout, the others in part."""
    drop = (torch.arange(M)[:, None] > 5) | (torch.arange(N) > torch.arange(M)[:, None] + 4)
    return (q @ k.mT * 0.3).masked_fill(drop, fill)


def stable(s):
    m = s.amax(-1, keepdim=True)
    return torch.exp(s - (m + torch.exp(s - m).sum(-1, keepdim=True).log()))


def shifted(s):
    return torch.exp(s - s.amax(-1, keepdim=True))


def of_exponentials(quotient):
    return lambda s: quotient(shifted(s))


def sums(s):
    return sm(s) - 0.5 * (sm(2 * s) + sm(3 * s))


SPELLINGS = {
    "unlike_itself": lambda s: (w := sm(s)).masked_fill(w != w, 0.0),
    "equal_to_itself": lambda s: torch.where((w := sm(s)) == w, w, 0.0),
    "any_nan": lambda s: torch.where((w := sm(s)).isnan().any(-1, keepdim=True), 0.0, w),
    "all_nan": lambda s: torch.where((w := sm(s)).isnan().all(-1)[..., None], 0.0, w),
    "logarithm": lambda s: torch.exp(s - s.exp().sum(-1, keepdim=True).log()),
    "logarithm_and_epsilon": lambda s: torch.exp(s - (s.exp().sum(-1, keepdim=True) + 1e-3).log()),
    "stable_logarithm": stable,
    "logarithm_of_shifted": lambda s: (
        (t := s - s.amax(-1, keepdim=True)) - t.exp().sum(-1, keepdim=True).log()
    ).exp(),
    "maximum": of_exponentials(lambda e: e / torch.maximum(e.sum(-1, keepdim=True), torch.tensor(1e-6))),
    "epsilon_of_zero": of_exponentials(lambda e: e / (e.sum(-1, keepdim=True) + 0.0)),
    "constant_epsilon": lambda s: s.exp() / (s.exp().sum(-1, keepdim=True) + torch.tensor(1e-3)),
    "three": sums,
    "mean": lambda s: sm(s - s.mean(-1, keepdim=True)),
    "quotient_less_the_mean": lambda s: (e := (s - s.mean(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
}


def unlike_another(q, k, v):
    w = sm(some_rows_filled(q, k, -INF))
    return w.masked_fill(w != sm(q @ k.mT), 0.0) @ v


def unlike_its_rounding(q, k, v):
    w = sm(q @ k.mT)
    return w.masked_fill(w != w.bfloat16(), 0.0) @ v


def nan_of_another_axis(q, k, v):
    w = sm(some_rows_filled(q, k, -INF))
    return torch.where(w.isnan().any(-2, keepdim=True), 0.0, w) @ v


def nan_kept_and_the_rest_zeroed(q, k, v):
    w = sm(q @ k.mT)
    return w.masked_fill(w == w, 0.0) @ v + torch.where(w.isnan().any(-1, keepdim=True), w, 0.0) @ v


def maximum_with_a_large_floor(q, k, v):
    e = shifted(q @ k.mT)
    return e / torch.maximum(e.sum(-1, keepdim=True), torch.tensor(3.0)) @ v


def maximum_with_a_floor_of_one(q, k, v):
    e = shifted(q @ k.mT * 1e4)
    return e / torch.maximum(e.sum(-1, keepdim=True), torch.tensor(1.0)) @ v


def maximum_without_a_shift(q, k, v):
    e = ex(q, k)
    return e / torch.maximum(e.sum(-1, keepdim=True), torch.tensor(9.0)) @ v


def logarithm_detached(q, k, v):
    s = q @ k.mT * 0.3
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log().detach()) @ v


def maximum_detached_once(q, k, v):
    s = q @ k.mT * 0.3
    m = s.amax(-1, keepdim=True)
    return torch.exp(s - (m + torch.exp(s - m.detach()).sum(-1, keepdim=True).log())) @ v


def logarithm_of_other_scores(q, k, v):
    s = q @ k.mT * 0.3
    return torch.exp(s - (s * 0.5).exp().sum(-1, keepdim=True).log()) @ v


def logarithm_over_the_queries(q, k, v):
    s = q @ k.mT * 0.3
    return torch.exp(s - s.exp().sum(-2, keepdim=True).log()) @ v


def logarithm_to_the_base_of_two(q, k, v):
    s = q @ k.mT * 0.3
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log2()) @ v


def part_of_a_sum_detached(q, k, v):
    s = q @ k.mT * 0.3
    return (sm(s) + (sm(2 * s) - sm(3 * s)).detach() + sm(4 * s)) @ v


def part_of_a_sum_used_again(q, k, v):
    s = q @ k.mT * 0.3
    inner = sm(s) + sm(2 * s)
    return (inner - sm(3 * s)) @ v + inner.sum()


def sum_times_itself(q, k, v):
    s = q @ k.mT * 0.3
    total = sm(s) + sm(2 * s)
    return (total * total + sm(3 * s)) @ v


def number_over_a_sum(q, k, v):
    s = q @ k.mT * 0.3
    return (0.1 / (sm(s) + sm(2 * s)) + sm(3 * s)) @ v


def einsum_over_the_queries(q, k, v):
    e = ex(q, k)[:, :, :, :M]
    return (e @ v[:, :, :M]) / torch.einsum("bhmn->bhn", e)[..., None]


def zero_added_in_place_and_written(q, k, v):
    s = q @ k.mT
    t = s + 0.0
    t.mul_(2)
    return sm(t) @ v + sm(s + 0.0) @ v


def mean_beside_a_mask(q, k, v):
    s = q @ k.mT * 0.3
    masked = some_rows_filled(q, k, -INF)
    return sm(masked - s.mean(-1, keepdim=True)).nan_to_num() @ v + sm(s - masked.mean(-1, keepdim=True)).nan_to_num() @ v


# *** multiplications and sums that are no product, or are more ***


def times(a, b, dim=-1):
    return (a * b).sum(dim)


def keys_of_every_query(q, k, v):
    near = k.unfold(2, 3, 1).mT  # [B, H, M, 3, D]
    return times(sm(times(q.unsqueeze(3), near)).unsqueeze(-1), v.unfold(2, 3, 1).mT, 3)


def keys_of_every_query_in_one_batch(q, k, v):
    w = sm(times(q[0, 0, :, None], k[0, 0].unfold(0, 3, 1).mT))
    return times(w[..., None], v[0, 0].unfold(0, 3, 1).mT, 1) + 0 * (q.sum() + k.sum() + v.sum())


def heads_attend_for_every_query(q, k, v):
    near = k[:, 0].unfold(1, 3, 1).mT[:, None]  # [B, 1, M, 3, D]
    return times(sm(times(q.unsqueeze(3), near)).unsqueeze(-1), v[:, 0].unfold(1, 3, 1).mT[:, None], 3)


def summed_over_the_queries(q, k, v):
    s = times(q.unsqueeze(3), k.unsqueeze(2), 2)  # [B, H, N, D]
    return sm(s.mT) @ v


def summed_over_the_keys(q, k, v):
    s = times(q.unsqueeze(3), k.unsqueeze(2), 3)
    return sm(s) @ v[:, :, :D]


def summed_over_everything(q, k, v):
    s = q @ k.mT + (q.unsqueeze(3) * k.unsqueeze(2)).sum() + (q.unsqueeze(3) * k.unsqueeze(2)).sum((3, 4))[..., None]
    return sm(s * torch.linspace(0, 0.1, N)) @ v


def values_summed_over_the_queries(q, k, v):
    w = sm(q @ k.mT)
    return times(w.unsqueeze(-1), v.unsqueeze(2), 2)


def values_summed_over_the_channels(q, k, v):
    return times(sm(q @ k.mT).unsqueeze(-1), v.unsqueeze(2), 4)


def summed_axis_broadcast_in_one_factor(q, k, v):
    return sm(times(q.unsqueeze(3), k.unsqueeze(2)[..., :1])) @ v + sm(times(q[..., :1].unsqueeze(3), k.unsqueeze(2))) @ v


def summed_axis_expanded_in_one_factor(q, k, v):
    return sm(times(q.unsqueeze(3), k[..., :1].unsqueeze(2).expand(-1, -1, -1, -1, D))) @ v


def summed_axis_of_one(q, k, v):
    return sm(times(q[..., :1].unsqueeze(3), k[..., :1].unsqueeze(2))) @ v


def factors_of_two_dtypes(q, k, v):
    s = times(q.unsqueeze(3), k.unsqueeze(2).double()).float()
    return sm(s) @ v + times(sm(s.double()).unsqueeze(-1), v.unsqueeze(2), 3).float()


def summed_in_another_dtype(q, k, v):
    s = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1, dtype=torch.float64)
    return sm(s.float() + 1e9 - 1e9) @ v


def integers_multiplied_and_summed(q, k, v):
    like = times((q > 0).long().unsqueeze(3), (k > 0).long().unsqueeze(2))
    return sm(q @ k.mT + like) @ v + sm((q @ k.mT).masked_fill(like < 1, -INF)).nan_to_num() @ v


def factor_detached(q, k, v):
    s = times(q.unsqueeze(3), k.detach().unsqueeze(2))
    return times(sm(s).unsqueeze(-1), v.unsqueeze(2), 3) + times(sm(s).unsqueeze(-1), v.detach().unsqueeze(2), 3)


def multiplication_detached(q, k, v):
    s = (q.unsqueeze(3) * k.unsqueeze(2)).detach().sum(-1)
    return times(sm(s + q @ k.mT).unsqueeze(-1), v.unsqueeze(2), 3)


def sum_detached(q, k, v):
    s = times(q.unsqueeze(3), k.unsqueeze(2)).detach() + times(q.unsqueeze(3), k.unsqueeze(2))
    return sm(s) @ v + times(sm(q @ k.mT).unsqueeze(-1), v.unsqueeze(2), 3).detach()


def multiplied_under_no_grad(q, k, v):
    with torch.no_grad():
        x = q.unsqueeze(3) * k.unsqueeze(2)
    w = sm(x.sum(-1))
    with torch.no_grad():
        y = w.unsqueeze(-1) * v.unsqueeze(2)
    return y.sum(3) + q * k.sum() + v.sum()


def summed_under_no_grad(q, k, v):
    x = q.unsqueeze(3) * k.unsqueeze(2)
    with torch.no_grad():
        s = x.sum(-1)
    return sm(s + q.sum(-1, keepdim=True) * k[..., 0].unsqueeze(2)) @ v


def multiplication_used_elsewhere(q, k, v):
    x = q.unsqueeze(3) * k.unsqueeze(2)
    y = sm(x.sum(-1)).unsqueeze(-1) * v.unsqueeze(2)
    return y.sum(3) + x.amax(3) + y.amax(3)


def weights_in_a_factor_used_elsewhere(q, k, v):
    w = sm(times(q.unsqueeze(3), k.unsqueeze(2))).unsqueeze(-1)
    return times(w, v.unsqueeze(2), 3) + w.amax(3)


def factor_written_afterwards(q, k, v):
    q = q * 1.0
    x = q.unsqueeze(3) * k.detach().unsqueeze(2)
    s = x.sum(-1)
    x.zero_()
    q.mul_(2.0)
    return times(sm(s).unsqueeze(-1), v.unsqueeze(2), 3).add_(1) + q


def multiplied_in_place(q, k, v):
    x = q.unsqueeze(3).repeat(1, 1, 1, N, 1)
    x *= k.unsqueeze(2)
    y = sm(x.sum(-1).div_(2)).unsqueeze(-1).repeat(1, 1, 1, 1, D)
    y.mul_(v.unsqueeze(2))
    return y.sum(3)


def result_of_a_sum_transposed_and_viewed(q, k, v):
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    w = sm(times(q.unsqueeze(2), k.unsqueeze(1)).transpose(2, 3)).transpose(2, 3)
    return times(w.unsqueeze(-1), v.unsqueeze(1), 2).view(B, -1)


def scores_expanded_over_neighbours(q, k, v):
    k = torch.repeat_interleave(k[:, :, : N // 2], 2, 2)
    return times(sm(times(q.unsqueeze(3), k.unsqueeze(2))).unsqueeze(-1), v.unsqueeze(2), 3)


def total_of_masked_exponentials(q, k, v):
    mask = (torch.arange(N) < 7).float()
    e = (q @ k.mT).exp() * mask
    return e / times(ex(q, k) ** 0, e)[..., None] @ v + (e / times(e, mask)[..., None]) @ v


def entropy_of_weights(q, k, v):
    w = sm(q @ k.mT)
    return v.sum() - times(w, w.log()) + times(w, torch.linspace(0, 1, N))


def normalised_by_hand_before_scores(q, k, v):
    q, k = (t / times(t, t)[..., None].sqrt() for t in (q, k))
    return sm(times(q.unsqueeze(3), k.unsqueeze(2))) @ v


def gates_without_scores(q, k, v):
    gates = sm(q.mean(2))  # [B, H, D]
    return times(gates[:, :, None, :], v, 3) + times(gates.unsqueeze(-1), v.mT, 2)


HELPERS = (sm, ex, times, some_rows_filled, stable, shifted, of_exponentials, sums)
FUNCTIONS = [f for f in list(globals().values()) if getattr(f, "__module__", "") == __name__ and f not in HELPERS]


def results(f, args):
    out = f(*args)
    direction = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out.double() * direction).sum(), args, allow_unused=True)]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_equals_eager(f, dynamic):
    equals_eager(f, dynamic)


def equals_eager(f, dynamic):
    torch.manual_seed(0)
    args = [torch.randn(B, H, n, D, requires_grad=True) for n in (M, N, N)]
    wanted = results(f, args)
    with flash_fx.recording() as reports:
        got = results(torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"), dynamic=dynamic), args)
    assert f is vmap_beside or "internal" not in [s.reason for r in reports for s in r.sites]
    for a, b in zip(got, wanted, strict=True):
        a, b = (torch.zeros(()) if t is None else t for t in (a, b))
        torch.testing.assert_close(a.expand_as(b), b, rtol=2e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_rows_without_a_key(name, fill):
    equals_eager(lambda q, k, v: SPELLINGS[name](some_rows_filled(q, k, fill)) @ v, None)


@pytest.mark.parametrize("batch", [(B, H), (B,), ()], ids=["heads", "batch", "matrix"])
def test_exponentials_divided_by_something_else_are_named_once(batch):
    def f(q, k, v):
        e = (q @ k.mT).exp()
        return (e / (e.sum(-1, keepdim=True) + e.mean(-1, keepdim=True))) @ v

    args = [torch.randn(*batch, n, D, requires_grad=True) for n in (M, N, N)]
    with flash_fx.recording() as reports:
        torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))(*args)
    reasons = [s.reason for r in reports for s in r.sites]
    assert reasons == ["exponentials"], reasons


def test_one_dropout_for_two_products_is_one_mask():
    def f(q, k, v):
        w = F.dropout(sm(q @ k.mT), 0.5)
        return w @ v, w @ v

    args = [torch.randn(B, H, n, D) for n in (M, N, N)]
    a, b = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))(*args)
    assert torch.equal(a, b)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return grad.clone().mul_(0.5)


def test_autograd_function_whose_backward_writes_in_place():
    def f(q, k, v):
        return sm(Halved.apply(q) @ k.mT) @ v

    args = [torch.randn(B, H, n, D, requires_grad=True) for n in (M, N, N)]
    with flash_fx.recording() as reports:
        got = results(torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager")), args)
    assert sum(r.fused for r in reports) == 1
    torch.testing.assert_close(got, results(f, args))


def test_no_gradient_where_weights_are_detached_and_values_need_none():
    def f(q, k, v):
        return sm(q @ k.mT).detach() @ v + 0 * q, sm((q @ k.mT).detach()) @ v

    args = [torch.randn(B, H, 8, D, requires_grad=n < 2) for n in range(3)]
    first, second = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))(*args)
    gradients = torch.autograd.grad(first.sum(), args[:2], allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)
    assert not second.requires_grad or not any(
        g is not None and g.any() for g in torch.autograd.grad(second.sum(), args[:2], allow_unused=True)
    )


def test_inputs_that_share_memory():
    def f(q, k, v, alias):
        s = q @ k.mT
        alias.zero_()
        return sm(s) @ v

    q, k, v = (torch.randn(B, H, n, D) for n in (M, N, N))
    wanted = f(q.clone(), k, v, q.clone().view(-1))
    mine = q.clone()
    got = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))(mine, k, v, mine.view(-1))
    torch.testing.assert_close(got, wanted)


def test_strides_of_a_returned_result_are_eagers():
    def f(q, k, v):
        return (sm(q @ k.mT) @ v).transpose(1, 2)

    args = [torch.randn(B, H, n, D) for n in (M, N, N)]
    compiled = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))
    assert compiled(*args).stride() == f(*args).stride()


class Channels(torch.nn.Module):
    """Channels attend to channels: the rows of the products are as long as the sequence."""

    def forward(self, qkv):
        q, k, v = qkv.unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 4, 1)
        return sm(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) @ v


def test_a_size_that_is_marked_dynamic_stays_free():
    compiled = torch.compile(Channels(), backend=flash_fx.make_backend(inner="aot_eager"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (20, 31):
            qkv = torch.randn(B, length, 36)
            torch._dynamo.mark_dynamic(qkv, 1)
            torch.testing.assert_close(compiled(qkv), Channels()(qkv))


def test_a_run_time_head_dim_of_an_exported_program_stays_free():
    qkv = torch.randn(B, 20, 36)
    exported = torch.export.export(Channels(), (qkv,), dynamic_shapes=({1: torch.export.Dim("length", max=512)},))
    report = flash_fx.rewrite(exported)
    assert [s.reason for s in report.sites] == ["head-dim"]
    longer = torch.randn(B, 31, 36)
    torch.testing.assert_close(exported.module()(longer), Channels()(longer))
