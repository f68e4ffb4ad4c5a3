"""Every error a caller can meet. Each message says what was wrong, what was expected and what to do."""

from __future__ import annotations


class FlashFxError(Exception):
    """Base of all errors raised by flash_fx."""


class ProgramError(FlashFxError, ValueError):
    """A score program cannot be parsed, or uses something its context does not offer."""


class OperandError(FlashFxError, ValueError):
    """query, key, value or a capture has a rank, shape, dtype or device the operator does not take."""


class OptionError(FlashFxError, TypeError):
    """An option is unknown or has a value outside its domain."""


class NothingFusedError(FlashFxError, RuntimeError):
    """Raised under ``strict=True`` when a compiled graph had no attention that could be fused."""


class TargetError(FlashFxError, ValueError):
    """A command-line target does not name a callable that can be explained."""
