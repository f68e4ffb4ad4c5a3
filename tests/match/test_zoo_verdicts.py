# ruff: noqa: E501  (the messages of reports are one line each)
"""Every row of the zoo through capture and matching: verdict, number of sites, reason and program."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import TestCase
from zoo import BY_NAME, CASES, Case

from flash_fx.match import lift
from flash_fx.reject import Reason
from flash_fx.report import Report
from flash_fx.testing import capture_rewrites


def report_of(case: Case, *, dynamic: bool) -> Report:
    torch._dynamo.reset()
    fn, args = case.build()
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        return capture_rewrites(fn, *args)[2]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_verdict(case: Case, dynamic: bool) -> None:
    report = report_of(case, dynamic=dynamic)
    status = {"fuse": "fused", "leave": "left"}[case.verdict]
    assert [(s.status, s.reason) for s in report.sites] == [(status, case.reason)] * case.sites, str(report)
    if case.verdict == "fuse":
        wanted = case.dynamic_program if dynamic and case.dynamic_program else case.program
        assert tuple(s.program for s in report.sites) == wanted
    assert all(re.fullmatch(r".*zoo\.py:\d+", s.location) for s in report.sites)


def test_few_queries_in_float32_are_left_where_that_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose units gain nothing by tiles of queries; shared keys are read once in a fused kernel."""
    monkeypatch.setattr(lift, "is_slow_for_few_queries", lambda dtype, device: dtype is torch.float32)

    def reasons(m: int, hk: int, dtype: torch.dtype = torch.float32) -> list[str | None]:
        def attention(q, k, v):
            k, v = (t.repeat_interleave(4 // hk, 1) for t in (k, v))
            return (q @ k.mT * 0.25).softmax(-1) @ v

        torch._dynamo.reset()
        args = (torch.randn(2, h, length, 16, dtype=dtype) for h, length in ((4, m), (hk, 40), (hk, 40)))
        return [s.reason for s in capture_rewrites(attention, *args)[2].sites]

    assert reasons(1, 4) == reasons(16, 4) == ["cost"]
    assert reasons(17, 4) == reasons(1, 2) == reasons(1, 4, torch.bfloat16) == [None]


def test_every_fused_row_states_its_program() -> None:
    assert [c.name for c in CASES if c.verdict == "fuse" and c.program is None] == []


def test_the_table_shows_every_reason() -> None:
    shown = {c.reason for c in CASES}
    # no small function shows these
    elsewhere = {Reason.DEVICE, Reason.INTERNAL, Reason.OPERAND, Reason.MUTATED}
    assert {r.code for r in Reason if r not in elsewhere} <= shown


class TestReportText(TestCase):
    """What a person reads, for a few rows."""

    def text(self, name: str) -> str:
        return re.sub(r"zoo\.py:\d+", "zoo.py:LINE", str(report_of(BY_NAME[name], dynamic=False)))

    def test_fused(self) -> None:
        self.assertExpectedInline(
            self.text("mask_and_bias"),
            """\
1 fused, 0 left
fused zoo.py:LINE float32 [2, 3, 17, 16] [2, 3, 13, 16] [2, 3, 13, 16]
  program: score = score * 0.25 + c0[h, q_idx, kv_idx]; keep = c1[b, 0, q_idx, kv_idx]""",
        )

    def test_grouped_heads(self) -> None:
        self.assertExpectedInline(
            self.text("grouped_expand_reshape"),
            """\
1 fused, 0 left
fused zoo.py:LINE float32 [2, 6, 17, 16] [2, 2, 13, 16] [2, 2, 13, 16]
  program: score = score * 0.25""",
        )

    def test_no_program(self) -> None:
        self.assertExpectedInline(
            self.text("scale_none"),
            """\
1 fused, 0 left
fused zoo.py:LINE float32 [2, 3, 17, 16] [2, 3, 13, 16] [2, 3, 13, 16]
  program: (plain softmax)""",
        )

    def test_softmax_axis(self) -> None:
        self.assertExpectedInline(
            self.text("softmax_over_queries"),
            """\
0 fused, 1 left
left zoo.py:LINE float32 [2, 3, 13, 13]
  softmax-axis: the softmax does not run over the keys that are contracted with the values (dim -2 of (2, 3, 13, 13)); to fuse it, normalise over the key axis of the scores""",
        )

    def test_weights_used(self) -> None:
        self.assertExpectedInline(
            self.text("weights_in_a_loss"),
            """\
0 fused, 1 left
left zoo.py:LINE float32 [2, 3, 17, 13]
  weights-used: the attention scores or weights are also used elsewhere, so the full matrix is needed (by add); to fuse it, do not return or log the weights (for example output_attentions=False)""",
        )

    def test_gradient_stopped(self) -> None:
        self.assertExpectedInline(
            self.text("weights_detached"),
            """\
0 fused, 1 left
left zoo.py:LINE float32 [2, 3, 17, 13]
  gradient-stopped: a detach or no_grad inside the attention stops a gradient that the fused operator would let through (at detach); to fuse it, detach query and key before the product instead""",
        )

    def test_near_miss(self) -> None:
        self.assertExpectedInline(
            self.text("weights_accumulated_over_keys"),
            """\
0 fused, 1 left
left zoo.py:LINE float32 [2, 3, 17, 13]
  weight-not-pointwise: the softmax weights are changed by something other than dropout, a factor or a cast (through cumsum); to fuse it, multiply the weights by tensors only, before the value product""",
        )

    def test_nothing_found(self) -> None:
        self.assertExpectedInline(self.text("sigmoid_attention"), """0 fused, 0 left""")
