"""Arguments of torch's `FullyShardedDataParallel` (FSDP1), as a mapping of names."""

from terrazzo.dialects.formats.fsdp1.dialect import FSDP1

__all__ = ["FSDP1"]
