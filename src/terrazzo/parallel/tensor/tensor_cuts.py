"""What a plan of tensor parallelism changes of a model: between `read_plan`, which finds out, and `apply_plan`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from terrazzo.engine import Record, stages_of
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.styles import Enter, SplitSequence, Style

__all__ = ["TensorCuts"]


@dataclass
class TensorCuts:
    """What a plan changes of one model.

    Attributes:
        styles: the style of each module that has one, by name.
        split: whether sequences are split in modules of style `sequence`. If not, they are whole everywhere.
        records: one for each parameter, by the name of its module and its own.
        rows: by module, the half-open interval of outputs that this rank computes of a matrix that it has whole.
    """

    model: nn.Module
    ranks: TensorRanks
    styles: dict[str, Style]
    split: bool
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)

    def named(self, *kinds: type[Style]) -> Iterator[tuple[str, Any, Style]]:
        """Name, module and style of the modules of these kinds, of all without any, in the order of registration."""
        for name, module in self.model.named_modules():
            style = self.styles.get(name)
            if isinstance(style, kinds or Style):
                yield name, module, style

    def ranks_at(self, name: str) -> TensorRanks:
        """The ranks, as they exchange in a module that has a style."""
        return self.ranks.labelled(Label(Purpose.ACTIVATIONS, self.names.index(name), names=Names(modules=self.names)))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the modules that have a style, as labels number them."""
        return tuple(self.styles)

    def inside(self, name: str, kind: type[Style]) -> bool:
        """Whether a module has a style of that kind, or a module around it has."""
        return self._around(name, kind) is not None

    def _around(self, name: str, kind: type[Style]) -> str | None:
        parts = name.split(".")
        names = (self.first_name(".".join(parts[:end])) for end in range(1, len(parts) + 1))
        return next((each for each in names if isinstance(self.styles.get(each), kind)), None)

    def first_name(self, name: str) -> str:
        """The name that `named` and the plan have for a module, which the model may have under several."""
        return self._first_names.get(name, name)

    @functools.cached_property
    def _first_names(self) -> dict[str, str]:
        first: dict[nn.Module, str] = {}
        every = self.model.named_modules(remove_duplicate=False)
        return {name: known for name, module in every if (known := first.setdefault(module, name)) != name}

    def region_of(self, name: str) -> str:
        """The outermost module around one, or itself, in which ranks compute parts of gradients."""
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next(each for each in around if isinstance(self.styles.get(each), Enter) or self.block_of(each))

    def enters(self, name: str) -> bool:
        """Whether a module's input is put together, for each rank to use in its own way."""
        where = self.styles[name].enters
        return where == "always" or (where == "alone" and not self.inside(name, Enter))

    def block_of(self, name: str) -> str | None:
        """The block around a module, or itself, in which sequences are in parts; None where they are whole."""
        return self._around(name, SplitSequence) if self.split else None

    def of_this_rank(self) -> TensorCuts:
        """The cuts in the stages that this rank runs; all of them where the model has no stages."""
        if (stages := stages_of(self.model)) is None:
            return self
        runs = stages.runs
        records = {each: record for each, record in self.records.items() if self._has(*each)}
        styles = {name: style for name, style in self.styles.items() if runs(name)}
        rows = {name: interval for name, interval in self.rows.items() if runs(name)}
        return replace(self, styles=styles, records=records, rows=rows)

    def _has(self, name: str, attribute: str) -> bool:
        """Whether this rank has a parameter. It may have a tied one of a module that it does not run."""
        return self.model.get_submodule(name)._parameters.get(attribute) is not None

    def sequence_runs(self) -> list[list[tuple[str, nn.Module]]]:
        """The blocks whose sequences are in parts, in runs of those that stand in one module, one behind the other.

        Between runs sequences are whole: what a model does there is not known. So they are between stages.
        """
        stages = stages_of(self.model)

        def where(block: tuple[str, nn.Module]) -> tuple[int, str]:
            name, _ = block
            return 0 if stages is None else stages.chunks_of(name)[0], name.rpartition(".")[0]

        blocks = [(name, module) for name, module, _ in self.named(SplitSequence)] if self.split else []
        return [list(run) for _, run in itertools.groupby(blocks, where)]
