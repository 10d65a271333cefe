"""Hugging Face Accelerate: its `Accelerator`, with Terrazzo's engine behind it.

from terrazzo.integrations.accelerate import Accelerator  # the only line that changes

accelerator = Accelerator(plan="zero3")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from terrazzo.integrations.accelerate.accelerator import Accelerator
from terrazzo.integrations.accelerate.local_sgd import refuse_local_sgd

__all__ = ["Accelerator"]

refuse_local_sgd(Accelerator)
