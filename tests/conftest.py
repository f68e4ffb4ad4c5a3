"""Dynamo starts afresh for every test; tests marked gpu need a CUDA device."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test sees another's compiled code or recompile count."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
