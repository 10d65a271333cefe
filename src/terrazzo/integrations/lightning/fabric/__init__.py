"""Fabric on Terrazzo's engine: `Fabric(strategy="terrazzo")`, or with arguments as below.

from terrazzo.integrations.lightning.fabric import TerrazzoStrategy

fabric = Fabric(strategy=TerrazzoStrategy(plan="zero2", units=["Block"]), precision="bf16-mixed", devices=8)

Its modules:

strategy    what Fabric asks of a strategy
checkpoint  what `fabric.save` and `fabric.load` are given
"""

from terrazzo.integrations.lightning.fabric.strategy import TerrazzoStrategy

__all__ = ["TerrazzoStrategy"]
