"""What LightningCLI stops at in FSDPStrategy's arguments, or hands on as mere text.

By type hints it imports dtypes and classes, and knows the arguments that FSDPStrategy names; what this passes on to
FullyShardedDataParallel beside them is taken in `dict_kwargs`, as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.dialect import Finding
from terrazzo.dialects.formats.lightning.keys import FSDP, FSDP_BY_NAME, SHARED
from terrazzo.dialects.formats.lightning.trainer_arguments import Strategy

__all__ = ["cli_findings"]

_NAMED = {*FSDP, *FSDP_BY_NAME, *SHARED}
_CLASSES = ("auto_wrap_policy", "activation_checkpointing_policy", "activation_checkpointing")


def cli_findings(strategy: Strategy) -> Iterable[Finding]:
    """What is wrong with FSDPStrategy as a `class_path` with arguments, to LightningCLI alone."""
    arguments, others = strategy.init_args, strategy.dict_kwargs
    section = strategy.section
    for name in arguments:
        if name not in _NAMED:
            text = "FSDPStrategy has no argument of that name, and LightningCLI stops: say it in dict_kwargs."
            yield Finding.error(f"{section}.{name}", text)
    for name, value in _mapping(arguments.get("mixed_precision")).items():
        if str(name).endswith("_dtype") and isinstance(value, str) and not value.startswith("torch."):
            text = f"LightningCLI imports it, and stops at a word without its module: write torch.{value}."
            yield Finding.error(f"{section}.mixed_precision.{name}", text)
    for name in _CLASSES:
        listed = arguments.get(name)
        bare = [each for each in listed if "." not in str(each)] if isinstance(listed, list) else []
        if bare:
            text = f"LightningCLI imports classes by their paths, and stops at {bare[0]}: write its module in front."
            yield Finding.warning(f"{section}.{name}", text)
    mesh = arguments.get("device_mesh")
    if isinstance(mesh, list) and len(mesh) != 2:
        yield Finding.error(f"{section}.device_mesh", "LightningCLI takes two sizes: replicas, and the shards of each.")
    if isinstance(others.get("backward_prefetch"), str):
        text = "LightningCLI hands it on as text, which FSDP does not know: backward gathers nothing ahead."
        yield Finding.warning(f"{strategy.where}.dict_kwargs.backward_prefetch", text)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
