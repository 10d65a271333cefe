"""The record of DeepSpeed's JSON, and how such a document is recognised.

`ReadingContext.versions["deepspeed"]` says of which release it is; default: `versions.LAST`.
"""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.formats.deepspeed.findings import findings
from terrazzo.dialects.formats.deepspeed.keys import KEYS
from terrazzo.dialects.formats.deepspeed.read import read
from terrazzo.dialects.formats.deepspeed.write import write

__all__ = ["DIALECT"]

_TELLING = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")


def recognises(document: ConfigDocument) -> bool:
    """Whether it has keys that no other dialect has at the top, or a 16-bit section with its switch."""
    switches = (document.get(name) for name in ("fp16", "bf16", "bfloat16"))
    return any(key in document for key in _TELLING) or (
        any(isinstance(switch, dict) and "enabled" in switch for switch in switches)
    )


DIALECT = Dialect(
    name="deepspeed",
    title="DeepSpeed JSON",
    suffix=".json",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
)
