"""Logits and loss: bytes of what lies between the last block and the gradient of the logits."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.nn.chunked_cross_entropy import PRODUCT_NUMEL, chunk_rows
from terrazzo.planner.figures import Formula
from terrazzo.planner.memory.block_setting import FP32_BYTES
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "HeadActivations", "head_activations"]

FORMULAS = {
    "memory.logits": Formula(
        "tokens x vocabulary / tp x bytes per logit, and inputs of the last norm and the head. At the loss 12 bytes: "
        "log-softmax in fp32, its gradient and that of the logits; of parts of the vocabulary or fused the "
        "logits and one fp32 copy. Upper: 16, where the logits and their copy in fp32 are held on to. In the head's "
        "backward the gradient of the logits alone. Chunked: 8 bytes per logit of one chunk, and kept until then the "
        "gradients of the head's input and, in fp32, of its weight",
        "torch.nn.functional.cross_entropy, aten nll_loss and log_softmax; 14 bytes measured of 256,000 logits (arXiv "
        "2411.09009); NVIDIA/Megatron-LM cross_entropy.py; terrazzo.nn.linear_cross_entropy",
    ),
}

CHUNKED_BYTES = 8
"""Bytes per logit of a chunk: itself, an fp32 copy, and its gradient in 16 bits, or in fp32 in place of the copy."""


@dataclass(frozen=True)
class HeadActivations:
    """Bytes on the last rank along pp for one micro-batch.

    Attributes:
        loss: inputs of the last norm and the head, logits, and what the loss keeps and makes of them, at most. It is no
            part of a block, so that compiled blocks change nothing of it.
        loss_upper: the same where who wrote the loss holds on to what it is made of: the logits, their fp32 copy, its
            log-softmax, and the gradients of both.
        logits: the part of these that is there in the head's backward: its inputs and the gradient of the logits.
        saved: the part of these that waits for a backward which does not follow at once.
    """

    loss: float
    loss_upper: float
    logits: float
    saved: float

    @property
    def loss_extra(self) -> float:
        """What the loss may take more than expected."""
        return self.loss_upper - self.loss


def head_activations(setup: Setup) -> HeadActivations:
    """What lies between the last block and the gradient of the logits."""
    tokens, item = setup.rank_tokens, setup.precision.compute.itemsize
    parts = 1 if setup.puts_logits_together else setup.mesh.tp
    inputs = float(tokens * setup.model.hidden * (FP32_BYTES + 2 * item))
    if setup.loss == "chunked":
        return _chunked(setup, tokens, inputs, parts)
    logits = tokens * setup.model.logits / parts
    copied, plain = item + FP32_BYTES, max(item + 2 * FP32_BYTES, 3 * FP32_BYTES)
    usual = plain if setup.loss == "full" else copied
    inputs += logits * item if setup.model.capped else 0.0  # the tanh of a soft cap
    return HeadActivations(
        loss=inputs + logits * usual,
        loss_upper=inputs + logits * (2 * item + 3 * FP32_BYTES if setup.loss == "full" else copied),
        logits=inputs + logits * item,
        saved=inputs + logits * FP32_BYTES,
    )


def _chunked(setup: Setup, tokens: int, inputs: float, parts: int) -> HeadActivations:
    """Bytes of a loss that never has all logits. The head's weight is taken to be trained where all weights are."""
    item, model = setup.precision.compute.itemsize, setup.model
    weight = model.logits / parts * model.hidden if model.trainable_numel == model.numel else 0
    product = 0 if item >= FP32_BYTES else FP32_BYTES if setup.cluster.device.kind == "cuda" else item
    saved = inputs + tokens * model.hidden * item + weight * FP32_BYTES
    chunk = min(tokens, chunk_rows(tokens, model.logits)) * model.logits / parts * CHUNKED_BYTES
    loss = saved + chunk + min(weight, PRODUCT_NUMEL) * product
    return HeadActivations(loss=loss, loss_upper=loss, logits=saved, saved=saved)
