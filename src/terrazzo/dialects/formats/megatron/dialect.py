"""The record of Megatron-LM's arguments, and how such a document is recognised.

A key is an argument without its dashes, `tensor-model-parallel-size`; `--tensor-model-parallel-size` and
`tensor_model_parallel_size` are read as the same. What torchrun is given before the program is below `torchrun`.
"""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.formats.megatron.findings import findings
from terrazzo.dialects.formats.megatron.keys import KEYS, LAUNCHER, canonical
from terrazzo.dialects.formats.megatron.read import read
from terrazzo.dialects.formats.megatron.write import write

__all__ = ["DIALECT"]

_SHARED = {"bf16", "fp16", "seed", "optimizer", "lr", "save", "load", "spec", "profile", "replication", "split", "sft"}
"""Arguments whose names are keys elsewhere, too."""


def recognises(document: ConfigDocument) -> bool:
    """Whether it has more known arguments than unknown ones, and one at least that no other library has."""
    known = {canonical(str(key)) for key in document} & (set(KEYS) | {LAUNCHER})
    return bool(known - _SHARED) and 2 * len(known) > len(document)


DIALECT = Dialect(
    name="megatron",
    title="Megatron-LM",
    suffix=".sh",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
    program="pretrain_gpt.py",
)
