"""Lightning's Trainer and its strategies (lightning 2.6), as LightningCLI's YAML or the Trainer's own arguments."""

from terrazzo.dialects.formats.lightning.dialect import Lightning

__all__ = ["Lightning"]
