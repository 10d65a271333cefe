"""What DeepSpeed has and Terrazzo has not: it can be imported and passed around, and is refused when it is used.

Scripts import mixture-of-experts layers, pipelines and inference engines that a run then never touches.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from terrazzo.errors import BadInput

__all__ = ["AbsentName"]

_INSTEAD = {
    "checkpointing": "activation checkpointing of its own: use torch.utils.checkpoint",
    "moe": "mixtures of experts with expert parallelism: a dense model, or experts as plain modules, work",
    "pipe": "pipeline parallelism: ZeRO stage 3 splits the weights instead",
    "PipelineModule": "pipeline parallelism: ZeRO stage 3 splits the weights instead",
    "init_inference": "inference kernels: call the model itself",
    "InferenceEngine": "inference kernels: call the model itself",
    "tp_model_init": "tensor parallelism: ZeRO stage 3 splits the weights instead",
    "sequence": "sequence parallelism: set sequence_parallel_size to 1",
}


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
        instead = next((_INSTEAD[part] for part in parts if part in _INSTEAD), "")
        why = f"Terrazzo has no {instead}" if instead else "this integration does not have it"
        raise BadInput(f"{self.__name__} is used, but {why}. Remove it, or run the script with DeepSpeed itself.")
