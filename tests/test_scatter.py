"""Sums by position: against the definition."""

from __future__ import annotations

import pytest
import torch

from flash_fx.scatter import ROWS, sum_by_diagonal, sum_by_index


@pytest.mark.parametrize("rows", [1, 3, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
@pytest.mark.parametrize("columns", [1, 7, 150])
def test_sum_by_diagonal(rows: int, columns: int) -> None:
    values = torch.randn(2, 3, rows, columns, dtype=torch.float64)
    wanted = [values.diagonal(d, -2, -1).sum(-1) for d in range(1 - rows, columns)]
    torch.testing.assert_close(sum_by_diagonal(values), torch.stack(wanted, -1))


def test_sum_by_index() -> None:
    values, index = torch.randn(50, 3, dtype=torch.float64), torch.arange(50) * 7 % 6
    wanted = torch.stack([values[index == i].sum(0) for i in range(8)])
    torch.testing.assert_close(sum_by_index(values, index, 8), wanted)
