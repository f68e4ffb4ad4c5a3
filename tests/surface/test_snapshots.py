"""The readable rewritten graph of common spellings, through the API we offer to users."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flash_fx
from flash_fx.testing import GraphSnapshotTestCase, assert_rewrites, capture_rewrites, graph_text


def qkv(*shape):
    return torch.zeros(3, *shape).unbind()


class TestSpellings(GraphSnapshotTestCase):
    def test_plain(self):
        def attention(q, k, v):
            return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1) @ v

        report = self.assertRewrites(
            attention,
            *qkv(2, 4, 16, 64),
            expected="""\
attention = flash_fx.attention(q, k, v, [], [], None, 'score = score / 8.0', False)
getitem = getitem(attention, 0)
return (getitem,)""",
        )
        self.assertEqual(report.fused, 1)

    def test_causal_made_in_forward(self):
        def attention(q, k, v):
            scores = torch.matmul(q, k.mT) * 0.125
            future = torch.ones(16, 16, dtype=torch.bool).triu(1)
            return torch.matmul(F.softmax(scores.masked_fill(future, float("-inf")), dim=-1), v)

        self.assertRewrites(
            attention,
            *qkv(2, 4, 16, 64),
            expected="""\
attention = flash_fx.attention(q, k, v, [], [], None, 'score = score * 0.125; keep = kv_idx <= q_idx', False)
getitem = getitem(attention, 0)
return (getitem,)""",
        )

    def test_einsum_in_user_layout(self):
        def attention(q, k, v):
            weights = torch.einsum("bmhd,bnhd->bhmn", q * 0.125, k).softmax(dim=-1)
            return torch.einsum("bhmn,bnhd->bmhd", weights, v)

        self.assertRewrites(
            attention,
            *qkv(2, 16, 4, 64),
            expected="""\
mul = mul(q, 0.125)
permute = aten.permute(mul, [0, 2, 1, 3])
permute_1 = aten.permute(k, [0, 2, 1, 3])
permute_2 = aten.permute(v, [0, 2, 1, 3])
attention = flash_fx.attention(permute, permute_1, permute_2, [], [], None, '', False)
getitem = getitem(attention, 0)
permute_3 = aten.permute(getitem, [0, 2, 1, 3])
return (permute_3,)""",
        )

    def test_additive_mask_and_float32_softmax(self):
        def attention(q, k, v, mask):
            scores = q @ k.transpose(2, 3) * 0.125 + mask
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            return weights @ v

        inputs = [t.bfloat16() for t in (*qkv(2, 4, 16, 64), torch.zeros(2, 1, 16, 16))]
        self.assertRewrites(
            attention,
            *inputs,
            expected="""\
attention = flash_fx.attention(q, k, v, [mask], [], None, 'score = score * 0.125 + c0[b, 0, q_idx, kv_idx]', False)
getitem = getitem(attention, 0)
return (getitem,)""",
        )

    def test_bmm_with_grouped_heads(self):
        def attention(q, k, v):
            k = k.repeat_interleave(4, dim=1)
            v = v.repeat_interleave(4, dim=1)
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v

        q, k, v = torch.zeros(2, 8, 16, 64), torch.zeros(2, 2, 16, 64), torch.zeros(2, 2, 16, 64)
        self.assertRewrites(
            attention,
            q,
            k,
            v,
            expected="""\
attention = flash_fx.attention(q, k, v, [], [], None, '', False)
getitem = getitem(attention, 0)
return (getitem,)""",
        )

    def test_module_with_buffer_and_dropout(self):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("tril", torch.ones(32, 32).tril())
                self.drop = nn.Dropout(0.25)

            def forward(self, q, k, v):
                t = q.size(-2)
                scores = (q @ k.transpose(-2, -1)).masked_fill(self.tril[:t, :t] == 0, float("-inf"))
                return self.drop(scores.softmax(-1)) @ v

        self.assertRewrites(
            Attention(),
            *qkv(2, 4, 16, 64),
            expected="""\
low = aten.randint.low(0, 4611686018427387904, [2], dtype=int64, device='cpu')
attention = flash_fx.attention(q, k, v, [tril], [], low, 'keep = c0[q_idx, kv_idx] != 0.0; drop = 0.25', False)
getitem = getitem(attention, 0)
return (getitem,)""",
        )

    def test_left_alone(self):
        def attention(q, k, v):
            weights = (q @ k.transpose(-2, -1)).softmax(-1)
            return weights @ v, weights

        report = self.assertRewrites(
            attention,
            *qkv(2, 4, 16, 64),
            expected="""\
transpose = Tensor.transpose(k, -2, -1)
matmul = matmul(q, transpose)
softmax = Tensor.softmax(matmul, -1)
matmul_1 = matmul(softmax, v)
return (matmul_1, softmax)""",
        )
        self.assertEqual([s.reason for s in report.sites], ["weights-used"])


def test_assert_rewrites_function():
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    inputs = qkv(2, 4, 16, 64)
    report = assert_rewrites(
        attention,
        *inputs,
        expected="""\
attention = flash_fx.attention(q, k, v, [], [], None, '', False)
getitem = getitem(attention, 0)
return (getitem,)""",
    )
    assert report.fused == 1


def test_a_difference_fails():
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    with pytest.raises(AssertionError):
        flash_fx.testing.assert_rewrites(attention, *qkv(2, 4, 16, 64), expected="nothing of the kind")


def test_capture_gives_before_and_after():
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    before, after, report = capture_rewrites(attention, *qkv(2, 4, 16, 64))
    assert len(before) == len(after) == 1
    assert "softmax" in graph_text(before)
    assert "softmax" not in graph_text(after)
    assert report.fused == 1


SNAPSHOT_TEST = '''
import torch
from flash_fx.testing import assert_rewrites

def attention(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v

def test_function():
    assert_rewrites(attention, *torch.zeros(3, 2, 4, 16, 64), expected="""""")

def test_fixture(graph_snapshot):
    graph_snapshot(attention, *torch.zeros(3, 2, 4, 16, 64), expected="""""")
'''


def test_accept_writes_the_snapshot(tmp_path, monkeypatch):
    """The recipe of the README: run with EXPECTTEST_ACCEPT=1 once, then without."""
    (tmp_path / "test_mine.py").write_text(SNAPSHOT_TEST)
    monkeypatch.setenv("PYTHONPATH", str(Path(flash_fx.__file__).parents[1]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    if not _plugin_installed():
        command += ["-p", "flash_fx.pytest_plugin"]
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "test_mine.py").read_text().count("flash_fx.attention(") == 2


def _plugin_installed() -> bool:
    from importlib.metadata import entry_points

    return any(e.value == "flash_fx.pytest_plugin" for e in entry_points(group="pytest11"))
