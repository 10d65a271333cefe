"""Lightning's `precision`: the engine casts weights and scales the loss, and autocast is Lightning's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.plugins import precision as pytorch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from terrazzo.engine import Plan, Precision, clip_grad_norm_
from terrazzo.errors import BadInput

__all__ = ["FabricPrecision", "TerrazzoPrecision", "precision_of"]

_NAMES = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16-pure", "16-mixed": "fp16"}
_PLUGINS = {getattr(of, name) for of in (fabric, pytorch) for name in ("Precision", "MixedPrecision", "HalfPrecision")}


def precision_of(plugin: fabric.Precision, plan: Plan) -> Precision:
    """The engine's precision for one of Lightning's plugins.

    Under `bf16-mixed` Lightning's FSDP gathers weights in bf16, and its DDP keeps fp32 ones; both run the forward under
    autocast. So it is bf16 where the plan splits weights, and else fp32.

    Raises:
        BadInput: what the engine cannot do.
    """
    if type(plugin) not in _PLUGINS or plugin.precision not in _NAMES:
        raise BadInput(
            f"precision {plugin.precision!r} ({type(plugin).__name__}) is not one that Terrazzo trains in. "
            f"Use one of {', '.join(_NAMES)}, or TerrazzoStrategy(precision=tz.Precision(...))."
        )
    is_plain = plugin.precision == "bf16-mixed" and not plan.weight.axes
    return Precision.named("fp32" if is_plain else _NAMES[plugin.precision])


def _forward_context(plugin: fabric.Precision | None) -> AbstractContextManager[None]:
    """The autocast of a `mixed` plugin of Lightning's; nothing for any other."""
    is_mixed = plugin is not None and plugin.precision.endswith("-mixed")
    return plugin.forward_context() if plugin is not None and is_mixed else nullcontext()


class FabricPrecision(fabric.Precision):
    """Runs forwards under autocast, and casts inputs and outputs, as Fabric's own plugin does.

    Args:
        plugin: Fabric's own; None for fp32.
    """

    def __init__(self, plugin: fabric.Precision | None) -> None:
        self._plugin = plugin or fabric.Precision()
        self.precision = self._plugin.precision

    def forward_context(self) -> AbstractContextManager[None]:
        return _forward_context(self._plugin)

    def convert_input(self, data: Any) -> Any:
        return self._plugin.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return apply_to_collection(data, Tensor, _in_default_dtype)


class TerrazzoPrecision(pytorch.Precision):
    """Runs forwards under autocast as the Trainer's own plugin does. It steps without a closure, and clips over shards.

    Args:
        plugin: the Trainer's own; None for fp32.
    """

    def __init__(self, plugin: pytorch.Precision | None, strategy: Any) -> None:
        self._plugin = plugin
        self.precision = "32-true" if plugin is None else plugin.precision
        self._strategy = weakref.ref(strategy)

    def forward_context(self) -> AbstractContextManager[None]:
        return _forward_context(self._plugin)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run forward and backward, then step: the engine's optimizer takes no closure."""
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        strategy = self._strategy()
        assert strategy is not None
        clip_grad_norm_(strategy.model, float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        strategy = self._strategy()
        assert strategy is not None
        torch.nn.utils.clip_grad_value_(strategy.model.parameters(), float(clip_val))

    def __getstate__(self) -> dict[str, Any]:
        return {"precision": self.precision, "_plugin": self._plugin}


def _in_default_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
