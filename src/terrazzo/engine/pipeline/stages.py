"""Stages of a pipeline: which of a model's layers this rank runs, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from terrazzo.engine.mesh.axes import Axes
from terrazzo.errors import Misuse
from terrazzo.marks import Mark

__all__ = ["STAGES_OF", "Stages", "Turn", "require_whole", "stages_of"]


class Turn(NamedTuple):
    """A forward or a backward of one chunk in a step.

    Attributes:
        ends_model: whether the chunk's output is the model's.
    """

    chunk: int
    is_forward: bool
    ends_model: bool


@dataclass(frozen=True)
class Stages(ABC):
    """The stages of a model that this rank runs: what the engine asks of a `PipelineStages` of `parallel.pipeline`.

    Attributes:
        ranks: how many have stages of the model.
        rank: which of them this one is.
        chunks: for each of this rank's stages, the names of the modules that it runs.
    """

    ranks: int
    rank: int
    chunks: tuple[tuple[str, ...], ...]

    @abstractmethod
    def turns(self, micro_batches: int) -> Sequence[Turn]:
        """The turns of this rank in a step, in its order.

        Raises:
            BadInput: too few micro-batches.
        """

    @abstractmethod
    def holders(self, names: Sequence[str]) -> tuple[int, ...]:
        """The ranks, in order, that have a parameter of these names."""

    def tied_ranks(self, names: Sequence[str]) -> tuple[int, ...]:
        """`holders` where their stages share the parameter, else none."""
        holders = self.holders(names)
        return holders if len(holders) > 1 else ()

    @abstractmethod
    def runs(self, module: str) -> bool:
        """Whether this rank runs a module: in one of its stages or, where it has the last one, after all of them."""

    @abstractmethod
    def has(self, module: str) -> bool:
        """Whether a module is one of a stage's, or inside of one."""

    def buffers_here(self, model: nn.Module) -> list[tuple[nn.Module, dict[str, Tensor | None]]]:
        """Modules that have buffers, without those of stages that other ranks run; each with its buffers by name."""
        having = ((name, module) for name, module in model.named_modules() if module._buffers)
        return [(module, dict(module._buffers)) for name, module in having if not self.has(name) or self.runs(name)]

    def buffer_bytes(self, model: nn.Module) -> int:
        """Bytes of the buffers that are here, of which there are copies while a step runs."""
        each = {buffer for _, named in self.buffers_here(model) for buffer in named.values() if buffer is not None}
        return sum(buffer.nbytes for buffer in each)

    def share_out(self, units: Sequence[Iterable[str]]) -> list[list[int]]:
        """The units that each chunk uses. `units`: each as the names of its parameters."""
        used = [set(self.chunks_of(*names)) for names in units]
        return [[index for index, chunks in enumerate(used) if chunk in chunks] for chunk in range(len(self.chunks))]

    def chunks_of(self, *names: str) -> list[int]:
        """Numbers of the chunks that use a module or a parameter of these names."""
        return [
            number
            for number, modules in enumerate(self.chunks)
            if any(f"{name}.".startswith(f"{module}.") for module in modules for name in names)
        ]


STAGES_OF = Mark[Stages]("terrazzo_stages")
"""The mark on a model that this rank has stages of: these stages."""


def stages_of(model: nn.Module) -> Stages | None:
    """The stages of it that this rank has; None where that is all of it."""
    return STAGES_OF.find(model)


def require_whole(axes: Axes, what: str) -> None:
    """Refuse `what` where ranks have stages of the model: it would be of one stage's parameters alone.

    Raises:
        Misuse: there, on every rank.
    """
    if axes.stage_axis:
        raise Misuse(
            f"{what} of a model in stages (pp {axes.size(axes.stage_axis)}) is not supported yet: this rank has the "
            "parameters of its own stages alone. Save it by tz.checkpoint.save(path, model, optimizer), or take pp 1."
        )
