"""Lightning's `precision` on Terrazzo's engine, which casts and scales by itself: only steps and clipping are left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.plugins import precision as pytorch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from terrazzo.engine import Precision, clip_grad_norm_
from terrazzo.errors import BadInput

__all__ = ["FabricPrecision", "TerrazzoPrecision", "precision_of"]

_NAMES = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16-pure", "16-mixed": "fp16"}
_PLUGINS = {getattr(of, name) for of in (fabric, pytorch) for name in ("Precision", "MixedPrecision", "HalfPrecision")}


def precision_of(plugin: fabric.Precision) -> Precision:
    """The engine's precision for one of Lightning's plugins. Raises: `BadInput` for what the engine cannot do."""
    if type(plugin) not in _PLUGINS or plugin.precision not in _NAMES:
        raise BadInput(
            f"precision {plugin.precision!r} ({type(plugin).__name__}) is not one that Terrazzo trains in. "
            f"Use one of {', '.join(_NAMES)}, or TerrazzoStrategy(precision=tz.Precision(...))."
        )
    return Precision.named(_NAMES[plugin.precision])


class FabricPrecision(fabric.Precision):
    """Gives outputs in torch's default dtype, as Fabric's own do.

    Args:
        precision: Lightning's word for it.
    """

    def __init__(self, precision: Any) -> None:
        self.precision = precision

    def convert_output(self, data: Any) -> Any:
        return apply_to_collection(data, Tensor, _in_default_dtype)


class TerrazzoPrecision(pytorch.Precision):
    """Steps without a closure, and clips over all shards.

    Args:
        precision: Lightning's word for it.
    """

    def __init__(self, precision: str, strategy: Any) -> None:
        self.precision = precision
        self._strategy = weakref.ref(strategy)

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
        return {"precision": self.precision}


def _in_default_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
