"""Hugging Face Accelerate's YAML, as `accelerate launch --config_file` reads it."""

from terrazzo.dialects.formats.accelerate.dialect import Accelerate

__all__ = ["Accelerate"]
