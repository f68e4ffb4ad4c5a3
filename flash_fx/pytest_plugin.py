"""pytest fixture `graph_snapshot`: `graph_snapshot(model, *args, expected=...)`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def graph_snapshot() -> Callable:
    """`flash_fx.testing.assert_rewrites` as a fixture."""
    from .testing import assert_rewrites

    return assert_rewrites
