"""DeepSpeed's interface on Terrazzo's engine: `import terrazzo.integrations.deepspeed as deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds.json", ...)

A script that says `import deepspeed` itself runs unchanged under

    torchrun --nproc-per-node 2 -m terrazzo.integrations.deepspeed script.py --its arguments

Taken and refused, before anything starts; what is lost without changing results is said once, on rank 0:

    requested    the JSON, read by its dialect
    absent       names of DeepSpeed that are imported and refused when used

Built:

    api          `initialize` and `add_config_arguments`
    optimizers   the optimizer that the JSON asks for
    runtime      the engine that `initialize` returns, its loader and its schedules

Translated:

    answers      what a script may ask the engine about its configuration
    checkpoints  folders in DeepSpeed's order, in Terrazzo's format
    zero         `deepspeed.zero`: contexts around building a model and reading its weights
    comm         `deepspeed.comm`: torch.distributed, and the start of it
    accelerator  `deepspeed.accelerator`: the device of this process
    ops          `deepspeed.ops`: optimizers that scripts build themselves
    utils        `deepspeed.utils`: logging, and a loader without an end

Changed, for good:

    with `python -m`   `deepspeed` and all below it in sys.modules and sys.meta_path, sys.argv, sys.path (`__main__`)
    init_distributed   RANK, WORLD_SIZE and their like in os.environ where they are missing, and the GPU (`comm`)
    initialize         `args.local_rank`; a process group is started, if there is none; parameters and buffers are cast
                       as DeepSpeed does, before they are sharded (`api`); the optimizer's param groups lose empty ones
    a schedule         rates and betas of the optimizer's param groups (`runtime.lr_schedules`)
"""

from terrazzo.integrations.deepspeed import accelerator, comm, ops, runtime, utils, zero
from terrazzo.integrations.deepspeed.absent import absent_names
from terrazzo.integrations.deepspeed.accelerator import get_accelerator
from terrazzo.integrations.deepspeed.api import add_config_arguments, initialize
from terrazzo.integrations.deepspeed.comm import init_distributed
from terrazzo.integrations.deepspeed.runtime.engine import DeepSpeedEngine

__version__ = "0.19.8"
"""The release whose interface and defaults this is."""

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__getattr__ = absent_names(__name__)
