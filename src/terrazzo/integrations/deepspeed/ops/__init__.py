"""`deepspeed.ops`: the optimizers that scripts build themselves."""

from terrazzo.integrations.deepspeed.ops import adam

__all__ = ["adam"]
