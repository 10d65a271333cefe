"""What of a setup the activations of a block depend on."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.planner.setup.setup import Setup
from terrazzo.words import CheckpointMode

__all__ = ["FP32_BYTES", "BlockSetting"]

FP32_BYTES = 4


@dataclass(frozen=True)
class BlockSetting:
    """All that `memory.activations` reads of a setup, so that equal blocks of alike setups are counted once.

    Attributes:
        tokens: of a micro-batch on one rank; `sequence`: tokens of a whole one.
        fused: see `Setup.fuses_kernels`. `megatron`: see `Setup.as_megatron`.
        share: of all blocks that are checkpointed. `moves`: what these keep goes to host memory.
    """

    tokens: int
    sequence: int
    cp: int
    context: str
    tp: int
    ep: int
    sequence_parallel: bool
    itemsize: int
    fused: bool
    compiled: bool
    keeps_scores: bool
    megatron: bool
    checkpointing: CheckpointMode
    share: float
    cpu: bool
    moves: bool

    @classmethod
    def of(cls, setup: Setup) -> BlockSetting:
        """That of a setup."""
        mesh = setup.mesh
        return cls(
            tokens=setup.rank_tokens,
            sequence=setup.sequence,
            cp=mesh.cp,
            context=setup.context,
            tp=mesh.tp,
            ep=mesh.ep,
            sequence_parallel=setup.sequence_parallel,
            itemsize=setup.precision.compute.itemsize,
            fused=setup.fuses_kernels,
            compiled=setup.compile,
            keeps_scores=setup.keeps_scores,
            megatron=setup.as_megatron,
            checkpointing=setup.checkpointing,
            share=setup.checkpointed_share,
            cpu=setup.cluster.device.kind == "cpu",
            moves=setup.offload_activations and setup.cluster.device.kind != "cpu",  # there is no other memory on a CPU
        )
