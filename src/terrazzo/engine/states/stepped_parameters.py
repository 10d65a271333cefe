"""The parameters that one optimizer of a sharded model steps: their names, where each is, what is kept for it."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.stock.template import Template

__all__ = ["SteppedParameters"]


class SteppedParameters:
    """The parameters that one optimizer steps.

    Attributes:
        engine: of the model.
        optimizer: whose they are.
        driver: of the optimizer.
        located: by the name of each parameter, its bucket and its index there.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self.driver = next(driver for driver in engine.drivers if driver.reference() is optimizer)
        self.located: dict[str, tuple[Bucket, int]] = {
            member.name: (bucket, index)
            for bucket in self.driver.buckets
            for index, member in enumerate(bucket.members)
            if member.group in self.driver.groups.numbers
        }

    def named(self) -> list[tuple[nn.Parameter, str]]:
        """The parameters that the optimizer was built over, in its order, and their names."""
        members = [member for bucket in self.engine.buckets() for member in bucket.members]
        by_parameter = {id(member.parameter): member.name for member in members}
        return [
            (parameter, by_parameter[id(parameter)])
            for parameters in self.driver.groups.parameters
            for parameter in parameters
        ]

    def group_of(self, name: str) -> int:
        """Number of a parameter's param group among those of all optimizers of the model."""
        bucket, index = self.located[name]
        return bucket.members[index].group

    def template_of(self, name: str) -> Template:
        """What the optimizer keeps for a parameter."""
        return self.engine.drivers.templates[self.group_of(name)]
