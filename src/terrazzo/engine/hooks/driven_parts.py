"""The parts of one model that its hooks drive: in forwards, in backwards, and where the two meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.consensus.agreement import Agreement
from terrazzo.engine.consensus.row_exchanges import RowExchanges
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.progress.denominator import Denominator
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["DrivenParts", "OptimizerSteps"]


class OptimizerSteps(Protocol):
    """What hooks ask of the steps of a model's optimizers: of its `Drivers`."""

    def recover(self) -> None:
        """Weights are about to be used: end steps that have raised. Collective where one has."""

    def before_forward(self, unit: int) -> None:
        """The forward of a unit begins.

        Raises:
            Misuse: where the unit has been updated for a step that is still to come, or was given up.
        """


@dataclass(frozen=True)
class DrivenParts:
    """What hooks tell that torch has come somewhere.

    Attributes:
        units: in registration order, root first.
        exchanges: of rows, before which ranks meet.
        agreement: of ranks, as passes end.
        steps: of the model's optimizers, which are told before weights are used.
    """

    units: Sequence[Unit]
    schedule: Schedule
    sharding: ShardingSpec
    denominator: Denominator
    exchanges: RowExchanges
    agreement: Agreement
    steps: OptimizerSteps
