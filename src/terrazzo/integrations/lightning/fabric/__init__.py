"""Fabric on Terrazzo's engine: `Fabric(strategy="terrazzo")`, or with arguments as below.

from terrazzo.integrations.lightning.fabric import TerrazzoStrategy

fabric = Fabric(strategy=TerrazzoStrategy(plan="zero2", units=["Block"]), precision="bf16-mixed", devices=8)
"""

from terrazzo.integrations.lightning.fabric.strategy import TerrazzoStrategy

__all__ = ["TerrazzoStrategy"]
