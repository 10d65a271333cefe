"""Megatron-LM's arguments, in a shell script, a file of arguments, or as keys of YAML."""

from terrazzo.dialects.formats.megatron.dialect import Megatron

__all__ = ["Megatron"]
