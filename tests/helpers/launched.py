"""Accelerate's own launcher and plugins as an oracle: what ranks are told of a file, and what they make of it."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml


def launched(document: dict[str, Any], folder: Path, *flags: str) -> dict[str, str]:
    """The environment that `accelerate launch --config_file` would start ranks with, as far as it is Accelerate's."""
    pytest.importorskip("accelerate", reason="Accelerate's launcher is the oracle")
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False))
    words = ["--config_file", str(file), *flags, "--num_cpu_threads_per_process", "1", "train.py"]
    arguments, defaults, from_file = _validate_launch_command(_parser().parse_args(words))
    arguments.main_process_port = 0
    if arguments.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        environment = prepare_multi_gpu_env(arguments)
    ours = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {name: value for name, value in environment.items() if name.startswith(ours)}


@cache
def _parser() -> Any:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


def has_plugin(document: dict[str, Any]) -> bool:
    """Whether a file's engine is one whose plugin can be built here: DeepSpeed's wants DeepSpeed."""
    kinds = ("FSDP",) if find_spec("deepspeed") is None else ("FSDP", "DEEPSPEED")
    return document["distributed_type"] in kinds


def plugin(environment: dict[str, str]) -> Any:
    """The plugin that a rank builds from its environment."""
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, dataclasses, patch_environment

    with pytest.MonkeyPatch.context() as monkeypatch, patch_environment(**environment):
        monkeypatch.setattr(dataclasses, "is_cuda_available", lambda: True)  # FSDP1 asks for a device to load onto
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        if "ACCELERATE_USE_DEEPSPEED" not in environment:
            return FullyShardedDataParallelPlugin()
        pytest.importorskip("deepspeed", reason="Accelerate's plugin wants it")
        return DeepSpeedPlugin()
