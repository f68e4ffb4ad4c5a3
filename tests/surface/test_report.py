"""Reports: stable ASCII text and JSON with the same content."""

import json
import string

import pytest
import torch

import flash_fx
from flash_fx import Report, SiteReport
from flash_fx.reject import Reason, Reject


def attention(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.125).softmax(-1) @ v


def weights_too(q, k, v):
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v, weights


def qkv(*shape):
    return torch.randn(3, *shape).unbind()


def test_fused_text():
    report = flash_fx.explain(attention, *qkv(2, 4, 16, 8))
    head, first, second = str(report).split("\n")
    assert head == "1 fused, 0 left"
    assert first.startswith("fused test_report.py:")
    assert first.endswith(" float32 [2, 4, 16, 8] [2, 4, 16, 8] [2, 4, 16, 8]")
    assert second == "  program: score = score * 0.125"


def test_left_text_names_reason_and_hint():
    report = flash_fx.explain(weights_too, *qkv(2, 4, 16, 8))
    assert (report.fused, report.left) == (0, 1)
    (site,) = report.sites
    assert site.reason == "weights-used"
    assert Reason.WEIGHTS_USED.sentence in site.message
    assert Reason.WEIGHTS_USED.hint in site.message
    assert str(report).split("\n")[-1] == f"  weights-used: {site.message}"


def test_location_is_the_line_of_the_softmax():
    (site,) = flash_fx.explain(attention, *qkv(2, 4, 16, 8)).sites
    file, line = site.location.rsplit(":", 1)
    assert file.endswith("test_report.py")
    assert int(line) == attention.__code__.co_firstlineno + 1


def test_softmax_without_products_is_no_site():
    report = flash_fx.explain(lambda x: x.softmax(-1) * 2, torch.randn(4, 4))
    assert report.sites == []
    assert str(report) == "0 fused, 0 left"


def test_text_is_printable_ascii():
    site = SiteReport("left", "operand", "caf\u00e9 \u2192", "", "/x/d\u00e9mo.py:3", ("[1]",), "float32")
    assert set(str(Report([site]))) <= set(string.printable)
    assert "demo.py" not in str(Report([site]))


def test_text_holds_no_folder():
    assert str(SiteReport("fused", None, "", "", "/some/folder/model.py:3", ("[1]",), "float32")).startswith(
        "fused model.py:3 "
    )
    assert str(SiteReport("fused", None, "", "", "C:\\x\\model.py:3", ("[1]",), "float32")).startswith(
        "fused model.py:3 "
    )


def test_json_holds_the_same():
    report = flash_fx.explain(attention, *qkv(2, 4, 16, 8))
    read = json.loads(report.to_json())
    assert (read["fused"], read["left"]) == (1, 0)
    (site,) = read["sites"]
    assert set(site) == {"status", "reason", "message", "program", "location", "shapes", "dtype"}
    assert site["shapes"] == list(report.sites[0].shapes)


def test_text_is_repeatable():
    inputs = qkv(2, 4, 16, 8)
    first = str(flash_fx.explain(attention, *inputs))
    torch._dynamo.reset()
    assert str(flash_fx.explain(attention, *inputs)) == first


def test_explain_propagates_errors_of_the_function():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(Exception, match="mine"):
        flash_fx.explain(broken, torch.ones(2))


def test_reject_message():
    assert "(detail); to fuse it, " in Reject(Reason.DTYPE, None, "detail").message
    assert len({r.code for r in Reason}) == len(Reason)
