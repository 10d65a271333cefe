"""A quantization config of transformers as the precision that keeps a frozen base so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from terrazzo.engine import DTYPES, FrozenFormat, Precision
from terrazzo.errors import BadInput
from terrazzo.messages import listed
from terrazzo.words import dtype_named

__all__ = ["precision_of"]


def precision_of(quantization: object, precision: Precision | str = "bf16") -> Precision:
    """The precision that keeps a frozen base as a `BitsAndBytesConfig` of transformers says, for `tz.shard`.

    The model itself is loaded without that config: what it says of storage is done when weights are sharded.

    Args:
        quantization: the config, or a mapping of its keys, such as the `quantization_config` of a config.json.
        precision: of all else, but for `compute`, which is `bnb_4bit_compute_dtype` where that is given; in fp16 the
            loss is scaled.

    Raises:
        BadInput: no config, 8 bits, FP4, a dtype to compute in that is none, or modules that are left out by name.
    """
    if not isinstance(quantization, Mapping) and not hasattr(quantization, "__dict__"):
        raise BadInput(
            f"precision_of was given {quantization!r}: pass a BitsAndBytesConfig, or a mapping of its keys. A model "
            "without one is not quantized, and has the precision that tz.shard is given."
        )
    keys = quantization if isinstance(quantization, Mapping) else vars(quantization)
    config = {key.removeprefix("_"): value for key, value in keys.items()}
    if not config.get("load_in_4bit"):
        raise BadInput(
            "This quantization config does not have load_in_4bit, and a base is kept in 4 bits alone: set it."
        )
    if (kind := config.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise BadInput(
            f"bnb_4bit_quant_type is {kind!r} (fp4 unless it is given), and a base is kept in NF4 alone: set it to "
            "'nf4'."
        )
    if skipped := config.get("llm_int8_skip_modules"):
        raise BadInput(
            f"llm_int8_skip_modules names {listed([*map(repr, skipped)], 5)}, and here what lies outside of the blocks "
            "is left in 16 bits, such as the head, and nothing else by name: leave it out."
        )
    form = FrozenFormat.NF4_DOUBLE if config.get("bnb_4bit_use_double_quant") else FrozenFormat.NF4
    base = Precision.named(precision) if isinstance(precision, str) else precision
    compute = config.get("bnb_4bit_compute_dtype") or base.compute
    if not isinstance(compute, torch.dtype):
        if (name := dtype_named(compute)) not in DTYPES:
            raise BadInput(f"bnb_4bit_compute_dtype is {compute!r}, expected one of {', '.join(DTYPES)}.")
        compute = DTYPES[name]
    scaling = Precision.named("fp16").loss_scaling if compute == torch.float16 else None
    return replace(base, frozen=form, compute=compute, loss_scaling=base.loss_scaling or scaling)
