"""One way of running a model: everything that a user chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from terrazzo.engine import DiLoCo, Offload, Plan, Precision
from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.parallel import Balance, Mode
from terrazzo.planner.machine.devices import Cluster
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.framework import TERRAZZO, Framework
from terrazzo.planner.setup.optimizers import OPTIMIZERS, OptimizerSpec
from terrazzo.words import CheckpointMode

__all__ = [
    "AttentionKernel",
    "Fp8Recipe",
    "Loss",
    "PipelineOrder",
    "Ranking",
    "Setup",
    "TpOverlap",
    "UpdateKernel",
]

AttentionKernel = Literal["flash", "cudnn", "flash3", "triton", "math"]
Loss = Literal["full", "fused", "chunked", "parts"]
PipelineOrder = Literal["1f1b", "gpipe", "zero_bubble"]
TpOverlap = Literal["none", "backward", "async"]
Fp8Recipe = Literal["tensorwise", "rowwise", "mx"]
UpdateKernel = Literal["fused", "foreach", "loop"]
Ranking = Literal["throughput", "gpus", "cost"]


@dataclass(frozen=True)
class Setup:
    """A model on a cluster under one plan.

    Attributes:
        sequence: tokens per sequence. `micro_batch`: sequences per forward pass of one data rank.
        micro_batches: forward passes per optimizer step and data rank. `empty_rows`: sequences of all of them that only
            fill up the last ones, and have nothing to learn.
        precision: dtypes of the states; `matmul` is the format that matrix products run in (`bf16`, `fp8`, ...).
        recipe: what shares a scale in fp8: a matrix (`tensorwise`), a row of one (`rowwise`), or 32 elements (`mx`).
        checkpointing: of activations: `full` keeps a block's input alone; `selective` also the results of its matrix
            products and of attention, under `math` attention all but the scores; `selective_half` of every second
            product and of attention, as torchtitan. With `every` n > 1, one block in n.
        attention: `flash` is FlashAttention-2, `cudnn` and `flash3` are kernels that Hopper is made for; `triton` is
            the first FlashAttention in Triton; `math` keeps the [sequence, sequence] scores, in plain operators or in
            torch's own (`kernels.unfused_by_itself` says which).
        loss: `full` as torch's cross_entropy in fp32; `fused` keeps the logits and one fp32 copy, as Megatron's or a
            compiled one; `chunked` as `terrazzo.nn.linear_cross_entropy`, which never holds all logits; `parts` as
            `terrazzo.parallel.VocabularyLoss`, where each tensor-parallel rank has its part of the vocabulary.
        accumulate_locally: micro-batches before the last send nothing, and whole gradients are kept.
        sequence_parallel: tensor-parallel ranks also split what lies between their matrices.
        tensor_overlap: which of their exchanges run beside products: `none` does; those of `backward` beside the
            products of weight gradients, as in Megatron-LM; or all, in parts, beside the products that need or make
            what is exchanged (`async`), as torch's async TP and Transformer Engine's.
        context: how context-parallel ranks compute attention together: `gather`, `ulysses` or `ring`. balance: how
            sequences are cut for them; times are those of `head_tail`.
        virtual_stages: stages of each rank along pp (interleaved schedule).
        framework: that runs it. What it takes is counted as the engine takes it, or Megatron-core.
        optimizer_kernel: `fused` updates without memory of its own, in one pass (torch's, NVIDIA/apex FusedAdam);
            `foreach`, torch's default on a GPU, takes a list of roots as large as the weights; `loop` one tensor after
            the other. None: `update_kernel` says what the engine takes.
        offload: how states that the plan has put on other tiers are kept and updated. offload_activations: what
            checkpointing keeps of a block goes to host memory.
        adapters: rank of the LoRA adapters that the model has; `freeze`: globs by which tensors of it are frozen.
        diloco: the groups of `dp_replicate` train by themselves, each under the plan; None: gradients are summed over
            them.
        ema: there is a moving average of the weights, a `tz.EMA` that is updated in each step.
        coalesced: a unit's tensors travel as one message, as here and in FSDP; not so in DeepSpeed's ZeRO-3 of 2021.
    """

    model: ModelShape
    cluster: Cluster
    plan: Plan
    mesh: Mesh = field(default_factory=Mesh)
    sequence: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    empty_rows: int = 0
    precision: Precision = field(default_factory=Precision)
    matmul: str = "fp32"
    recipe: Fp8Recipe = "tensorwise"
    optimizer: OptimizerSpec = OPTIMIZERS["adamw"]
    checkpointing: CheckpointMode = "none"
    every: int = 1
    compile: bool = False
    attention: AttentionKernel = "flash"
    loss: Loss = "full"
    prefetch: int = 1
    accumulate_locally: bool = False
    sequence_parallel: bool = True
    tensor_overlap: TpOverlap = "none"
    context: Mode = "gather"
    balance: Balance = "head_tail"
    virtual_stages: int = 1
    pipeline: PipelineOrder = "1f1b"
    offload: Offload = field(default_factory=Offload)
    offload_activations: bool = False
    coalesced: bool = True
    framework: Framework = TERRAZZO
    optimizer_kernel: UpdateKernel | None = None
    adapters: int | None = None
    freeze: tuple[str, ...] = ()
    diloco: DiLoCo | None = None
    ema: bool = False

    @cached_property
    def known(self) -> dict[tuple[Any, ...], Any]:
        """What `once_per_setup` remembers of this one."""
        return {}

    @property
    def sums_locally(self) -> bool:
        """Whether micro-batches only add up on each rank: asked for, gradients are not split, or in stages."""
        return self.accumulate_locally or self.staged or not self.plan.grad.among(self.axis_sizes)

    @cached_property
    def as_megatron(self) -> bool:
        """Whether Megatron-core runs it, as published runs had it: its stages, axes, and buffers of whole gradients
        that stay allocated (NVIDIA/Megatron-LM param_and_grad_buffer.py).
        """
        return self.framework.name == "megatron"

    @property
    def fuses_kernels(self) -> bool:
        """Whether norms, rotary embeddings and nonlinearities are one kernel each: compiled, or Megatron-core's own
        (NVIDIA/Megatron-LM megatron/core/fusions; `apply_rope_fusion`, `bias_activation_fusion`).
        """
        return self.compile or self.as_megatron

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps its [sequence, sequence] scores for the backward."""
        return self.attention == "math"

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks of the data axes that states are split and gradients summed over, as `Mesh.sizes`."""
        sizes = self.mesh.sizes()
        return sizes if self.diloco is None else {axis: size for axis, size in sizes.items() if axis != REPLICA_AXIS}

    @property
    def splits_states(self) -> bool:
        """Whether there are ranks to split states over, or other tiers for them: else all strategies are one."""
        return bool(self.axis_sizes) or self.plan.offloaded

    @property
    def staged(self) -> bool:
        """Whether the engine runs stages of it, sums over ranks at the end of a step, and gathers once what stays
        between forward and backward.
        """
        return self.mesh.pp > 1 and not self.as_megatron

    @property
    def checkpointing_name(self) -> str:
        """The name of the mode in requests and configurations: `selective`, or `every_2`."""
        return self.checkpointing if self.every == 1 else f"every_{self.every}"

    @cached_property
    def checkpointed_share(self) -> float:
        """The share of all blocks that are checkpointed: the first of each `every`."""
        layers = self.model.layers
        return 0.0 if self.checkpointing == "none" or not layers else -(-layers // self.every) / layers

    @property
    def update_kernel(self) -> UpdateKernel:
        """How the optimizer updates: as was named, or as the engine does; Megatron-core's kernel is fused."""
        if self.optimizer_kernel is not None:
            return self.optimizer_kernel
        if self.as_megatron or self.optimizer.fused:
            return "fused"
        return "foreach" if self.cluster.device.kind == "cuda" else "loop"

    @cached_property
    def whole_experts(self) -> bool:
        """Whether ranks along tp have whole experts, and each its own tokens for them; else a part of each expert.

        So the engine leaves a mixture's experts, whichever model's, and shares them along ep alone.
        """
        return not self.as_megatron

    @property
    def puts_logits_together(self) -> bool:
        """Whether each tensor-parallel rank takes the loss from all logits; else from its part of the vocabulary."""
        return self.loss == "full" and not self.as_megatron

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one data rank, before context parallelism cuts the sequence."""
        return self.sequence * self.micro_batch

    @cached_property
    def rank_tokens(self) -> int:
        """Tokens of one micro-batch on one rank, whose part of each sequence is one of cp."""
        return -(-self.tokens // self.mesh.cp)

    @cached_property
    def residual_bytes(self) -> int:
        """Bytes of the residual stream of one micro-batch on one rank, whole over tp: [rank_tokens, hidden]."""
        return self.rank_tokens * self.model.hidden * self.precision.compute.itemsize

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step that are learnt."""
        return self.rows - self.empty_rows

    @property
    def rows(self) -> int:
        """Sequences that go through the model in one optimizer step, over all ranks, with those that are empty."""
        return self.micro_batch * self.micro_batches * self.mesh.batch_ranks
