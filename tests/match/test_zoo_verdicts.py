"""Every row of the zoo through capture and matching: verdict, number of sites, reason and program."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import TestCase
from zoo import BY_NAME, CASES, Case

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


def test_every_fused_row_states_its_program() -> None:
    assert [c.name for c in CASES if c.verdict == "fuse" and c.program is None] == []


def test_the_table_shows_every_reason() -> None:
    shown = {c.reason for c in CASES}
    elsewhere = {Reason.DEVICE, Reason.INTERNAL}  # need two devices, and a fault in flash_fx
    assert {r.code for r in Reason if r not in elsewhere} <= shown


class TestReportText(TestCase):
    """What a person reads, for a few rows."""

    def text(self, name: str) -> str:
        return re.sub(r"zoo\.py:\d+", "zoo.py:LINE", str(report_of(BY_NAME[name], dynamic=False)))

    def test_fused(self) -> None:
        self.assertExpectedInline(self.text("mask_and_bias"), """""")

    def test_grouped_heads(self) -> None:
        self.assertExpectedInline(self.text("grouped_expand_reshape"), """""")

    def test_no_program(self) -> None:
        self.assertExpectedInline(self.text("scale_none"), """""")

    def test_softmax_axis(self) -> None:
        self.assertExpectedInline(self.text("softmax_over_queries"), """""")

    def test_weights_used(self) -> None:
        self.assertExpectedInline(self.text("weights_in_a_loss"), """""")

    def test_gradient_stopped(self) -> None:
        self.assertExpectedInline(self.text("weights_detached"), """""")

    def test_mutated(self) -> None:
        self.assertExpectedInline(self.text("query_changed_between"), """""")

    def test_nothing_found(self) -> None:
        self.assertExpectedInline(self.text("sigmoid_attention"), """""")
