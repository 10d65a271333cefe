"""Hugging Face's TrainingArguments (transformers 5), as a mapping of their fields."""

from terrazzo.dialects.formats.trainer.dialect import TrainingArguments

__all__ = ["TrainingArguments"]
