"""What an Accelerate script and its launcher ask of the engine, from every place that Accelerate looks at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs
from torch import nn

from terrazzo.dialects.core.description import Description, Setting
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.accelerate.launch_environment import (
    DYNAMO,
    SWITCHES,
    deepspeed_document,
    deepspeed_file,
    dynamo_section,
    fsdp_section,
    launched_document,
    parallelism_section,
)
from terrazzo.engine import LossScaling, Plan, Precision
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup, trained_dtype
from terrazzo.integrations.shared.from_description import setup_for
from terrazzo.integrations.shared.honour import check_compiler, honour

__all__ = ["RequestedSetup", "hidden"]

DEFAULT_PLAN = "zero2"
"""Where nothing names a plan. Weights stay whole, so that what a script for replicas does with them still works."""
_SCALING = "precision.loss_scaling"
_RECIPES = ("AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "FP8RecipeKwargs")
_REFUSED = {
    "megatron_lm_plugin": "it is another engine",
    "torch_tp_plugin": "it splits tensors, and this integration trains data-parallel only",
}


class RequestedSetup:
    """Every setting for the engine, whoever said it.

    Args:
        arguments: for Accelerate's class; those that are Terrazzo's to honour are taken out of it.
        words: Terrazzo's own arguments.
        alone: nothing else may say anything.

    Attributes:
        mixed: Accelerate's mixed_precision; bf16 for fp8.
        float8: it is fp8: linear layers multiply in 8 bits, on bf16.
        deepspeed: DeepSpeed's configuration is there, which says the precision as well.

    Raises: `BadInput` naming the setting that cannot be honoured.
    """

    def __init__(self, arguments: dict[str, Any], words: TerrazzoArguments, alone: bool) -> None:
        self.words = words
        self.mixed = str(
            arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        ).lower()
        self.float8 = self.mixed == "fp8"
        if self.float8:
            arguments["mixed_precision"] = self.mixed = "bf16"
        self.document, plugin = launched_document(os.environ), _one_plugin(arguments)
        self.plugin = deepspeed_file(self.document, os.environ) if plugin is None else plugin
        if (fsdp := arguments.pop("fsdp_plugin", None)) is not None:
            self.document |= {"distributed_type": "FSDP", "fsdp_config": fsdp_section(fsdp)}
        if (sizes := arguments.pop("parallelism_config", None)) is not None:
            kind = self.document.get("distributed_type", "MULTI_GPU")
            self.document |= {"distributed_type": kind, "parallelism_config": parallelism_section(sizes)}
        self.deepspeed = self.plugin is not None or self.document.get("distributed_type") == "DEEPSPEED"
        self.compile = _compile(arguments)
        self.scaling: LossScaling | None = None
        for handler in arguments.get("kwargs_handlers") or ():
            self._take(handler)
        self._refuse(arguments, alone)

    # -- taken, and refused ------------------------------------------------------------------------------------------

    def _take(self, handler: object) -> None:
        """What a kwargs handler asks of the engine that Terrazzo stands in for."""
        if type(handler).__name__ in _RECIPES:
            raise BadInput(
                f"{type(handler).__name__} cannot be honoured: mixed_precision='fp8' is torchao's recipe tensorwise, "
                "by Terrazzo's own products. Leave it out; or pass mixed_precision='bf16' and call "
                "tz.nn.float8(model, ...), which has another recipe and a choice of layers, before prepare."
            )
        hook = getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
        if isinstance(handler, DistributedDataParallelKwargs) and hook != DDPCommunicationHookType.NO:
            raise BadInput(
                f"DistributedDataParallelKwargs.comm_hook is {hook}: Terrazzo sends gradients in the precision's "
                "'reduce' dtype. Leave it out, and pass precision=tz.Precision(reduce='bf16')."
            )
        if isinstance(handler, GradScalerKwargs):
            if not handler.enabled:
                raise BadInput("GradScalerKwargs.enabled is False: fp16 needs loss scaling. Remove it, or use bf16.")
            if self.deepspeed:
                raise BadInput(
                    "GradScalerKwargs beside DeepSpeed, whose section fp16 has the loss scale: leave it out, and "
                    "say initial_scale_power and loss_scale_window there."
                )
            growth, backoff = handler.growth_factor, handler.backoff_factor
            self.scaling = LossScaling(handler.init_scale, growth, backoff, handler.growth_interval)

    def _refuse(self, arguments: dict[str, Any], alone: bool) -> None:
        words, engine = self.words, "DEEPSPEED" if self.plugin else self.document.get("distributed_type")
        for name, why in _REFUSED.items():
            if arguments.pop(name, None) is not None:
                raise BadInput(f"{name} cannot be honoured: {why}. Leave it out.")
        if self.plugin is not None or "deepspeed_config" in self.document:
            self._refuse_beside_deepspeed()
        lost = os.environ.get("MIXED_PRECISION", "no").lower() if "NPROC" in os.environ else "no"
        if lost not in ("no", "fp8" if self.float8 else self.mixed):
            raise BadInput(
                f"notebook_launcher(mixed_precision={lost!r}) does not reach the Accelerator, with Accelerate's own "
                f"class neither: pass Accelerator(mixed_precision={lost!r})."
            )
        if alone and (engine or self.compile or words != TerrazzoArguments()):
            raise BadInput("setup= says everything by itself: leave out plugins and Terrazzo's other arguments.")
        if words.plan is not None and engine:
            raise BadInput(
                f"plan={words.plan!r} was given, and the configuration of {engine} (a plugin, or the launcher's "
                f"{' or '.join(SWITCHES.values())}) names a plan, too: leave out one of them."
            )
        if words.precision is not None and (self.mixed != "no" or self.deepspeed):
            raise BadInput(
                f"precision={words.precision!r} was given, and mixed_precision ({self.mixed}, from the argument, the "
                "launcher or DeepSpeed's configuration) says a precision, too: leave out one of them."
            )

    def _refuse_beside_deepspeed(self) -> None:
        """What else decides how ranks share a model: DeepSpeed's configuration is all that is read then."""
        if "fsdp_config" in self.document:
            raise BadInput("FSDP is asked for beside DeepSpeed (a plugin, or the launcher's switches): leave out one.")
        for key, size in self.document.get("parallelism_config", {}).items():
            if key.endswith("_size") and size not in (None, 1):
                raise BadInput(
                    f"{key} is {size} beside DeepSpeed, whose configuration alone says here which ranks share what: "
                    "set it to 1, or leave parallelism_config out."
                )

    # -- built -------------------------------------------------------------------------------------------------------

    def setup(self, device: torch.device, world: int, model: nn.Module | None = None) -> EngineSetup:
        """What `tz.shard` is to be told.

        Args:
            device: of this rank.
            world: number of ranks.
            model: its dtype holds where nothing says one; None for a look at the rest, as for an fp32 model.
        """
        loaded = torch.float32 if model is None else trained_dtype(model)
        description = self._description(world)
        if description is None:
            replicas = TerrazzoArguments(Plan.named(DEFAULT_PLAN), self._of_replicas(loaded, device))
            setup = EngineSetup(replicas)
        else:
            setup = setup_for(description, device, loaded)
        setup = setup.overridden_by(self.words)
        recipe = "tensorwise" if self.float8 else setup.float8
        return replace(setup, compile=self.compile or setup.compile, float8=recipe)

    def _of_replicas(self, loaded: torch.dtype, device: torch.device) -> Precision:
        """The precision of plain replicas: all in the model's dtype, under autocast if `mixed_precision` says so."""
        if self.mixed == "fp16" and device.type == "cpu":
            raise BadInput(
                "mixed_precision is fp16 on a CPU, where Accelerate silently trains in fp32: use bf16 or no."
            )
        if loaded is torch.float16:
            raise BadInput("The model's parameters are fp16, and updating them there loses steps: load it in fp32.")
        scaling = (self.scaling or LossScaling()) if self.mixed == "fp16" else None
        return Precision(
            weight=loaded,
            compute=loaded,
            reduce=loaded,
            accumulate=loaded,
            master=loaded,
            moments=loaded,
            loss_scaling=scaling,
        )

    def _description(self, world: int) -> Description | None:
        """What the documents say; None where there are none."""
        context = ReadingContext(world=world)
        if self.plugin is not None:
            document = deepspeed_document(self.plugin, self.mixed)
            _check_built_by_script(document)
            return honour("deepspeed", document, context, "DeepSpeed's configuration")
        if not self.document:
            return None
        document = self.document | {"mixed_precision": self.mixed}
        description = honour("accelerate", document, context, "Accelerate's configuration")
        if self.scaling is None or description.value(_SCALING) is None:
            return description
        return description.replace({_SCALING: Setting(self.scaling, "derived", "GradScalerKwargs")})


def _one_plugin(arguments: dict[str, Any]) -> Any:
    """DeepSpeed's plugin, if there is one."""
    plugins = [arguments.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    chosen = next((plugin for plugin in plugins if plugin is not None), None)
    if isinstance(chosen, dict):
        if len(chosen) != 1:
            raise BadInput(
                f"deepspeed_plugin has {len(chosen)} plugins, and this integration takes one: {', '.join(chosen)}."
            )
        return next(iter(chosen.values()))
    return chosen


def _check_built_by_script(document: Mapping[str, Any]) -> None:
    """Raises: `BadInput` for an optimizer or a schedule, which Accelerate has DeepSpeed build for a `DummyOptim`."""
    if built := [name for name in ("optimizer", "scheduler") if document.get(name)]:
        raise BadInput(
            f"DeepSpeed's configuration has {' and '.join(built)}, and the script hands its own to prepare(): leave "
            f"{'it' if len(built) == 1 else 'them'} out of the configuration."
        )


def _compile(arguments: dict[str, Any]) -> bool:
    """Whether units are compiled. Raises: `BadInput` for another compiler, or options that would be lost."""
    section = dynamo_section(os.environ, arguments.pop("dynamo_plugin", None), arguments.pop("dynamo_backend", None))
    chosen = section.get("backend", "no")
    if chosen == "no":
        return False
    options = ("use_fullgraph", "use_dynamic", "mode", "options")
    check_compiler("dynamo_backend", chosen, {name: section.get(name) for name in options})
    return True


# -- changed, and undone ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """An environment in which Accelerate finds no other engine to start."""
    names = [name for name in os.environ if name in SWITCHES.values() or name.startswith(DYNAMO)]
    variables = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(variables)
