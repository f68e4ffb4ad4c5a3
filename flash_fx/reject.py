"""Why an attention that was seen is left alone. Every reason has a stable code, a sentence and a hint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Reason(Enum):
    """`code` is what `report.sites[i].reason` holds; `sentence` says what was found, `hint` what would make it fuse."""

    AXIS = (
        "softmax-axis",
        "the softmax does not run over the keys that are contracted with the values",
        "normalise over the key axis of the scores",
    )
    HEADS_MIXED = (
        "heads-mixed",
        "weights of several heads or batches are combined before they multiply the values",
        "nothing: the weights of all heads are needed at once",
    )
    WEIGHTS_USED = (
        "weights-used",
        "the attention scores or weights are also used elsewhere, so the full matrix is needed",
        "do not return or log the weights (for example output_attentions=False)",
    )
    SCORE = (
        "score-not-pointwise",
        "the scores are not a pointwise function of one query-key product and captured tensors",
        "keep operations that mix heads, queries or keys out of the scores",
    )
    WEIGHT = (
        "weight-not-pointwise",
        "the softmax weights are changed by something other than dropout, a factor or a cast",
        "multiply the weights by tensors only, before the value product",
    )
    EXPONENTIALS = (
        "exponentials",
        "exponentials of the scores are divided by something that is not certainly their sum",
        "use torch.softmax",
    )
    GRADIENT = (
        "gradient-stopped",
        "a detach or no_grad inside the attention stops a gradient that the fused operator would let through",
        "detach query and key before the product instead",
    )
    OPERAND = (
        "operand",
        "query, key or value cannot be written as a [batch, heads, length, head_dim] tensor",
        "use ordinary batched matmul operands",
    )
    HIDDEN = (
        "hidden",
        "the attention is part of one operation that cannot be taken apart",
        "write the two products as operations of their own",
    )
    TRANSFORMED = (
        "transformed",
        "the graph runs inside transforms of torch.func, such as vmap, jacrev or grad",
        "write the batch as a dimension instead of vmap, and differentiate outside of the compiled function",
    )
    MUTATED = (
        "mutated",
        "an operand or mask is changed in place between its use in the scores and the value product",
        "move the in-place change after the attention, or work on a copy",
    )
    DTYPE = (
        "dtype",
        "the dtype is not float32, bfloat16 or float16",
        "run the attention in a supported dtype",
    )
    HEAD_DIM = (
        "head-dim",
        "the head dimension is larger than the kernels take, or not a fixed number",
        "use head dimensions of at most 512, 256 in float32 on a GPU",
    )
    COST = (
        "cost",
        "a fused kernel would be slower, and the scores are small",
        "nothing: as it is it runs fastest",
    )
    DEVICE = ("device", "operands live on different devices", "move all operands to one device")
    DROPOUT = (
        "dropout",
        "the dropout on the weights is not ordinary inverted dropout",
        "use torch.nn.functional.dropout",
    )
    ONE_KEY = (
        "one-key",
        "there is at most one key, so the result is the value itself or nothing",
        "nothing can be gained here",
    )
    INTERNAL = ("internal", "flash_fx could not analyse this graph", "please report the model")

    def __init__(self, code: str, sentence: str, hint: str) -> None:
        self.code, self.sentence, self.hint = code, sentence, hint


@dataclass(frozen=True)
class Reject(Exception):
    """A site that is left alone. `node` is the deciding FX node where one is known; `detail` is formatted when printed."""

    reason: Reason
    node: Any = None
    detail: str = ""

    @property
    def message(self) -> str:
        extra = f" ({self.detail})" if self.detail else ""
        return f"{self.reason.sentence}{extra}; to fuse it, {self.reason.hint}"
