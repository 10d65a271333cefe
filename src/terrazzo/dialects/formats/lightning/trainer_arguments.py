"""What a document says to Lightning's Trainer, checked by the rows of `keys`: once, for the reader and for findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from terrazzo.dialects.formats.lightning.keys import ARGUMENTS, NAMED

__all__ = ["HALF_ON_CPU", "Strategy", "TrainerArguments", "place_of_arguments", "strategy_in", "trainer_arguments"]

_PACKAGES = ("lightning", "pytorch_lightning")
HALF_ON_CPU = "16-mixed"
"""The word in whose place Lightning takes bf16-mixed on a CPU, with a warning."""
_CHECKED = (
    *("devices", "num_nodes", "accelerator", "accumulate_grad_batches", "max_steps"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)


@dataclass(frozen=True)
class Strategy:
    """What the `strategy` argument says.

    Attributes:
        kind: name of the class; empty for one that is not known here.
        where: the key of the strategy.
        name: the key that names its class; empty where none does.
        word: what names it, as it stands there.
        by_class: it is a `class_path` with arguments, and no name.
        implied: arguments that its name stands for.
        init_args, dict_kwargs: the document's own.
    """

    kind: str
    where: str
    name: str
    word: Any
    by_class: bool = False
    implied: Mapping[str, Any] = field(default_factory=dict)
    init_args: Mapping[str, Any] = field(default_factory=dict)
    dict_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """All of them, as they stand there."""
        return {**self.implied, **self.init_args, **self.dict_kwargs}

    @property
    def in_document(self) -> frozenset[str]:
        """Names of the document's own."""
        return frozenset((*self.init_args, *self.dict_kwargs))

    @property
    def section(self) -> str:
        """The key of its arguments."""
        return f"{self.where}.init_args"

    def key(self, argument: str) -> str:
        """The document's key behind an argument; empty where it is a default."""
        if argument in self.in_document:
            return f"{self.section}.{argument}"
        return self.name if argument in self.implied else ""


@dataclass(frozen=True)
class TrainerArguments:
    """The Trainer's arguments; of what is misshapen, the default.

    Attributes:
        prefix: of their keys: `trainer.` as LightningCLI has them, or empty.
        strategy: as it stands there: its arguments are for what it hands them to.
        precision: the full word, such as `bf16-mixed`.
        devices: of a machine; None: as many as there are.
        max_steps: None: another length.
    """

    prefix: str
    strategy: Strategy
    precision: str
    devices: int | None
    num_nodes: int
    accelerator: str | None
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    max_steps: int | None


def trainer_arguments(document: Mapping[str, Any], value: Callable[[str], Any]) -> TrainerArguments:
    """The record of a document. `value`: of a key, as its row says, or its default."""
    prefix, arguments = place_of_arguments(document)
    values = {name: value(f"{prefix}{name}") for name in _CHECKED}
    precision = value(f"{prefix}precision") or "32-true"
    if (values["accelerator"], precision) == ("cpu", HALF_ON_CPU):
        precision = "bf16-mixed"
    return TrainerArguments(prefix, strategy_in(arguments, prefix), precision, **values)


def place_of_arguments(document: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The prefix of the Trainer's arguments, and themselves: at the top, or below `trainer`."""
    below = document.get("trainer")
    return ("trainer.", below) if isinstance(below, Mapping) else ("", document)


def strategy_in(arguments: Mapping[str, Any], prefix: str) -> Strategy:
    """The strategy of a Trainer's arguments, by its name or its `class_path`."""
    raw, where = arguments.get("strategy"), f"{prefix}strategy"
    if not isinstance(raw, Mapping):
        kind, implied = NAMED.get("auto" if raw is None else str(raw).lower(), ("", {}))
        return Strategy(kind, where, where if "strategy" in arguments else "", raw, implied=implied)
    word = raw.get("class_path", "")
    package, _, kind = str(word).rpartition(".")
    known = kind in ARGUMENTS and (not package or package.partition(".")[0] in _PACKAGES)
    given = (raw.get(name) for name in ("init_args", "dict_kwargs"))
    own = [part if isinstance(part, Mapping) else {} for part in given]
    return Strategy(kind if known else "", where, f"{where}.class_path", word, True, {}, *own)
