"""What a rank has been told, as the document that says the same: the launcher's environment, and plugin objects."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.accelerate.keys import KEYS
from terrazzo.dialects.formats.nested import load_named
from terrazzo.dialects.formats.shared.accelerate_stack import AXES
from terrazzo.documents import parse_value
from terrazzo.errors import BadInput

__all__ = [
    "DYNAMO",
    "SWITCHES",
    "deepspeed_document",
    "deepspeed_file",
    "dynamo_section",
    "fsdp_section",
    "launched_document",
    "parallelism_section",
]

SWITCHES = {
    "fsdp": "ACCELERATE_USE_FSDP",
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "megatron": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""The variables that switch an engine on, where they are "true"."""
DYNAMO = "ACCELERATE_DYNAMO_"
"""How the variables of torch.compile begin."""
_PARALLELISM = "parallelism_config_"
_OTHER_VERSION = {
    "1": ("fsdp_reshard_after_forward",),
    "2": ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch"),
}
"""What a version of FSDP passes over; the launcher sets both versions' variables."""
_FSDP_NAMES = {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}
_DEEPSPEED_NAMES = {
    "zero3_init": "zero3_init_flag",
    "config_file": "deepspeed_config_file",
    "moe_layer_cls_names": "deepspeed_moe_layer_cls_names",
}
_BESIDE = {"gradient_clipping": float, "gradient_accumulation_steps": int}
"""What the launcher says beside DeepSpeed's configuration, which has the same keys."""
_WRAPS = {"transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "size_based_auto_wrap_policy": "SIZE_BASED_WRAP"}


def launched_document(environment: Mapping[str, str]) -> dict[str, Any]:
    """The document that `accelerate launch` was given, as far as it switches FSDP, DeepSpeed or a mesh on.

    `distributed_type` is left out where none of them is on; nothing else is then of use.
    """
    document: dict[str, Any] = {}
    on = {name for name, switch in SWITCHES.items() if environment.get(switch, "false").lower() == "true"}
    if "parallelism" in on:
        section = _section(environment, "PARALLELISM_CONFIG_", _PARALLELISM)
        document |= {"distributed_type": "MULTI_GPU", "parallelism_config": section}
    if "fsdp" in on:
        document |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(environment)}
    if "deepspeed" in on:
        document |= {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(environment)}
    if "megatron" in on:
        document |= {"distributed_type": "MEGATRON_LM"}
    return document


def _section(environment: Mapping[str, str], start: str, prefix: str = "") -> dict[str, Any]:
    """Variables whose names begin with `start` as keys that begin with `prefix`, their values as in YAML."""
    variables = {name.removeprefix(start).lower(): text for name, text in environment.items() if name.startswith(start)}
    return {f"{prefix}{name}": _value(text, f"{start}{name.upper()}") for name, text in variables.items()}


def _value(text: str, variable: str) -> Any:
    """A number, a switch or nothing as in YAML; any other text as it stands: it has no comments and no sections."""
    value = parse_value(text, "yaml", variable)
    return text if "#" in text or isinstance(value, str | list | dict) else value


def _fsdp_key(variable: str) -> str:
    return _FSDP_NAMES.get(variable.lower(), variable.lower())


def _fsdp(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {name: text for name, text in environment.items() if f"fsdp_config.{_fsdp_key(name)}" in KEYS}
    section = {_fsdp_key(name): value for name, value in _section(known, "FSDP_", "fsdp_").items()}
    passed_over = _OTHER_VERSION.get(
        str(section.get("fsdp_version", 1)), ()
    )  # another version is the dialect's to refuse
    return {name: value for name, value in section.items() if name not in passed_over}


def _deepspeed(environment: Mapping[str, str]) -> dict[str, Any]:
    variables = _section(environment, "ACCELERATE_DEEPSPEED_")
    section = {_DEEPSPEED_NAMES.get(name, name): value for name, value in variables.items()}
    if section.get("deepspeed_config_file") not in (None, "none"):
        return {"deepspeed_config_file": section["deepspeed_config_file"]}  # it says all
    return section | _section(environment, "ACCELERATE_GRADIENT_", "gradient_")


def dynamo_section(environment: Mapping[str, str], plugin: Any = None, backend: Any = None) -> dict[str, Any]:
    """Which compiler, `no` for none, with its options.

    Args:
        plugin: a `TorchDynamoPlugin`, in place of all else.
        backend: a `DynamoBackend` or its name, in place of the environment's.
    """
    section = _section(environment, DYNAMO)
    if plugin is not None:
        section = {"backend": "no" if plugin.disable else plugin.backend, "mode": plugin.mode}
        section |= {"use_fullgraph": plugin.fullgraph, "use_dynamic": plugin.dynamic, "options": plugin.options}
    elif backend is not None:
        section["backend"] = backend
    word = str(getattr(section.get("backend"), "value", section.get("backend") or "no")).lower()
    return {**section, "backend": "no" if word == "false" else word}  # YAML reads NO as false


# -- objects ---------------------------------------------------------------------------------------------------------


def parallelism_section(config: Any) -> dict[str, Any]:
    """The `parallelism_config` of a `ParallelismConfig`."""
    return {f"{_PARALLELISM}{axis}_size": getattr(config, f"{axis}_size") for axis in AXES}


def fsdp_section(plugin: Any) -> dict[str, Any]:
    """The `fsdp_config` of a `FullyShardedDataParallelPlugin`. Raises: `BadInput` for what no configuration can say."""
    if plugin.mixed_precision_policy is not None:
        raise BadInput(
            f"fsdp_plugin.mixed_precision_policy is {plugin.mixed_precision_policy}: say it as mixed_precision='bf16', "
            "or pass precision=tz.Precision(...) beside the plugin."
        )
    if plugin.param_init_fn is not None and not plugin.sync_module_states:  # with that it is Accelerate's own
        raise BadInput(
            "fsdp_plugin.param_init_fn is a function of your own: leave it out, and give modules on the meta device a "
            "reset_parameters, by which they get their values unit by unit."
        )
    offload = getattr(plugin.cpu_offload, "offload_params", type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy")
    section = {
        "fsdp_version": plugin.fsdp_version,
        "fsdp_offload_params": bool(offload),
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
        "fsdp_activation_checkpointing_offload": bool(getattr(plugin, "activation_checkpointing_offload", False)),
        "fsdp_cpu_ram_efficient_loading": bool(plugin.cpu_ram_efficient_loading),
        **_wrapping(plugin),
    }
    if plugin.ignored_modules is not None:
        section["fsdp_ignored_modules"] = str(plugin.ignored_modules)
    if plugin.fsdp_version == 2:
        return section | {"fsdp_reshard_after_forward": plugin.reshard_after_forward}
    strategy, ahead = plugin.sharding_strategy or plugin.reshard_after_forward, plugin.backward_prefetch
    return section | {
        "fsdp_sharding_strategy": strategy.name.lstrip("_"),
        "fsdp_backward_prefetch": "NO_PREFETCH" if ahead is None else ahead.name,
        "fsdp_forward_prefetch": bool(plugin.forward_prefetch),
        "fsdp_sync_module_states": bool(plugin.sync_module_states),
        "fsdp_use_orig_params": bool(plugin.use_orig_params),
    }


def _wrapping(plugin: Any) -> dict[str, Any]:
    """Units, by the names that the plugin's functions stand for."""
    policy = plugin.auto_wrap_policy
    if policy is None:
        return {"fsdp_auto_wrap_policy": "NO_WRAP"}
    function = policy.func if isinstance(policy, functools.partial) else policy
    word = _WRAPS.get(getattr(function, "__name__", ""))
    if word is None:
        raise BadInput(
            "fsdp_plugin.auto_wrap_policy is a function of your own: leave it out, and pass the classes of the units "
            "as Accelerator(units=[...])."
        )
    section: dict[str, Any] = {"fsdp_auto_wrap_policy": word}
    if word == "SIZE_BASED_WRAP":
        section["fsdp_min_num_params"] = plugin.min_num_params or 1
    elif plugin.transformer_cls_names_to_wrap:
        section["fsdp_transformer_layer_cls_to_wrap"] = ",".join(plugin.transformer_cls_names_to_wrap)
    return section


def deepspeed_file(document: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """The deepspeed_config_file of a launcher's document, as `deepspeed_document` takes a plugin; None without one.

    Raises: `BadInput` for a file that cannot be read, or what the launcher says otherwise than the file.
    """
    name = document.get("deepspeed_config", {}).get("deepspeed_config_file")
    if name is None:
        return None
    document_in_file, fault = load_named(name, ReadingContext())
    if fault:
        raise BadInput(f"deepspeed_config_file: {fault}. Name the file by its absolute path.")
    beside = {key: environment.get(f"ACCELERATE_{key.upper()}") for key in _BESIDE}
    for key, kind in _BESIDE.items():
        told, own = beside[key], document_in_file.get(key, "auto")
        if told not in (None, "auto") and own != "auto" and kind(told) != own:
            raise BadInput(f"{key} is {told} from the launcher and {own} in '{name}': leave out one of them.")
        if told not in (None, "auto"):
            document_in_file.setdefault(key, "auto")
    return SimpleNamespace(deepspeed_config=document_in_file, **beside)


def deepspeed_document(plugin: Any, mixed: str) -> dict[str, Any]:
    """The DeepSpeed configuration of a `DeepSpeedPlugin`, with "auto" as Accelerate fills it in.

    Args:
        mixed: Accelerate's mixed_precision.

    Raises: `BadInput` where both say a precision, and not the same.
    """
    document: dict[str, Any] = copy.deepcopy(plugin.deepspeed_config)
    for half in ("bf16", "fp16"):
        section = document.get(half)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            section["enabled"] = mixed == half
        elif section is None and mixed == half:
            document[half] = {"enabled": True}
        elif (
            isinstance(section, dict) and bool(section.get("enabled")) != (mixed == half) and mixed in ("bf16", "fp16")
        ):
            raise BadInput(
                f"mixed_precision is {mixed}, and DeepSpeed's configuration has {half}.enabled: "
                f'{section.get("enabled", False)}: leave mixed_precision out, or write "auto" there.'
            )
    for key, kind in _BESIDE.items():
        value = getattr(plugin, key, None)
        if document.get(key) == "auto" and value not in (None, "auto"):
            document[key] = kind(value)
    return document
