"""Writing `zero_optimization`: the stage nearest to a row, degrees, and tiers."""

from __future__ import annotations

from terrazzo.dialects.core.agreement import has_no_effect
from terrazzo.dialects.core.description import MODEL_AXES, SHARDING_PATHS
from terrazzo.dialects.core.key_verdict import VerdictKind
from terrazzo.dialects.core.mesh import TWO_AXES
from terrazzo.dialects.formats.deepspeed.deepspeed_draft import DeepSpeedDraft
from terrazzo.dialects.formats.deepspeed.versions import REMOVED
from terrazzo.dialects.formats.shared.deepspeed_words import STAGES, WHOLE_BETWEEN_STEPS, write_grad
from terrazzo.dialects.formats.shared.launcher import leave_to_launcher
from terrazzo.dialects.formats.shared.tiers import ON_CPU, tier_and_share

__all__ = ["write_mesh", "write_offload", "write_prefetch", "write_saving", "write_sharding"]

ZERO = "zero_optimization"
MICS = f"{ZERO}.mics_shard_size"
_GROUP = "DeepSpeed splits over all ranks and keeps a second copy of the weights in the group (hpZ)"
_LOST = {
    "shard_grad_op": WHOLE_BETWEEN_STEPS,
    "hybrid_shard": f"{_GROUP}: less memory, more traffic between groups",
    "hybrid_shard_zero2": f"{_GROUP}, which it gathers again for backward",
    "hfsdp": f"{_GROUP}: weights and gradients are split over all ranks too",
}
"""How the nearest stage differs from a row that DeepSpeed lacks."""


def write_sharding(draft: DeepSpeedDraft) -> int:
    """Write the stage and return it."""
    if not any(draft.is_set(path) for path in SHARDING_PATHS):
        return 0
    row = draft.description.row or ""
    known = row in STAGES or row in _LOST
    stage, why = (STAGES.get(row, 3), _LOST.get(row, "")) if known else _by_states(draft)
    mics = row == "hybrid_shard" and draft.version < REMOVED[MICS].since
    note = f"{why}; MiCS, which had it, is gone from DeepSpeed" if row == "hybrid_shard" and not mics else why
    kind: VerdictKind = "lossy" if why and not mics else "applied"
    draft.put(SHARDING_PATHS, f"{ZERO}.stage", stage, note if kind == "lossy" else "", kind)
    if row in TWO_AXES:
        _group(draft, MICS if mics else f"{ZERO}.zero_hpz_partition_size")
    return stage


def _by_states(draft: DeepSpeedDraft) -> tuple[int, str]:
    """The stage that splits at least the same states, for rows without a name."""
    axes = {state: draft.value(f"sharding.{state}", "-") for state in ("weight", "grad", "optim")}
    stage = 3 if axes["weight"] != "-" else 2 if axes["grad"] != "-" else 1 if axes["optim"] != "-" else 0
    row = ", ".join(f"{state} {where}" for state, where in axes.items())
    return stage, f"DeepSpeed has no row with {row}: stage {stage} is nearest"


def _group(draft: DeepSpeedDraft, key: str) -> None:
    """The group's size."""
    size = draft.value("mesh.dp_shard")
    if size is None:
        draft.lossy(SHARDING_PATHS, f"how many ranks share a copy is not known: set {key}")
    else:
        draft.put("mesh.dp_shard", key, size)
        draft.implied("mesh.dp_replicate")


def write_mesh(draft: DeepSpeedDraft, stage: int) -> None:
    """Write degrees. Data parallelism is what the launcher starts."""
    leave_to_launcher(draft, "deepspeed with a hostfile or --num_gpus, or ")
    if not draft.has(f"{ZERO}.zero_hpz_partition_size") and not draft.has(MICS):
        draft.holds(["mesh.dp_shard", "mesh.dp_replicate"], "all ranks that the launcher starts")
    degrees = {axis: draft.value(f"mesh.{axis}", 1) for axis in MODEL_AXES}
    if degrees["tp"] > 1:
        draft.put("mesh.tp", "tensor_parallel.autotp_size", degrees["tp"])
    if degrees["sp"] > 1:
        draft.put("mesh.sp", "sequence_parallel_size", degrees["sp"])
    if degrees["ep"] > 1:
        draft.write("expert_parallel.enabled", True)
        draft.put("mesh.ep", "expert_parallel.autoep_size", degrees["ep"])
    if degrees["cp"] > 1:
        draft.refuse(
            "mesh.cp", "DeepSpeed has no ring attention: split sequences with sequence_parallel_size (Ulysses)"
        )
    if degrees["pp"] > 1:
        _pipeline(draft, degrees["pp"], stage)
    if not has_no_effect(draft.description, "parallel.sequence"):
        _sequence(draft)


def _pipeline(draft: DeepSpeedDraft, stages: int, stage: int) -> None:
    if stage > 1:
        draft.refuse("mesh.pp", f"DeepSpeed's pipeline engine takes ZeRO stages 0 and 1, not {stage}")
    else:
        why = "the model must be a PipelineModule in the code"
        draft.put("mesh.pp", "pipeline.stages", stages, why, "lossy")
        _stages(draft)


def _stages(draft: DeepSpeedDraft) -> None:
    if draft.value("parallel.schedule", "1f1b") == "1f1b" and draft.value("parallel.chunks", 1) == 1:
        draft.implied(["parallel.schedule", "parallel.chunks"])
    else:
        why = "a PipelineModule has one stage on each rank, and works by 1f1b: the numbers are the same"
        draft.lossy(["parallel.schedule", "parallel.chunks"], why)


def _sequence(draft: DeepSpeedDraft) -> None:
    if draft.value("parallel.sequence"):
        draft.lossy("parallel.sequence", "its tensor parallel ranks keep whole sequences: more memory")
    else:
        draft.implied("parallel.sequence", "its tensor parallel ranks keep whole sequences")


# -- offload -------------------------------------------------------------------------------------------------------


def write_offload(draft: DeepSpeedDraft, stage: int) -> None:
    """Write tiers, as far as the stage has them."""
    optim, weight = _optimizer(draft, stage), _weight(draft, stage)
    write_grad(draft, optim)
    sections = [name for name, tier in (("offload_optimizer", optim), ("offload_param", weight)) if tier != "device"]
    _pin(draft, sections)
    _nvme(draft, [name for name, tier in (("offload_optimizer", optim), ("offload_param", weight)) if tier == "nvme"])
    if optim == "device" or draft.value("offload.step", "auto") in ("auto", "synchronous"):
        draft.holds("offload.step", "" if optim == "device" else ON_CPU)
    else:
        draft.lossy("offload.step", "DeepSpeed's step on the CPU waits for the whole of backward")


def _optimizer(draft: DeepSpeedDraft, stage: int) -> str:
    """Write where optimizer state lives; the tier that it gets."""
    wanted = str(draft.value("offload.optim", "device"))
    tier, share, mixed = tier_and_share(wanted)
    key, ratio = f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_optimizer.ratio"
    if tier == "device":
        return "device"
    if stage == 0:
        draft.refuse("offload.optim", "DeepSpeed offloads from ZeRO stage 1 on: take plan zero1 or above")
        return "device"
    if tier == "nvme" and stage < 3:
        draft.put("offload.optim", key, "cpu", "DeepSpeed keeps optimizer state on NVMe at stage 3 only", "lossy")
        return "cpu"
    if mixed:
        draft.put("offload.optim", key, tier, f"DeepSpeed has one tier for it: all of it on {tier}", "lossy")
        return tier
    if share and (tier == "nvme" or stage < 3):
        draft.put("offload.optim", key, tier, "DeepSpeed has shares on the CPU at stage 3 only: all of it", "lossy")
        return tier
    draft.put("offload.optim", key, tier)
    if share:
        draft.put("offload.optim", ratio, share)
    return wanted


def _weight(draft: DeepSpeedDraft, stage: int) -> str:
    """Write where the weights live; the tier that they get."""
    tier, share, mixed = tier_and_share(str(draft.value("offload.weight", "device")))
    key = f"{ZERO}.offload_param.device"
    if tier == "device":
        return "device"
    if stage < 3:
        draft.refuse("offload.weight", f"DeepSpeed moves weights off the device at stage 3 only, this is stage {stage}")
        return "device"
    why = "DeepSpeed offloads all weights or none: all of them" if share else ""
    why = f"DeepSpeed has one tier for weights: all of them on {tier}" if mixed else why
    draft.put("offload.weight", key, tier, why, "lossy" if why else "applied")
    return tier


def _pin(draft: DeepSpeedDraft, sections: list[str]) -> None:
    """Write it for every section."""
    draft.implied("offload.pin")
    for name in sections if draft.value("offload.pin") is not None else ():
        draft.put_if_needed("offload.pin", f"{ZERO}.{name}.pin_memory", draft.value("offload.pin"))


def _nvme(draft: DeepSpeedDraft, sections: list[str]) -> None:
    """Write folders, buffers and how files are read."""
    ways = {"offload.block_bytes": "aio.block_size", "offload.depth": "aio.queue_depth"}
    if not sections:
        draft.implied([*ways, "offload.path", "offload.buffers", "offload.direct"], "nothing is on NVMe")
        return
    for path, key in ways.items():
        if draft.value(path) is not None:
            draft.put_if_needed(path, key, draft.value(path))
    folders = draft.value("offload.path", ())
    for name, folder in zip(sections, (folders[0], folders[-1]) if folders else (), strict=False):
        draft.put("offload.path", f"{ZERO}.{name}.nvme_path", str(folder))
    if len(folders) > len(sections):
        draft.lossy("offload.path", f"DeepSpeed swaps to one folder: {folders[0]}", f"{ZERO}.{sections[0]}.nvme_path")
    if draft.value("offload.buffers") is not None:
        draft.put_if_needed("offload.buffers", f"{ZERO}.{sections[0]}.buffer_count", draft.value("offload.buffers"))
    if draft.value("offload.direct") is False:
        draft.lossy("offload.direct", "DeepSpeed always reads past the page cache")
    else:
        draft.implied("offload.direct")


# -- the rest ------------------------------------------------------------------------------------------------------


def write_prefetch(draft: DeepSpeedDraft, stage: int) -> None:
    """Stage 3 gathers ahead in both passes, by elements; 0 of them switches it off."""
    paths = ["prefetch.forward", "prefetch.backward"]
    ahead = [draft.value(path, 0) for path in paths if draft.is_set(path)]
    key = f"{ZERO}.stage3_prefetch_bucket_size"
    if stage < 3 or not ahead:
        draft.holds(paths, "whole weights need no gathering")
    elif not any(ahead):
        draft.put(paths, key, 0)
    else:
        draft.implied(paths)
        for path in paths:
            if draft.value(path, 1) != 1:
                draft.lossy(path, f"DeepSpeed gathers {key} elements ahead, in forward and backward alike")


def write_saving(draft: DeepSpeedDraft, stage: int) -> None:
    """Write what is collected on saving."""
    made = "local" if stage else "full"
    if draft.value("saving.state", made) != made:
        again = "on another number of ranks after ds_to_universal.py"
        draft.lossy("saving.state", f"DeepSpeed's checkpoint resumes on as many ranks as wrote it, {again}")
    else:
        draft.implied("saving.state")
    export, key = draft.value("saving.export"), f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and export is not None:
        why = "a plain state dict: call save_16bit_model" if export == "hf" else ""
        draft.put_if_needed("saving.export", key, export != "none", ("lossy" if export == "hf" else "applied", why))
    elif export == "full":
        draft.holds("saving.export", "save_16bit_model writes it at any time")
    if draft.value("saving.background"):
        why = "a checkpoint of that writer may not load again: try it first"
        draft.put("saving.background", "checkpoint.writer.decoupled", True, why, "lossy")
