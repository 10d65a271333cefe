"""What DeepSpeed has and Terrazzo has not: it can be imported and passed around, and is refused when it is used.

Scripts import mixture-of-experts layers, pipelines and inference engines that a run then never touches.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from terrazzo.errors import BadInput

__all__ = ["AbsentName", "absent_names"]

_OWN_LOOP = "tz.parallelize on a mesh"
_INSTEAD = {
    "checkpointing": "has no activation checkpointing of its own: use torch.utils.checkpoint",
    "moe": f"has no expert parallelism: use a dense model, experts as plain modules, or {_OWN_LOOP} with ep",
    "pipe": f"has no pipelines: ZeRO stage 3 splits the weights instead; or use {_OWN_LOOP} with pp",
    "PipelineModule": f"has no pipelines: ZeRO stage 3 splits the weights instead; or use {_OWN_LOOP} with pp",
    "init_inference": "has no inference kernels: call the model itself",
    "InferenceEngine": "has no inference kernels: call the model itself",
    "tp_model_init": f"has no tensor parallelism: ZeRO stage 3 splits the weights instead; or use {_OWN_LOOP} with tp",
    "sequence": f"has no sequence parallelism: set sequence_parallel_size to 1; or use {_OWN_LOOP} with cp",
}


def absent_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: whatever else DeepSpeed's has can be named, and is refused when it is used."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return AbsentName(f"{module.removeprefix('terrazzo.integrations.')}.{name}")

    return __getattr__


class AbsentName(ModuleType):
    """A name that stands for something that is not here. Raises: `BadInput` when it is called, subclassed or listed."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no {name}")
        return AbsentName(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def _refuse(self) -> NoReturn:
        parts = self.__name__.split(".")
        why = next((_INSTEAD[part] for part in parts if part in _INSTEAD), "does not have it")
        raise BadInput(
            f"{self.__name__} is used, but this integration {why}. Remove it, or run the script with DeepSpeed itself."
        )
