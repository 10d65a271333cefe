"""`deepspeed.ops`: the optimizers that scripts build themselves.

adam  torch's AdamW and Adam under DeepSpeed's names
"""

from terrazzo.integrations.deepspeed.absent import absent_names
from terrazzo.integrations.deepspeed.ops import adam

__all__ = ["adam"]

__getattr__ = absent_names(__name__)
