"""Which attentions get a block map, and which of them share one: a model's layers mostly have the same mask."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from .match.site import Site
from .ops.device import uses_triton
from .score.blocks import BlockMask, block_mask
from .score.expr import Const

LEAST = 512  # below, an attention is over before its map is made


def wanted(site: Site, device: torch.device) -> BlockMask | None:
    """The mask to make a map of; None on devices without Triton, for short sequences, and where bounds are enough."""
    lengths = [site.dims["M"], site.dims["N"]]
    if not uses_triton(device) or any(isinstance(e, Const) and e.head < LEAST for e in lengths):
        return None
    return block_mask(site.program)


def identity(site: Site, mask: BlockMask) -> Hashable:
    """Equal for sites of one graph whose maps are the same."""
    captures = tuple(site.captures[i] for i in mask.captures)
    return str(mask.program), captures, site.sizes, *(site.dims[k] for k in ("B", "H", "M", "N"))
