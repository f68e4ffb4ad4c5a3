"""The operators: `torch.library` entries whose schema tells the truth. Triton is imported when one runs, not before."""

from .attention import attention

__all__ = ["attention"]
