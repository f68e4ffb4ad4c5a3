"""Which path runs an operator on a device: generated Triton kernels, or tiled PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

TRITON_DEVICES = ("cuda", "xpu")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """True where the generated kernels run: GPUs, and CPU tensors under TRITON_INTERPRET=1."""
    if not _has_triton():
        return False
    return device.type in TRITON_DEVICES or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
