"""What `transformers.TrainingArguments` ask of the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

from terrazzo.dialects.core.agreement import agree_on
from terrazzo.dialects.core.description import MEANING, PATHS, Description
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.accelerate.launch_environment import SWITCHES, dynamo_section, launched_document
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.engine import DTYPE_NAMES
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup, trained_dtype
from terrazzo.integrations.shared.first_rank import warn_once
from terrazzo.integrations.shared.from_description import setup_for
from terrazzo.integrations.shared.honour import check_compiler, honour

__all__ = ["check", "check_split", "check_training", "describe", "requested_setup"]

_OURS: tuple[str, ...] = ("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "bf16", "fp16", "torch_compile")
_OURS += ("torch_compile_backend", "torch_compile_mode", "gradient_accumulation_steps")
"""Fields of TrainingArguments that Terrazzo honours in place of Accelerate. The Trainer itself does the others."""
_THEIRS = ("optimizer.", "schedule.", "training.clip")
"""Settings that a DeepSpeed document may have, too, and the Trainer carries out."""
_BY_CLASS = ("optimizer.decay", "schedule.warmup_lag", "schedule.decay_lag")
"""Those of them that no key says: the classes that run decide them."""
_SHARES = {"schedule.warmup_start": " of the peak"}
"""What a value is a part of, where its key may be a rate."""


def requested_setup(
    args: transformers.TrainingArguments, model: nn.Module | None, words: TerrazzoArguments
) -> tuple[EngineSetup, bool]:
    """What the engine is asked for, and whether checkpoints have weights that `from_pretrained` loads, too.

    Args:
        model: None where it is not there yet, as for an fp32 model.
        words: Terrazzo's own arguments.

    Raises: `BadInput` for what cannot be honoured.
    """
    loaded = torch.float32 if model is None else check(args, model)
    description = describe(args, loaded)
    exports = description.value("saving.export") != "none"
    if args.save_only_model and not exports:
        raise BadInput("save_only_model with state_dict_type SHARDED_STATE_DICT would save nothing: drop one.")
    setup = setup_for(description, args.device, loaded).overridden_by(words)
    if setup.plan.weight.axes:
        check_split(args, setup.plan.name)
    return replace(setup, accumulation=1, clip=None), exports  # the Trainer's own loop does both


def describe(args: transformers.TrainingArguments, loaded: torch.dtype) -> Description:
    """What TrainingArguments ask of Terrazzo. Raises: `BadInput` for what they ask and it cannot do."""
    _check_launcher(args)
    document = args.to_dict()
    if args.parallelism_config is not None:
        fields = vars(args.parallelism_config).items()
        document["parallelism_config"] = {name: value for name, value in fields if name.endswith("_size")}
    if args.mixed_precision != "no":  # said by the launcher, where it is not said here
        document |= {args.mixed_precision: True}
    name = DTYPE_NAMES.get(loaded, str(loaded).removeprefix("torch."))
    context = ReadingContext(args.world_size, load_dtype=name, trainer=document)
    ours = {key: document[key] for key in _OURS if document.get(key)}
    description = honour("trainer", ours, context, "TrainingArguments")
    if args.deepspeed:
        _check_deepspeed(document, context)
    return description


def _check_launcher(args: transformers.TrainingArguments) -> None:
    """What the Trainer leaves to Accelerate, which is not asked here. Its mixed_precision is honoured."""
    engine = launched_document(os.environ).get("distributed_type")
    if engine is not None:
        raise BadInput(
            f"accelerate launch was told {engine} ({' or '.join(SWITCHES.values())}), and here the plan is said by "
            "TrainingArguments(fsdp=..., deepspeed=...) or terrazzo=TerrazzoArguments(plan=...): say it there, and "
            "start the script with torchrun."
        )
    compiler = dynamo_section(os.environ)["backend"]
    if compiler != "no" and not args.torch_compile:
        raise BadInput(
            f"ACCELERATE_DYNAMO_BACKEND asks for {compiler}, of accelerate launch or of an earlier Trainer's "
            "torch_compile: say TrainingArguments(torch_compile=True), or unset it."
        )


def _check_deepspeed(document: Mapping[str, Any], context: ReadingContext) -> None:
    """The Trainer steps, schedules and clips as its own arguments say: a DeepSpeed document must not say otherwise."""
    both = read_document(dialect("trainer"), document, context).description
    own = read_document(dialect("trainer"), {**document, "deepspeed": None}, context).description
    differing = [path for path in PATHS if path.startswith(_THEIRS) and not agree_on(path, both, own)]
    told = [
        f"{both[path].key or path} is {both.value(path)!r}, not {own.value(path)!r}{_SHARES.get(path, '')}"
        for path in differing
        if path not in _BY_CLASS
    ]
    if told:
        apart = "; ".join(told)
        raise BadInput(f'The DeepSpeed document contradicts TrainingArguments: {apart}. Say "auto" there, or nothing.')
    for path in differing:
        warn_once(
            f"{both[path].key}: the Trainer's own optimizer and schedule run, of which {path} ({MEANING[path]}) is"
            f" {own.value(path)}; DeepSpeed's have {both.value(path)}."
        )


def check(args: transformers.TrainingArguments, model: nn.Module) -> torch.dtype:
    """The dtype of what is trained. Raises: `BadInput` for what the Trainer can do and this integration cannot."""
    told = int(os.environ.get("WORLD_SIZE", "1"))
    problems = {
        "one process with several GPUs (DataParallel): start one process per GPU with torchrun": args.n_gpu > 1,
        f"{told} ranks that each train alone, as TrainingArguments do without a GPU: set use_cpu=True": args.world_size
        != told,
        "save_on_each_node: a sharded checkpoint is one folder that all nodes see": args.save_on_each_node,
        "a model spread by device_map: load it without": len(set(getattr(model, "hf_device_map", {}).values())) > 1,
        "a model sharded by from_pretrained(distributed_config=...): load it without": getattr(
            model, "is_distributed_loading_by_transformers", False
        ),
        "a model that DeepSpeed's zero.Init has split, as TrainingArguments(deepspeed=...) of stage 3 make "
        "from_pretrained do: leave deepspeed out and pass terrazzo=TerrazzoArguments(plan='zero3')": any(
            hasattr(each, "ds_id") for each in model.parameters()
        ),
        "use_transformers_continuous_batching, which turns the weights into another dtype and runs each rank for "
        "itself: leave it out": getattr(args, "use_transformers_continuous_batching", False),
    }
    if wrong := [text for text, there in problems.items() if there]:
        raise BadInput(f"Terrazzo's Trainer does not take {'; nor '.join(wrong)}.")
    if args.torch_compile:
        options = {"torch_compile_mode": args.torch_compile_mode}
        check_compiler("torch_compile_backend", args.torch_compile_backend, options)
    return trained_dtype(model)


def check_training(args: transformers.TrainingArguments) -> None:
    """Raises: `BadInput` for arguments of an evaluation that a model which has been trained here cannot do."""
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise BadInput(
                f"{name} turns the model's weights into another dtype for an evaluation after training, and those of a "
                "sharded model stay what they are: leave it out; bf16=True evaluates under autocast as it trains."
            )


def check_split(args: transformers.TrainingArguments, plan: str) -> None:
    """Raises: `BadInput` for arguments, TRL's among them, that cannot be where `plan` splits weights."""
    problems = {
        "sync_ref_model copies whole weights into the reference model: leave it out": getattr(
            args, "sync_ref_model", False
        ),
        "use_vllm sends whole weights to vLLM: leave it out": getattr(args, "use_vllm", False),
    }
    if wrong := [text for text, there in problems.items() if there]:
        raise BadInput(f"Plan {plan} splits weights: {'; '.join(wrong)}, or use zero2.")
