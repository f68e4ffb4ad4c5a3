"""The operators: `torch.library` entries whose schema tells the truth. Triton is imported when one runs, not before."""

from ..scatter import sum_by_index
from .attention import attention

__all__ = ["attention", "sum_by_index"]
