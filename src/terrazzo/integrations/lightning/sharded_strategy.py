"""What the Trainer's strategy and Fabric's have in common: the options of `tz.shard`, and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terrazzo.engine import Offload, Plan, Precision, data_mesh
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.integrations.lightning.precision import precision_of
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import ActivationSetup, EngineSetup

if TYPE_CHECKING:
    from lightning.fabric.strategies import ParallelStrategy as _Base
else:
    _Base = object

__all__ = ["ShardedStrategy"]

T = TypeVar("T")


class ShardedStrategy(_Base):
    """Comes before Lightning's `ParallelStrategy`, the Trainer's or Fabric's.

    Args:
        plan: as for `tz.shard`, and so are `units`, `prefetch` and `offload`.
        precision: as for `tz.shard`; None takes Lightning's: 32-true, bf16-mixed, bf16-true or 16-mixed.
        dp_replicate: number of groups of ranks that hold the same shards, for hybrid plans.
        accumulate_locally: as `local` of `tz.accumulate`, for `accumulate_grad_batches` and `no_backward_sync`.
        activation_checkpointing: `none`, `full`, `selective` or `selective_half`, of the units.
        process_group_backend: gloo on the CPU, and with nccl on CUDA, by default.
        timeout: of the process group.
        lightning: arguments of Lightning's class.
    """

    is_distributed = True
    launches: type
    """The launcher of Lightning that starts this script again for each other rank."""

    def __init__(  # structure: signature fixed by the options of tz.shard
        self,
        plan: Plan | str = "zero3",
        *,
        precision: Precision | str | torch.dtype | None = None,
        units: list[type[nn.Module] | str] | None = None,
        dp_replicate: int = 1,
        prefetch: int = 1,
        offload: Offload | None = None,
        accumulate_locally: bool | None = None,
        activation_checkpointing: str = "none",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **lightning: Any,
    ) -> None:
        arguments = TerrazzoArguments(plan, precision, units, prefetch=prefetch, offload=offload)
        self._arguments = arguments.resolved()  # before Lightning's class sets its precision
        super().__init__(**lightning)
        self._dp_replicate, self._local = dp_replicate, accumulate_locally
        self._activation_checkpointing = ActivationSetup(activation_checkpointing)
        self._backend, self._timeout = process_group_backend, timeout
        self._num_nodes = 1

    # -- ranks -------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        self._num_nodes = count

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        self._launcher = self.launches(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        on_cuda = devices.is_cuda(self.root_device)
        backend = self._backend or devices.backend_for(self.root_device.type)
        device = self.root_device if on_cuda else None
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device)

    def set_world_ranks(self) -> None:
        """Tell Lightning's helpers which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if devices.is_cuda(self.root_device) else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    # -- what tz.shard is told ---------------------------------------------------------------------------------

    def _take_precision(self, plugin: Any) -> None:
        """Lightning's precision, where the strategy was given none."""
        assert isinstance(self._arguments.plan, Plan)
        precision = precision_of(plugin, self._arguments.plan)
        if self._arguments.precision is None:
            self._arguments = replace(self._arguments, precision=precision)
        elif plugin.precision != "32-true":
            raise BadInput(
                f"precision={plugin.precision!r} and TerrazzoStrategy(precision=...) are both given: give one."
            )

    def _check_checkpoint_io(self) -> None:
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise BadInput(
                f"{type(self.checkpoint_io).__name__}: checkpoints are written by tz.checkpoint, which takes no "
                "CheckpointIO. Leave it out."
            )

    @staticmethod
    def _only(optimizers: Sequence[Optimizer], said: str, of: str = "") -> Optimizer | None:
        """The optimizer of a model, if there is one. Raises: `BadInput` where there are several, which `said` gave."""
        if len(optimizers) > 1:
            raise BadInput(
                f"{said} {len(optimizers)} optimizers{of}; this strategy drives one: give it several param groups."
            )
        return optimizers[0] if optimizers else None

    def _setup(self) -> EngineSetup:
        defaults = TerrazzoArguments(precision=Precision(), mesh=self._mesh())
        arguments = self._arguments.with_defaults(defaults)
        return EngineSetup(arguments, activation_checkpointing=self._activation_checkpointing)

    def _mesh(self) -> DeviceMesh:
        ranks, replicas = dist.get_world_size(), self._dp_replicate
        if replicas < 1 or ranks % replicas:
            raise BadInput(f"dp_replicate is {replicas}, which must divide the {ranks} ranks.")
        return data_mesh(self.root_device.type, *((ranks,) if replicas == 1 else (replicas, ranks // replicas)))

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """`empty_init`: on the meta device; values are given unit by unit, by `reset_parameters`, or a checkpoint."""
        return torch.device("meta") if empty_init else nullcontext()
