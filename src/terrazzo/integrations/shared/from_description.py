"""From the neutral description of a configuration to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.dialects.core.description import (
    LOADED,
    MEANING,
    MODEL_AXES,
    Description,
    Setting,
)
from terrazzo.dialects.core.mesh import degrees
from terrazzo.engine import (
    DTYPES,
    LossScaling,
    Offload,
    Plan,
    Precision,
    StateFormat,
    WireFormat,
    data_mesh,
)
from terrazzo.engine.runtime.topology import told_ranks_here
from terrazzo.errors import BadInput, Misuse
from terrazzo.exchange import gather_json
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import ActivationSetup, EngineSetup
from terrazzo.integrations.shared.honour import RequestedSettings
from terrazzo.words import CHECKPOINT_MODES

__all__ = ["setup_for"]

_NEVER = 2**31
"""A patience that no run exhausts: a fixed loss scale is a dynamic one that never moves."""
_MIB = 2**20


def setup_for(
    description: Description, device: torch.device, loaded: torch.dtype | None = None, own: Sequence[str] = ()
) -> EngineSetup:
    """What a description asks for, with defaults where it is silent: plan zero3, fp32, no clipping.

    What it asks for and nobody does is a warning on rank 0, the first time.

    Args:
        description: from a dialect's reader, or `description.build`.
        device: of this rank.
        loaded: the model's dtype, which stacks that say no dtype leave as it is.
        own: beginnings of settings' paths that the integration carries out by itself.

    Raises: `BadInput` for what an integration cannot do, `Misuse` without a process group where the mesh needs one.
    """
    settings = RequestedSettings(description)
    setup = _setup(settings, device, loaded)
    settings.warn_of_the_rest(own)
    return setup


def _setup(settings: RequestedSettings, device: torch.device, loaded: torch.dtype | None) -> EngineSetup:
    _check_units(settings)
    arguments = TerrazzoArguments(
        plan=settings.description.plan or Plan.named("zero3"),
        precision=_precision(settings, loaded),
        units=_units(settings),
        mesh=_mesh(settings, device),
        prefetch=_prefetch(settings),
        offload=_offload(settings),
    )
    return EngineSetup(
        arguments,
        activation_checkpointing=_activation_checkpointing(settings),
        compile=bool(settings.value("training.compile")),
        float8=_float8(settings),
        skip=_names(settings.value("precision.skip")),
        autocast=_autocast(settings),
        clip=settings.value("training.clip") or None,
        accumulation=settings.value("batch.accumulation") or 1,
    )


def _names(value: Sequence[str] | None) -> tuple[str, ...] | None:
    """None where the engine chooses; an empty list is a choice of its own."""
    return None if value is None else tuple(value)


# -- precision -----------------------------------------------------------------------------------------------------


def _precision(settings: RequestedSettings, loaded: torch.dtype | None) -> Precision:
    autocast = bool(settings.value("precision.autocast"))

    def dtype(name: str, otherwise: torch.dtype) -> torch.dtype:
        return _dtype(settings, f"precision.{name}", loaded) or otherwise

    weight = dtype("weight", torch.float32)
    compute = weight if autocast and not _gathers(settings) else dtype("compute", weight)
    master = dtype("master", torch.float32)
    reduce = dtype("reduce", master)
    narrow = {form.value: form for form in StateFormat}.get(settings.value("precision.moments"))
    return Precision(
        weight=weight,
        compute=compute,
        reduce=reduce,
        accumulate=dtype("accumulate", torch.promote_types(reduce, master)),
        master=master,
        moments=narrow or dtype("moments", master),
        loss_scaling=_loss_scaling(settings),
        rounding=settings.value("precision.rounding") or "nearest",
        gather={form.value: form for form in WireFormat}.get(settings.value("precision.gather")),
        error_feedback=bool(settings.value("precision.error_feedback")),
        quantized_reduce={form.value: form for form in WireFormat}.get(settings.value("precision.quantized_reduce")),
    )


def _dtype(settings: RequestedSettings, path: str, loaded: torch.dtype | None) -> torch.dtype | None:
    value = settings.value(path)
    if value is None:
        return None
    if value == LOADED:
        if loaded is None:
            raise Misuse(f"{path} follows the model's dtype: call setup_for(description, device, loaded=model_dtype).")
        return loaded
    if value not in DTYPES:
        raise BadInput(
            f"{settings.name(path)} asks for {value}, in which Terrazzo does not train: use one of {', '.join(DTYPES)}."
        )
    return DTYPES[value]


def _loss_scaling(settings: RequestedSettings) -> LossScaling | None:
    scaling: LossScaling | None = settings.value("precision.loss_scaling")
    fixed = settings.value("precision.static_loss_scale")
    if not fixed:
        return scaling
    try:
        return LossScaling(init=float(fixed), interval=_NEVER, hysteresis=_NEVER)
    except BadInput as error:
        raise BadInput(f"{settings.name('precision.static_loss_scale')} is {fixed}. {error}") from None


def _gathers(settings: RequestedSettings) -> bool:
    """Whether modules get weights that were gathered, and cast, for them; else theirs are whole, as they are stored."""
    return settings.value("sharding.weight") not in (None, "-")


def _autocast(settings: RequestedSettings) -> torch.dtype | None:
    if not settings.value("precision.autocast"):
        return None
    dtype = _dtype(settings, "precision.compute", None)
    if dtype is not torch.bfloat16 and not (dtype is torch.float16 and _gathers(settings)):
        raise BadInput(
            f"{settings.name('precision.compute')} asks for autocast to {str(dtype).removeprefix('torch.')}; "
            "Terrazzo's loss scaling needs weights in fp16: autocast to bf16, shard the weights, or use fp16 without "
            "autocast."
        )
    return dtype


def _float8(settings: RequestedSettings) -> str | None:
    linears = str(settings.value("precision.linears") or "compute")
    return linears.removeprefix("fp8-") if linears.startswith("fp8-") else None


# -- ranks ---------------------------------------------------------------------------------------------------------


def _mesh(settings: RequestedSettings, device: torch.device) -> DeviceMesh | None:
    for axis in MODEL_AXES:
        if (degree := settings.value(path := f"mesh.{axis}") or 1) != 1:
            raise BadInput(
                f"{settings.name(path)} asks for a {MEANING[path]} of {degree}; this integration trains "
                "data-parallel only. Set it to 1."
            )
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return data_mesh(device.type, *_shape(settings, dist.get_world_size()))


def _shape(settings: RequestedSettings, world: int) -> tuple[int, ...]:
    """Sizes of the data axes: (replicas, shards), or (ranks,)."""
    told = settings.value("mesh.world")
    if told not in (None, world):
        raise BadInput(f"{settings.name('mesh.world')} says {told} ranks; {world} are running. Start {told}.")
    axes = degrees(settings.description.replace({"mesh.world": Setting(world, "derived")}))
    replicas, shards = axes["dp_replicate"], axes["dp_shard"]
    hybrid = any(axis in str(settings.value(f"sharding.{state}")) for state in ("weight", "optim") for axis in "SR")
    if hybrid and replicas is None and shards is None:
        replicas, shards = _nodes(settings, world)
    if replicas is None or shards is None or replicas * shards != world:
        sizes = f"{replicas or '?'} replicas × {shards or '?'} shards"
        keys = [settings.name(f"mesh.{name}") for name in ("dp_replicate", "dp_shard")]
        raise BadInput(f"{' and '.join(dict.fromkeys(keys))}: {sizes} do not make up the {world} ranks that run.")
    return (replicas, shards) if hybrid or replicas > 1 else (shards,)


def _nodes(settings: RequestedSettings, world: int) -> tuple[int, int]:
    """Replicas are nodes and shards a node's ranks, as FSDP has it where it is not told. Collective.

    What each rank was told is compared first: else some would make one mesh, and others another, or none.
    """
    told = gather_json(told_ranks_here())
    sizes = [int(size) if size.isdecimal() else 0 for size in told]
    on_each = sizes[0]
    if not on_each or len(set(sizes)) > 1 or world % on_each:
        other = next((rank for rank, size in enumerate(sizes) if size != on_each), 0)
        why = (
            f"nodes have unlike numbers of ranks (LOCAL_WORLD_SIZE is {told[0]!r} on rank 0 and {told[other]!r} on rank"
            f" {other})"
            if other
            else "how many nodes there are is not said"
        )
        raise BadInput(
            f"{settings.name('sharding.weight')} splits over the ranks of one node and copies between nodes, and "
            f"{why}: say the number of replicas, start with torchrun and as many ranks on each node, which tells them "
            "how many (LOCAL_WORLD_SIZE; the deepspeed launcher's LOCAL_SIZE counts, too), or shard over all ranks."
        )
    return world // on_each, on_each


# -- the rest ------------------------------------------------------------------------------------------------------


def _check_units(settings: RequestedSettings) -> None:
    if ignored := settings.value("units.ignored"):
        raise BadInput(
            f"{settings.name('units.ignored')} leaves out {ignored!r}; Terrazzo shards every parameter of the "
            "model. Remove it."
        )


def _units(settings: RequestedSettings) -> tuple[str, ...] | None:
    """Class names; none at all for one unit; None where they are found by themselves, as for a least size, too."""
    policy = settings.value("units.policy")
    if policy == "none":
        return ()
    return tuple(settings.value("units.classes") or ()) or None if policy == "classes" else None


def _prefetch(settings: RequestedSettings) -> int:
    ahead = [settings.value(f"prefetch.{way}") for way in ("forward", "backward")]
    known = [value for value in ahead if value is not None]
    return max(known) if known else 1


def _offload(settings: RequestedSettings) -> Offload:
    def value(name: str) -> Any:
        return settings.value(f"offload.{name}")

    arguments: dict[str, Any] = {name: value(name) for name in ("path", "pin", "threads", "direct", "depth", "digest")}
    arguments["step"] = value("step") if value("step") != "auto" else None
    arguments["path"] = value("path") or None
    if value("block_bytes"):
        arguments["block_mib"] = value("block_bytes") / _MIB
    nvme = any("nvme" in str(value(state)) for state in ("weight", "grad", "optim"))
    if nvme and not arguments["path"]:
        raise BadInput(
            f"{settings.name('offload.optim')} places states on nvme, and no folder is named for them: set "
            f"{settings.name('offload.path')}, on a local NVMe drive."
        )
    return Offload(**{name: setting for name, setting in arguments.items() if setting is not None})


def _activation_checkpointing(settings: RequestedSettings) -> ActivationSetup:
    def value(name: str) -> Any:
        return settings.value(f"activation_checkpointing.{name}")

    mode, every = value("mode") or "none", 1
    if mode == "every":
        mode, every = "full", value("every") or 1
    if mode not in CHECKPOINT_MODES:
        raise BadInput(
            f"{settings.name('activation_checkpointing.mode')} asks for activation checkpointing {mode!r}: use "
            "full, selective or selective_half."
        )
    if value("offload") and mode == "none":
        raise BadInput(
            f"{settings.name('activation_checkpointing.offload')} moves to the host what activation checkpointing "
            "keeps, and the configuration asks for none: turn that on, or remove it."
        )
    return ActivationSetup(mode, every, _names(value("ops")), bool(value("offload")))
