"""Options of the backend and the pass. A frozen value: it is hashed into cache keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import OptionError

INNER_BACKENDS = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class Options:
    """What a user can choose.

    `strict`             raise NothingFusedError when a compiled model had no site fused
    `inductor_patterns`  leave Inductor's own attention patterns on. They are off by default: after this pass only graphs
                         that must be left alone still hold a softmax between two products, and on those some of the
                         patterns give wrong results (softmax over another axis, an ignored divisor).
    `deterministic`      gradients have the same bits every time. False lets cuDNN compute those of what is exactly
                         scaled_dot_product_attention on Hopper: about a fifth faster, with sums in any order.
                         `torch.use_deterministic_algorithms(True)` has the last word.
    """

    strict: bool = False
    inductor_patterns: bool = False
    deterministic: bool = True

    @classmethod
    def make(cls, **values: Any) -> Options:
        """Options by keyword. Raises OptionError on an unknown name or a value that is not a bool."""
        known = {f.name for f in fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise OptionError(f"unknown option {key!r}; known options are {', '.join(sorted(known))}")
            if not isinstance(value, bool):
                raise OptionError(f"option {key!r} must be True or False, got {value!r}")
        return cls(**values)


DEFAULT = Options()
