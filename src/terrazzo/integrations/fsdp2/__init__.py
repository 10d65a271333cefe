"""`terrazzo.fully_shard`: torch's FSDP2 calls, module by module, with Terrazzo's engine behind them.

for block in model.layers:
    tz.fully_shard(block, **options)
tz.fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters())

Taken and refused:

    calls      `fully_shard`: marks modules, and keeps the arguments of each call
    requested  what the calls for one model ask of the engine

Built:

    sharding   shards the model when it first runs; takes over its optimizer in the first step

Translated:

    module     the methods of `FSDPModule` on a marked module
    units      single units by hand: gather, release, which backward reduces
    optimizer  the optimizer of a model that `fully_shard` has sharded
    states     state dicts of DTensors, as torch's

Changed, for good:

    fully_shard(module)    the module's class, to one derived from it and `FSDPModule`; `placements` of its parameters;
                           `generate`, if it has one; how it was marked, in its `__dict__` (`calls`)
    the first run          the root's class, to one with `FSDPRoot`; hooks that cast inputs and outputs (`sharding`)
    optimizer.step         the optimizer's class, to one with `FSDPOptimizer`, and its `state` (`optimizer`). The first
                           model that is sharded has every optimizer's step looked at (`on_unattached_step`)
"""

from terrazzo.integrations.fsdp2.calls import fully_shard
from terrazzo.integrations.fsdp2.module import FSDPModule, register_fsdp_forward_method

__all__ = ["FSDPModule", "fully_shard", "register_fsdp_forward_method"]
