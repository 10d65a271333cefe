"""Optimizers: what each keeps of an element, and what else of it matters to a plan. One row for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.engine import Precision, StateFormat
from terrazzo.engine.optim.stock.template import MatrixNeeds
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.optim import Muon, moments_of

__all__ = ["OPTIMIZERS", "MatrixSpec", "OptimizerSpec", "optimizer"]


@dataclass(frozen=True)
class MatrixSpec:
    """How an optimizer updates whole matrices.

    Attributes:
        moments: as of `OptimizerSpec`, of these matrices.
        needs: dtype in which the engine exchanges them, and memory of an update.
        iterations: of Newton-Schulz in the update of each.
    """

    moments: int
    needs: MatrixNeeds
    iterations: int


@dataclass(frozen=True)
class OptimizerSpec:
    """What an optimizer keeps per trainable element, beside the master weight.

    Attributes:
        moments: tensors as large as the weights: 2 for Adam, 1 for momentum, Lion, RMSprop, 0 for plain SGD.
        moment_bytes: per element of each, None for what the precision says; about 0.5 with 4-bit states.
        fixed_bytes: per run of parameters that share settings, for scalar states: the step count.
        torch_class: the class of torch.optim or of tz.optim, None where neither has it; `options`: its arguments.
        fused: whether the engine takes a fused kernel where the user has not chosen; of Muon for the AdamW in it.
        decays: whether it takes weight decay, for which matrices and the rest are param groups of their own.
        takes_root: whether torch's update takes the root of a moment into memory of its own.
        elementwise: whether it updates each element from its own values alone, and so may be given flat shards.
        matrices: how it updates whole matrices; None for one that updates none so.
        form: what moments are kept in, in place of the precision's own.
    """

    name: str
    moments: int
    moment_bytes: float | None = None
    fixed_bytes: int = 4
    torch_class: str | None = None
    options: tuple[tuple[str, float], ...] = ()
    decays: bool = True
    fused: bool = False
    takes_root: bool = False
    elementwise: bool = True
    matrices: MatrixSpec | None = None
    form: StateFormat | None = None

    def bytes_each(self, precision: Precision) -> float:
        """Bytes per element of each moment."""
        return precision.moments.itemsize if self.moment_bytes is None else self.moment_bytes

    @property
    def runs(self) -> bool:
        """Whether the engine has it run on shards."""
        return self.elementwise or self.matrices is not None


def _spec(name: str, torch_class: str, **settings: Any) -> OptimizerSpec:
    """The row of a class of torch.optim or tz.optim whose moments are known."""
    moments = moments_of(torch_class, dict(settings.get("options", ())))
    assert moments is not None
    return OptimizerSpec(name, moments, torch_class=torch_class, **settings)


_MUON = MatrixSpec(moments=1, needs=MatrixNeeds(Muon.wire, Muon.workspace_bytes), iterations=5)

_ROWS = (
    _spec("adamw", "AdamW", fused=True, takes_root=True),
    _spec("adam", "Adam", fused=True, takes_root=True),
    _spec("nadam", "NAdam", takes_root=True, fixed_bytes=8),
    _spec("radam", "RAdam", takes_root=True),
    _spec("adamax", "Adamax"),
    _spec("adagrad", "Adagrad", takes_root=True),
    _spec("adadelta", "Adadelta", takes_root=True),
    _spec("rmsprop", "RMSprop", takes_root=True),
    _spec("rprop", "Rprop", decays=False),
    _spec("asgd", "ASGD", fixed_bytes=12),
    _spec("momentum", "SGD", options=(("momentum", 0.9),), fixed_bytes=0),
    _spec("sgd", "SGD", fixed_bytes=0),
    _spec("lion", "Lion", fixed_bytes=0),
    _spec("ademamix", "AdEMAMix", takes_root=True),
    _spec("adafactor", "Adafactor", elementwise=False),
    OptimizerSpec("muon", 2, torch_class="Muon", fused=True, takes_root=True, elementwise=False, matrices=_MUON),
    _spec("adamw-8bit", "AdamW", fused=True, takes_root=True, form=StateFormat.INT8),
    OptimizerSpec("adamw-4bit", 2, 0.5 + 4 / 128),
)
"""One row for each. Muon keeps of parameters that are no matrices what AdamW does. Quantised moments carry one fp32
scale per block of 256 (8 bits) or 128 (4 bits), as torchao's do (pytorch/ao torchao/optim)."""

OPTIMIZERS = {spec.name: spec for spec in _ROWS}


def optimizer(name: str) -> OptimizerSpec:
    """What the optimizer of that name keeps, however it is spelled: `AdamW8bit` is `adamw-8bit`.

    Raises: `BadInput` with the nearest name.
    """
    spelled = {known.replace("-", ""): spec for known, spec in OPTIMIZERS.items()}
    key = name.lower().replace("_", "-")
    if (spec := spelled.get(key.replace("-", ""))) is None:
        known = ", ".join(OPTIMIZERS)
        raise BadInput(f"There is no optimizer {name!r}.{did_you_mean(key, OPTIMIZERS)} Optimizers are {known}.")
    return spec
