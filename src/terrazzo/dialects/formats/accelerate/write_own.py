"""Writing back what was read from Accelerate's YAML: every key that stood there, with what it says now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.accelerate.keys import canonical_key
from terrazzo.dialects.formats.shared.accelerate_stack import AXES
from terrazzo.dialects.formats.shared.deepspeed_words import STAGES

__all__ = ["write_own"]

_D, _F, _P = "deepspeed_config.", "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
_Say = Callable[[Description], Any]


def _of(path: str) -> _Say:
    return lambda description: description.value(path)


def _folder(place: int) -> _Say:
    return lambda description: (description.value("offload.path") or ("none",))[place]


_SAY: Mapping[str, _Say] = {
    "num_processes": _of("mesh.world"),
    "use_cpu": lambda description: description.value("training.device") == "cpu",
    f"{_F}reshard_after_forward": lambda description: description.row in ("zero3", "hybrid_shard"),
    f"{_F}offload_params": lambda description: description.value("offload.weight") != "device",
    f"{_F}min_num_params": _of("units.min_numel"),
    f"{_F}transformer_layer_cls_to_wrap": lambda description: ",".join(description.value("units.classes")),
    f"{_F}forward_prefetch": lambda description: bool(description.value("prefetch.forward")),
    f"{_F}cpu_ram_efficient_loading": _of("loading.low_memory"),
    f"{_F}sync_module_states": _of("loading.broadcast"),
    f"{_F}activation_checkpointing": lambda description: description.value("activation_checkpointing.mode") != "none",
    f"{_F}activation_checkpointing_offload": _of("activation_checkpointing.offload"),
    f"{_F}ignored_modules": _of("units.ignored"),
    f"{_D}zero_stage": lambda description: STAGES.get(description.row or "", 3),
    f"{_D}offload_optimizer_nvme_path": _folder(0),
    f"{_D}offload_param_nvme_path": _folder(-1),
    f"{_D}gradient_accumulation_steps": _of("batch.accumulation"),
    f"{_D}gradient_clipping": _of("training.clip"),
    f"{_D}zero3_init_flag": _of("loading.low_memory"),
    f"{_D}zero3_save_16bit_model": lambda description: description.value("saving.export") != "none",
    **{f"{_P}{axis}_size": _of(f"mesh.{axis}") for axis in AXES},
}
"""What a key says, from the description. Keys that choose among words are kept as they stood."""


def write_own(description: Description) -> Writing:
    """The document again: what stands in the extras as it is, the rest from the settings that it gave."""
    draft = Draft(description, "Accelerate", "accelerate")
    extra_keys = {extra.key for extra in description.extras}
    for path, setting in description.items():
        if not setting.is_set:
            continue
        for key in setting.keys:
            if key not in extra_keys and (say := _SAY.get(canonical_key(key))) is not None:
                draft.write(key, say(description))
        draft.implied(path, key=setting.key)
    return draft.finish()
