"""Hugging Face Accelerate: its `Accelerator`, with Terrazzo's engine behind it.

from terrazzo.integrations.accelerate import Accelerator  # the only line that changes

accelerator = Accelerator(plan="zero3")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Taken and refused:

    requested    what a script and its launcher ask of the engine, from every place that Accelerate looks at
    local_sgd    `LocalSGD`, which is refused

Built:

    accelerator  the `Accelerator`: models and optimizers are sharded and not wrapped
    optimizer    Accelerate's wrapper around the optimizer of a sharded model

Translated:

    checkpoints  Accelerate's checkpoint folder, with Terrazzo's checkpoints inside

Changed:

    on import               `LocalSGD.__init__`, which refuses an Accelerator of this class (`local_sgd`)
    as one is made          a process group of this process alone, if there is none (`accelerator`)
    until it is made        os.environ without what would start another engine (`requested.hidden`)
    of that Accelerator     `scaler` is None
    of the process          Accelerate's `GradientState`, which all Accelerators share, has the number of micro-batches
                            that the configuration says (`accelerator`)
    in save_state and       `_models`, `_optimizers` and hooks of the Accelerator, without what is sharded
    load_state              (`checkpoints`)
"""

from terrazzo.integrations.accelerate.accelerator import Accelerator
from terrazzo.integrations.accelerate.local_sgd import refuse_local_sgd

__all__ = ["Accelerator"]

refuse_local_sgd(Accelerator)
