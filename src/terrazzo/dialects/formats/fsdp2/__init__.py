"""Arguments of torch's `fully_shard` (FSDP2), its policies, and the calls on an `FSDPModule`, as a mapping of names."""

from terrazzo.dialects.formats.fsdp2.dialect import FSDP2

__all__ = ["FSDP2"]
