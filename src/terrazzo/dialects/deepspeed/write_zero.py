"""Writing `zero_optimization`: the stage nearest to a row, degrees, and tiers."""

from __future__ import annotations

from terrazzo.dialects.deepspeed.pen import Pen
from terrazzo.dialects.deepspeed.versions import REMOVED
from terrazzo.dialects.description import SHARDING
from terrazzo.dialects.fsdp_words import ON_CPU
from terrazzo.dialects.meaning import TWO_AXES, tier_and_share
from terrazzo.dialects.verdict import Kind

__all__ = ["write_mesh", "write_offload", "write_prefetch", "write_saving", "write_sharding"]

ZERO = "zero_optimization"
MICS = f"{ZERO}.mics_shard_size"
_STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hpz": 3}
_GROUP = "DeepSpeed splits over all ranks and keeps a second copy of the weights in the group (hpZ)"
_NEAREST = {
    "shard_grad_op": (2, "DeepSpeed keeps the weights whole between steps as well: more memory, the same numbers"),
    "hybrid_shard": (3, f"{_GROUP}: less memory, more traffic between groups"),
    "hybrid_shard_zero2": (3, f"{_GROUP}, which it gathers again for backward"),
    "hfsdp": (3, f"{_GROUP}: weights and gradients are split over all ranks too"),
}


def write_sharding(pen: Pen) -> int:
    """Write the stage and return it."""
    if not any(pen.is_set(path) for path in SHARDING):
        return 0
    row = pen.description.row
    stage, why = (_STAGES[row], "") if row in _STAGES else _NEAREST.get(row or "", _by_states(pen))
    mics = row == "hybrid_shard" and pen.version < REMOVED[MICS].since
    key = ZERO if pen.stood(SHARDING, ZERO) else f"{ZERO}.stage"
    note = f"{why}; MiCS, which had it, is gone from DeepSpeed" if row == "hybrid_shard" and not mics else why
    kind: Kind = "lossy" if why and not mics else "applied"
    if key == ZERO:
        pen.put(SHARDING, key, bool(stage))
    elif pen.own:
        pen.option(SHARDING, key, stage, (kind, note))
    else:
        pen.put(SHARDING, key, stage, note if kind == "lossy" else "", kind)
    if row in TWO_AXES:
        _group(pen, MICS if mics else f"{ZERO}.zero_hpz_partition_size")
    return stage


def _by_states(pen: Pen) -> tuple[int, str]:
    """The stage that splits at least the same states, for rows without a name."""
    axes = {state: pen.value(f"sharding.{state}", "-") for state in ("weight", "grad", "optim")}
    stage = 3 if axes["weight"] != "-" else 2 if axes["grad"] != "-" else 1 if axes["optim"] != "-" else 0
    asked = ", ".join(f"{state} {where}" for state, where in axes.items())
    return stage, f"DeepSpeed has no row with {asked}: stage {stage} is nearest"


def _group(pen: Pen, key: str) -> None:
    """The group's size."""
    size = pen.value("mesh.dp_shard")
    if size is None:
        pen.lossy(SHARDING, f"how many ranks share a copy is not known: set {key}")
    else:
        pen.put("mesh.dp_shard", key, size)
        pen.implied("mesh.dp_replicate")


def write_mesh(pen: Pen, stage: int) -> None:
    """Write degrees. Data parallelism is what the launcher starts."""
    pen.implied("mesh.world", "said to the launcher: deepspeed --num_gpus N, or torchrun --nproc-per-node N")
    if pen.stood("mesh.dp_shard", "data_parallel_size"):
        pen.put("mesh.dp_shard", "data_parallel_size", pen.value("mesh.dp_shard"))
    elif not pen.has(f"{ZERO}.zero_hpz_partition_size") and not pen.has(MICS):
        pen.implied(["mesh.dp_shard", "mesh.dp_replicate"], "all ranks that the launcher starts")
    degrees = {axis: pen.value(f"mesh.{axis}", 1) for axis in ("tp", "sp", "ep", "cp", "pp")}
    if degrees["tp"] > 1:
        pen.put("mesh.tp", "tensor_parallel.autotp_size", degrees["tp"])
    if degrees["sp"] > 1:
        pen.put("mesh.sp", "sequence_parallel_size", degrees["sp"])
    if degrees["ep"] > 1:
        pen.write("expert_parallel.enabled", True)
        pen.put("mesh.ep", "expert_parallel.autoep_size", degrees["ep"])
    if degrees["cp"] > 1:
        pen.refuse("mesh.cp", "DeepSpeed has no ring attention: split sequences with sequence_parallel_size (Ulysses)")
    if degrees["pp"] > 1:
        _pipeline(pen, degrees["pp"], stage)


def _pipeline(pen: Pen, stages: int, stage: int) -> None:
    if stage > 1:
        pen.refuse("mesh.pp", f"DeepSpeed's pipeline engine takes ZeRO stages 0 and 1, not {stage}")
    elif pen.own:
        pen.put("mesh.pp", "pipeline.stages", stages)
    else:
        why = "the model must be a PipelineModule in the code"
        pen.put("mesh.pp", "pipeline.stages", stages, why, "lossy")


# -- offload -------------------------------------------------------------------------------------------------------


def write_offload(pen: Pen, stage: int) -> None:
    """Write tiers, as far as the stage has them."""
    optim, weight = _optimizer(pen, stage), _weight(pen, stage)
    _grad(pen, optim)
    sections = [name for name, tier in (("offload_optimizer", optim), ("offload_param", weight)) if tier != "device"]
    _pin(pen, sections)
    _nvme(pen, [name for name, tier in (("offload_optimizer", optim), ("offload_param", weight)) if tier == "nvme"])
    if optim == "device" or pen.value("offload.step", "auto") in ("auto", "synchronous"):
        pen.implied("offload.step", "" if optim == "device" else ON_CPU)
    else:
        pen.lossy("offload.step", "DeepSpeed's step on the CPU waits for the whole of backward")


def _optimizer(pen: Pen, stage: int) -> str:
    """Write where optimizer state lives; the tier that it gets."""
    asked = str(pen.value("offload.optim", "device"))
    tier, share, mixed = tier_and_share(asked)
    key, ratio = f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_optimizer.ratio"
    if tier == "device":
        return _on_device(pen, "offload.optim", key)
    if stage == 0:
        pen.refuse("offload.optim", "DeepSpeed offloads from ZeRO stage 1 on: take plan zero1 or above")
        return "device"
    if tier == "nvme" and stage < 3:
        pen.put("offload.optim", key, "cpu", "DeepSpeed keeps optimizer state on NVMe at stage 3 only", "lossy")
        return "cpu"
    if mixed:
        pen.put("offload.optim", key, tier, f"DeepSpeed has one tier for it: all of it on {tier}", "lossy")
        return tier
    if share and (tier == "nvme" or stage < 3):
        pen.put("offload.optim", key, tier, "DeepSpeed has shares on the CPU at stage 3 only: all of it", "lossy")
        return tier
    pen.put("offload.optim", key, pen.kept.get(key, tier))
    if share:
        pen.put("offload.optim", ratio, pen.kept.get(ratio, share))
    return asked


def _on_device(pen: Pen, path: str, key: str) -> str:
    """No offload: give back the word that stood there."""
    if pen.own and pen.stood(path, key):
        pen.put(path, key, pen.kept.get(key, "none"))
    return "device"


def _weight(pen: Pen, stage: int) -> str:
    """Write where the weights live; the tier that they get."""
    tier, share, mixed = tier_and_share(str(pen.value("offload.weight", "device")))
    key = f"{ZERO}.offload_param.device"
    if tier == "device":
        return _on_device(pen, "offload.weight", key)
    if stage < 3:
        pen.refuse("offload.weight", f"DeepSpeed moves weights off the device at stage 3 only, this is stage {stage}")
        return "device"
    why = "DeepSpeed offloads all weights or none: all of them" if share else ""
    why = f"DeepSpeed has one tier for weights: all of them on {tier}" if mixed else why
    pen.put("offload.weight", key, tier, why, "lossy" if why else "applied")
    return tier


def _grad(pen: Pen, optim: str) -> None:
    """Gradients go where the optimizer's step is."""
    there = "cpu" if optim == "nvme" else optim
    if pen.value("offload.grad", "device") == there:
        pen.implied("offload.grad", "with the optimizer's state" if there != "device" else "")
    else:
        pen.lossy("offload.grad", f"DeepSpeed keeps gradients where the step is: {there}")


def _pin(pen: Pen, sections: list[str]) -> None:
    """Write it for every section, or for those that had it."""
    pen.implied("offload.pin")
    keys = [f"{ZERO}.{name}.pin_memory" for name in ("offload_optimizer", "offload_param")]
    wanted = [key for key in keys if (pen.stood("offload.pin", key) if pen.own else key.split(".")[1] in sections)]
    for key in wanted:
        if pen.value("offload.pin") is not None and key not in pen.kept:
            pen.option("offload.pin", key, pen.value("offload.pin"))


def _nvme(pen: Pen, sections: list[str]) -> None:
    """Write folders, buffers and how files are read."""
    ways = {"offload.block_bytes": "aio.block_size", "offload.depth": "aio.queue_depth"}
    if not sections and not pen.own:
        pen.implied([*ways, "offload.path", "offload.buffers", "offload.direct"], "nothing is on NVMe")
        return
    for path, key in ways.items():
        if pen.value(path) is not None:
            pen.option(path, key, pen.value(path))
    if not sections:
        return
    folders = pen.value("offload.path", ())
    for name, folder in zip(sections, (folders[0], folders[-1]) if folders else (), strict=False):
        pen.put("offload.path", f"{ZERO}.{name}.nvme_path", str(folder))
    if len(folders) > len(sections):
        pen.lossy("offload.path", f"DeepSpeed swaps to one folder: {folders[0]}", f"{ZERO}.{sections[0]}.nvme_path")
    if pen.value("offload.buffers") is not None:
        pen.option("offload.buffers", f"{ZERO}.{sections[0]}.buffer_count", pen.value("offload.buffers"))
    if pen.value("offload.direct") is False:
        pen.lossy("offload.direct", "DeepSpeed always reads past the page cache")
    else:
        pen.implied("offload.direct")


# -- the rest ------------------------------------------------------------------------------------------------------


def write_prefetch(pen: Pen, stage: int) -> None:
    """Stage 3 gathers ahead in both passes, by elements; 0 of them switches it off."""
    paths = ["prefetch.forward", "prefetch.backward"]
    ahead = [pen.value(path, 0) for path in paths if pen.is_set(path)]
    key = f"{ZERO}.stage3_prefetch_bucket_size"
    if stage < 3 or not ahead:
        pen.implied(paths, "whole weights need no gathering")
    elif not any(ahead):
        pen.put(paths, key, pen.kept.get(key, 0))
    else:
        pen.implied(paths)
        for path in paths:
            if pen.value(path, 1) != 1:
                pen.lossy(path, f"DeepSpeed gathers {key} elements ahead, in forward and backward alike")


def write_saving(pen: Pen, stage: int) -> None:
    """Write what is collected on saving."""
    made = "local" if stage else "full"
    if pen.value("saving.state", made) != made:
        again = "on another number of ranks after ds_to_universal.py"
        pen.lossy("saving.state", f"DeepSpeed's checkpoint resumes on as many ranks as wrote it, {again}")
    else:
        pen.implied("saving.state")
    export, key = pen.value("saving.export"), f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and export is not None:
        why = "a plain state dict: call save_16bit_model" if export == "hf" else ""
        pen.option("saving.export", key, export != "none", ("lossy" if export == "hf" else "applied", why))
    elif export == "full":
        pen.implied("saving.export", "save_16bit_model writes it at any time")
    if pen.value("saving.background"):
        why = "a checkpoint of that writer may not load again: try it first"
        pen.option("saving.background", "checkpoint.writer.decoupled", True, ("applied" if pen.own else "lossy", why))
    elif pen.stood("saving.background", "checkpoint.writer.decoupled"):
        pen.put("saving.background", "checkpoint.writer.decoupled", False)
