"""Lightning on Terrazzo's engine: `strategy="terrazzo"`, once this module has been imported.

import terrazzo.integrations.lightning

trainer = Trainer(strategy="terrazzo", devices=8)
trainer = Trainer(strategy=TerrazzoStrategy(plan="zero2", units=["Block"]), precision="bf16-mixed", devices=8)

fabric = Fabric(strategy="terrazzo", devices=8)
fabric = Fabric(strategy=terrazzo.integrations.lightning.fabric.TerrazzoStrategy(plan="zero2"), devices=8)

Taken and refused:

    sharded_strategy   what both strategies share: the options of `tz.shard`, and ranks
    precision          Lightning's `precision`: the engine casts and scales, steps and clipping are left

Built:

    trainer            the Trainer's strategy
    fabric             Fabric's strategy

Translated:

    checkpoint_folder  checkpoints as folders, under the names that Lightning and Fabric give; files that they wrote
    plain_state        the part of a checkpoint that is not tensors, as JSON

Changed, for good:

    on import               "terrazzo" in the strategy registries of the Trainer and of Fabric
    when processes start    the rank that Lightning's `rank_zero_only` goes by (`sharded_strategy`)
    of Trainer and Fabric   the precision plugin, which is replaced by one that casts and scales nothing (`precision`)
    of a LightningModule    `_terrazzo_sharded` in its `__dict__`, True once it is sharded, by which another Trainer
                            refuses it; `forward`, which then goes through the sharded root (`trainer.root`)
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from terrazzo.integrations.lightning import fabric
from terrazzo.integrations.lightning.trainer.strategy import TerrazzoStrategy

__all__ = ["TerrazzoStrategy", "fabric"]

for _registry, _strategy in ((StrategyRegistry, TerrazzoStrategy), (STRATEGY_REGISTRY, fabric.TerrazzoStrategy)):
    _registry.register(
        "terrazzo", _strategy, description="Terrazzo's engine: any ZeRO stage or FSDP strategy", override=True
    )
