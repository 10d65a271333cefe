"""DeepSpeed's JSON: read with the defaults of a release, and written for one."""

from terrazzo.dialects.formats.deepspeed.dialect import DeepSpeed

__all__ = ["DeepSpeed"]
