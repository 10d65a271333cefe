"""torchtitan's `Trainer.Config`, as the mapping that its `save_config_file` writes."""

from terrazzo.dialects.formats.torchtitan.dialect import Torchtitan

__all__ = ["Torchtitan"]
