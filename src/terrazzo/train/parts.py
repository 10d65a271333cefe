"""Which sequences a rank reads, and which part of each is its own where ranks share them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.config import Config
from terrazzo.engine import named_mesh
from terrazzo.errors import BadInput
from terrazzo.parallel import Chunks, Context, check_config
from terrazzo.train.data import IGNORED, Batch
from terrazzo.train.launch.ranks import Ranks
from terrazzo.train.model.huggingface import read_config
from terrazzo.train.plan import mesh_shape

__all__ = ["Parts", "build_mesh", "check_parts", "parts_of"]


@dataclass(frozen=True)
class Parts:
    """The `reader`-th of `readers` shares of all sequences; those of `context` read the same."""

    reader: int
    readers: int
    context: Context | None = None

    def of(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch of its share. Targets are those of whole sequences, one token ahead."""
        if self.context is None:
            return batch
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
        inputs, targets, positions = self.context.split(batch.inputs, batch.targets, positions)
        learnt = int((targets != IGNORED).sum())
        return replace(batch, inputs=inputs, targets=targets, positions=positions, valid_tokens=learnt, samples=learnt)


def build_mesh(config: Config, ranks: Ranks) -> DeviceMesh:
    """The mesh of a run. Collective."""
    return named_mesh(ranks.device.type, mesh_shape(config.plan.mesh, ranks.world_size))


def parts_of(config: Config, ranks: Ranks, mesh: DeviceMesh) -> Parts:
    """What this rank reads: neighbouring ranks share sequences."""
    shared = config.plan.mesh.cp
    settings = config.parallel.context
    context = Context(mesh.get_group("cp"), settings.mode, settings.balance) if shared > 1 else None
    return Parts(ranks.rank // shared, ranks.world_size // shared, context)


def check_parts(config: Config) -> None:
    """Refuse a configuration whose sequences cannot be shared.

    Raises:
        BadInput: there.
    """
    shared, settings = config.plan.mesh.cp, config.parallel.context
    if shared == 1:
        return
    if config.objective.kind.of_pairs:
        raise BadInput(
            f"plan.mesh.cp is {shared}, and objective '{config.objective.name}' compares whole texts, of which a rank"
            " would have a part. Set plan.mesh.cp=1, or objective=next_token."
        )
    if config.train.compile:
        raise BadInput(
            f"plan.mesh.cp is {shared}, and train.compile has not been tried with attention that exchanges with other"
            " ranks. Set train.compile=false, or plan.mesh.cp=1."
        )
    try:
        Chunks(shared, settings.balance).check(config.batch.sequence_length)
    except BadInput as error:
        raise BadInput(f"batch.sequence_length: {error}") from None
    if config.model.kind == "huggingface":
        assert config.model.path is not None
        check_config(read_config(config.model.path), settings.mode, shared)
    elif settings.mode == "ulysses" and config.model.heads % shared:
        raise BadInput(
            f"parallel.context.mode 'ulysses' gives each of plan.mesh.cp {shared} ranks the same number of heads, and"
            f" model.heads {config.model.heads} do not divide by {shared}. Use parallel.context.mode=gather, which"
            f" needs no heads to divide, or a cp that divides {config.model.heads}."
        )
