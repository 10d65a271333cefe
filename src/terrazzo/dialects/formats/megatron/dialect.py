"""Megatron-LM's arguments, as a shell script gives them to its programs, or as keys of YAML.

A key is an argument without its dashes, `tensor-model-parallel-size`; `--tensor-model-parallel-size` and
`tensor_model_parallel_size` are read as the same. What torchrun is given before the program is below `torchrun`.
"""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import (
    NO_CONTEXT,
    ConfigDocument,
    Dialect,
    Finding,
    Reading,
    ReadingContext,
    Writing,
)
from terrazzo.dialects.formats.megatron.findings import findings
from terrazzo.dialects.formats.megatron.keys import KEYS, LAUNCHER, canonical
from terrazzo.dialects.formats.megatron.read import read
from terrazzo.dialects.formats.megatron.write import write

__all__ = ["Megatron"]

_SHARED = {"bf16", "fp16", "seed", "optimizer", "lr", "save", "load", "spec", "profile", "replication", "split", "sft"}
"""Arguments whose names are keys elsewhere, too."""


class Megatron(Dialect):
    """The arguments of `pretrain_gpt.py` and its kin."""

    name = "megatron"
    title = "Megatron-LM"
    suffix = ".sh"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has more known arguments than unknown ones, and one at least that no other library has."""
        known = {canonical(str(key)) for key in document} & (set(KEYS) | {LAUNCHER})
        return bool(known - _SHARED) and 2 * len(known) > len(document)

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        return findings(document, reading)
