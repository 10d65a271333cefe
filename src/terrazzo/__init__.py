"""Terrazzo: one sharded-training engine for PyTorch.

    import terrazzo as tz

    model, optimizer = tz.shard(model, optimizer, plan="zero3", precision="bf16")

Every ZeRO stage and FSDP strategy is a row of one table; see `tz.Plan`. What a run takes is known before: `tz.plan`.

Packages and modules, from the ground up; each imports from its own line and those above:

    exit_codes       with which code a process ends, and what that means
    errors           the error tree
    messages         what messages are made of; warnings
    given_numbers    what counts as a number among arguments
    name_globs       which names a glob means
    words            words that configurations and code share
    shell_command    how users start this package
    lazy             names that are imported when they are first asked for
    marks            attributes on objects of others

    files            files replaced as a whole, and file systems behind URLs
    untrusted_files  files of strangers
    processes        how they end, with whom, and who may ask them
    documents        YAML, JSON and TOML, read strictly
    nn, optim        losses, 8-bit linear layers, optimizers

    engine           shards a model and its optimizer, and runs their step
    exchange, hosts  plain values that ranks exchange, and ranks of one host
    parallel         tensor, pipeline, context and expert parallelism
    config           the configuration of `terrazzo train`

    checkpoint       saving, loading, verifying, converting
    planner          memory, traffic and time, before anything runs
    dialects         configurations of other libraries
    telemetry        where the time of a step goes, and what ranks do

    launch           starts ranks, looks after them, starts them again
    integrations     Trainer, Accelerate, Lightning, DeepSpeed's and FSDP2's calls
    train            trains what a configuration describes
    cli              the command line
"""

from terrazzo.processes import ending, tether  # noqa: F401  first: who the parent is, before seconds of imports

# isort: split
from typing import TYPE_CHECKING

from terrazzo import checkpoint
from terrazzo.errors import (
    BadInput,
    ConnectionLost,
    Corrupted,
    Damaged,
    Diverged,
    Misuse,
    RanksApart,
    SaveFailed,
    SwapFailed,
    TerrazzoError,
    TimedOut,
)
from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo import nn, optim, parallel, telemetry
    from terrazzo.checkpoint.exporters.full_state import full_state_dict
    from terrazzo.checkpoint.exporters.pretrained import save_pretrained
    from terrazzo.engine import (
        EMA,
        DiLoCo,
        LossScaling,
        Offload,
        Place,
        Plan,
        Precision,
        accumulate,
        attach,
        clip_grad_norm_,
        gathered,
        register_forward_method,
        shard,
    )
    from terrazzo.integrations.deepspeed import initialize
    from terrazzo.integrations.fsdp2 import fully_shard
    from terrazzo.parallel import Pipeline, parallelize, step
    from terrazzo.parallel.mesh import mesh
    from terrazzo.planner.api import plan
else:
    __getattr__, __dir__ = lazily(__name__)

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "BadInput",
    "ConnectionLost",
    "Corrupted",
    "Damaged",
    "DiLoCo",
    "Diverged",
    "LossScaling",
    "Misuse",
    "Offload",
    "Pipeline",
    "Place",
    "Plan",
    "Precision",
    "RanksApart",
    "SaveFailed",
    "SwapFailed",
    "TerrazzoError",
    "TimedOut",
    "__version__",
    "accumulate",
    "attach",
    "checkpoint",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "gathered",
    "initialize",
    "mesh",
    "nn",
    "optim",
    "parallel",
    "parallelize",
    "plan",
    "register_forward_method",
    "save_pretrained",
    "shard",
    "step",
    "telemetry",
]
