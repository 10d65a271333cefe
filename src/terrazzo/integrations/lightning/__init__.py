"""Lightning on Terrazzo's engine: `Trainer(strategy="terrazzo")`, once this module has been imported.

import terrazzo.integrations.lightning

trainer = Trainer(strategy="terrazzo", devices=8)
trainer = Trainer(strategy=TerrazzoStrategy(plan="zero2", units=["Block"]), precision="bf16-mixed", devices=8)
"""

from lightning.pytorch.strategies import StrategyRegistry

from terrazzo.integrations.lightning.strategy import TerrazzoStrategy

__all__ = ["TerrazzoStrategy"]

StrategyRegistry.register(
    "terrazzo", TerrazzoStrategy, description="Terrazzo's engine: any ZeRO stage or FSDP strategy", override=True
)
