"""The frameworks that may run a setup, and how one is used."""

from __future__ import annotations

import re
from dataclasses import dataclass

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean

__all__ = ["FRAMEWORKS", "TERRAZZO", "Framework"]

FRAMEWORKS = ("terrazzo", "deepspeed", "fsdp1", "fsdp2", "megatron", "torchao")


@dataclass(frozen=True)
class Framework:
    """The framework that runs a setup, and what is known of its use.

    Attributes:
        name: one of `FRAMEWORKS`.
        version: such as `(0, 19, 8)`; None for the newest.
        clip: whether the global gradient norm is clipped.
        optimizer_in_backward: each parameter is updated as soon as its gradient is there.
        whole_model_unit: the model was wrapped once, as one sharding unit.
        expert_layers: the framework's own mixture-of-experts layers are used.
    """

    name: str = "terrazzo"
    version: tuple[int, ...] | None = None
    clip: bool = True
    optimizer_in_backward: bool = False
    whole_model_unit: bool = False
    expert_layers: bool = False

    @classmethod
    def parse(cls, text: str) -> Framework:
        """The framework that a text such as `"deepspeed"` or `"deepspeed@0.18.2"` names.

        Raises:
            BadInput: an unknown name; the nearest is named.
        """
        name, at, version = text.strip().lower().partition("@")
        if name not in FRAMEWORKS:
            raise BadInput(
                f"There is no framework {name!r}.{did_you_mean(name, FRAMEWORKS)} Known are {', '.join(FRAMEWORKS)}."
            )
        if at and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})*", version):
            raise BadInput(f"The version in {text!r} is not numbers and dots; write {name}@0.19.8, for example.")
        return cls(name, tuple(int(part) for part in version.split(".")) if at else None)

    def before(self, *version: int) -> bool:
        """Whether it is older than `version`."""
        return self.version is not None and self.version < version


TERRAZZO = Framework()
