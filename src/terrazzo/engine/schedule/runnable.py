"""Interface of a unit as a schedule sees it, be it a real one or one that only counts."""

from __future__ import annotations

from typing import Protocol

from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.labels.label import Label
from terrazzo.engine.plan.moves import Divisor, GradientFate

__all__ = ["Runnable"]


class RunnableWeights(Protocol):
    """Full weights that come and go together.

    A schedule asks the same of them on every rank, in the same order; what it starts, it ends itself.
    """

    @property
    def regathered(self) -> bool:
        """Whether backward gathers weights again that forward has resharded."""

    @property
    def at_hand(self) -> bool:
        """Whether full weights are here, or on their way: `wait` is all that is left."""

    def gather(self, label: Label, from_rest: bool = False) -> None:
        """Start gathering full weights, also where they are here already: other ranks need this one's part.

        Args:
            from_rest: from where they rest between steps; else from what `rest_between` has kept, if it has.
        """

    def advance(self) -> None:
        """Move a gather that is under way a step further, where that is cheap.

        Where none is, start to bring updated weights in line with their masters.
        """

    def wait(self) -> None:
        """Return once modules can read the full weights, which are at hand."""

    def rest_between(self) -> None:
        """Keep from forward to backward what the plan's `between` names, and give back the rest."""

    def release(self) -> None:
        """Give back the memory of full weights; what `rest_between` has kept stays."""

    def rest(self) -> None:
        """Go back to the plan's `weight` place alone."""


class Runnable(Protocol):
    """Parameters whose weights are gathered together, and whose gradients are summed together."""

    @property
    def index(self) -> int:
        """The unit's place in the order of registration."""

    @property
    def name(self) -> str:
        """The name of its module in the model; empty for the root."""

    @property
    def has_gradients(self) -> bool:
        """Whether any of its parameters is trained."""

    @property
    def weights(self) -> RunnableWeights:
        """Weights of all its parameters."""

    @property
    def fills_gradually(self) -> bool:
        """Whether gradients come one after the other while its backward runs, and not all at its end."""

    @property
    def half_filled(self) -> bool:
        """Whether gradients for half of its trainable elements, or more, are here."""

    @property
    def comm_streams(self) -> CommStreams | None:
        """Streams that its chains of collectives run on; None where the host waits for each."""

    def expect_gradients(self, fate: GradientFate) -> None:
        """Allocate memory for gradients that its backward, which begins, will bring."""

    def sum_tied(self) -> None:
        """Add to its gradients those of the parameters that other stages share with it. Collective over these."""

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget its gradients, or set finished ones to zero."""

    def reduce(self, divisor: Divisor, fate: GradientFate) -> Moves[object]:
        """Sum its gradients over ranks.

        Args:
            divisor: of a sum that is `FINISHED`.
            fate: `REDUCED` or `FINISHED`.
        """
