"""The strategy: what Fabric asks of one, answered by `tz.shard` and `tz.checkpoint`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine import accumulate, attach, clip_grad_norm_
from terrazzo.errors import BadInput
from terrazzo.integrations.lightning.fabric.checkpoint import load_state, load_weights, save_state
from terrazzo.integrations.lightning.precision import FabricPrecision
from terrazzo.integrations.lightning.sharded_strategy import ShardedStrategy
from terrazzo.integrations.shared.owners import owner_of

__all__ = ["TerrazzoStrategy"]


class Whole(nn.Module):
    """What Fabric calls: runs the sharded model. It is another object than that, so methods marked by
    `mark_forward_method` run inside the model's forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class TerrazzoStrategy(ShardedStrategy, ParallelStrategy):
    """A strategy for Fabric that shards each model with its optimizer, in place. Arguments: `ShardedStrategy`'s.

    Raises:
        BadInput: what the engine cannot do, in `Fabric(...)` or `fabric.setup(...)`.
    """

    launches = _SubprocessScriptLauncher

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _Accumulation(self._local)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    # -- models ------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> FabricPrecision:
        """What stands for Lightning's plugin: the engine casts weights and scales by itself."""
        return self._precision or FabricPrecision(None)

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, FabricPrecision):
            self._take_precision(plugin)
            plugin = FabricPrecision(plugin)
        self._precision = plugin

    def module_to_device(self, module: nn.Module) -> None:
        """Bring what has no parameters, such as metrics; the engine brings the rest, when it shards."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a model with its optimizer."""
        only = self._only(optimizers, "fabric.setup was given", f" for one {type(module).__name__}")
        return self._shard(module, only), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model that has no optimizer, or has it later."""
        return self._shard(module, None)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take over the optimizer of a model that has been set up by itself."""
        edit = "build it over the parameters of one model, behind fabric.setup_module(model)"
        attach(owner_of(optimizer, self._models, "models that were set up", edit), optimizer)
        return optimizer

    def _shard(self, module: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        self._check_checkpoint_io()
        self._setup().shard(module, optimizer)
        self._models.add(module)
        return Whole(module)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        return clip_grad_norm_(_sharded(module), float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        torch.nn.utils.clip_grad_value_(_sharded(module).parameters(), float(clip_val))

    # -- checkpoints -------------------------------------------------------------------------------------------

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of whole parameters, as a plain optimizer has it. Collective."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def save_checkpoint(
        self,
        path: Any,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a Terrazzo checkpoint of the model in `state`, its optimizer, and the rest as JSON. Collective."""
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value:
                raise BadInput(f"fabric.save({name}=...): a checkpoint holds all of the model. Leave it out.")
        save_state(self.broadcast(str(path)), _unwrapped(state))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore what is in `state`, on any ranks and plan; returns what the checkpoint has beside it. Collective."""
        path = self.broadcast(str(path))
        if isinstance(state, nn.Module):
            load_weights(path, _sharded(state), strict)
            return {}
        if not isinstance(state, dict):
            raise BadInput(
                f"fabric.load was given {type(state).__name__} to load into: pass a dict with the model that was set "
                "up, such as fabric.load(path, {'model': model, 'optimizer': optimizer})."
            )
        unwrapped = _unwrapped(state)
        remaining = load_state(path, unwrapped, strict)
        state.update({name: value for name, value in unwrapped.items() if not isinstance(state[name], Whole)})
        return remaining


class _Accumulation(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def __init__(self, local: bool | None) -> None:
        self._local = local

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return accumulate(_sharded(module), local=self._local) if enabled else nullcontext()


def _sharded(module: nn.Module) -> nn.Module:
    """The model itself; what is not sharded is refused by who asks it for its engine."""
    return module.module if isinstance(module, Whole) else module


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _sharded(value) if isinstance(value, nn.Module) else value for name, value in state.items()}
