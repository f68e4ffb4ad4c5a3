"""Every spelling of softmax becomes one node: `_softmax(x, dim)`, or `_safe_softmax` where rows without a key give 0.

Works on the twin alone, before anything is searched for. Each file is one group of spellings and opens with them;
`looking` and `editing` serve all of them. A row-constant shift c may be of any kind.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..normalize import Twin, closure, example_value
from ..products import multiply_matrices
from .clean import drop_neutral, fill_constants, put_dimensions_back, replace_copies, replace_dropouts
from .columns import replace_columns
from .divided import replace_quotients
from .empty_rows import replace_guards
from .logarithms import replace_logarithms
from .quotients import quotient
from .shifts import drop_shifts
from .weight_sums import split_sums_of_weights

__all__ = ["canonicalise", "quotient"]


def canonicalise(twin: Twin) -> None:
    """Replace every recognised spelling in the twin; `twin.sinks` gets the extra terms of denominators."""
    for node in twin.stops & _before_gradients(twin):
        node.meta["stop"] = True
    rules = (
        fill_constants, replace_copies, drop_neutral, multiply_matrices, replace_dropouts, put_dimensions_back,
        replace_quotients, replace_logarithms, replace_columns, drop_shifts, replace_guards,
    )  # fmt: skip
    for rule in rules:
        rule(twin)
    split_sums_of_weights(twin)


def _before_gradients(twin: Twin) -> set[Node]:
    """What a tensor of the user's that requires a gradient is computed from: stops elsewhere, as in inference, stop nothing."""
    values = {entries[0][1]: example_value(user) for user, entries in twin.history.items()}
    needing = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad]
    return closure(a for n in needing for a in n.all_input_nodes)
