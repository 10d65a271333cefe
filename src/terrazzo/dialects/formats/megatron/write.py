"""Writing Megatron-LM's arguments: ranks and memory. What a step does is in `write_training`."""

from __future__ import annotations

from terrazzo.dialects.core.agreement import NVME_ONLY, has_no_effect
from terrazzo.dialects.core.description import DATA_AXIS_PATHS, SHARDING_PATHS, TIER_PATHS, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.megatron.keys import DEGREES, FSDP_ROWS, KEYS, LAUNCHER
from terrazzo.dialects.formats.megatron.write_precision import write_precision
from terrazzo.dialects.formats.megatron.write_training import write_training
from terrazzo.dialects.formats.shared.launcher import write_ranks
from terrazzo.dialects.formats.shared.plan_rows import nearest_row
from terrazzo.dialects.formats.shared.tiers import ON_CPU, tier_and_share

__all__ = ["write"]

_ROWS = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "hybrid_shard", "hfsdp")
_GROUPS = "num-distributed-optimizer-instances"
_GROUPED = ("-", "-", "-", "S")
"""Places of a distributed optimizer in several groups."""


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The arguments; defaults are left out."""
    draft = Draft(description, "Megatron-LM", KEYS)
    _mesh(draft)
    _sharding(draft, context)
    _offload(draft)
    write_precision(draft)
    write_training(draft, context)
    return draft.finish()


def _mesh(draft: Draft) -> None:
    for path, key in DEGREES.items():
        if draft.value(path, 1) != 1:
            draft.put(path, key, draft.value(path))
    ring, ulysses = draft.value("mesh.cp", 1), draft.value("mesh.sp", 1)
    if ulysses != 1 and ring != 1:
        draft.refuse("mesh.sp", "ranks share sequences in one way: set mesh.cp or mesh.sp to 1")
    elif ulysses != 1:
        draft.put("mesh.sp", "context-parallel-size", ulysses)
        draft.write("cp-comm-type", "a2a")
    if ring != 1:
        draft.put("mesh.cp", "context-parallel-size", ring)
    write_ranks(draft, f"{LAUNCHER}.nproc-per-node", f"{LAUNCHER}.nnodes")
    if draft.value("parallel.sequence") and not has_no_effect(draft.description, "parallel.sequence"):
        draft.put("parallel.sequence", "sequence-parallel", True)
    _stages(draft)


def _stages(draft: Draft) -> None:
    paths = ("parallel.schedule", "parallel.chunks")
    if has_no_effect(draft.description, "parallel.chunks"):
        return
    if draft.value("parallel.schedule", "1f1b") == "1f1b":
        draft.implied("parallel.schedule")
    else:
        draft.lossy("parallel.schedule", "stages work by 1f1b: the numbers are the same")
    if draft.value("parallel.chunks", 1) > 1:
        draft.put("parallel.chunks", "num-virtual-stages-per-pipeline-rank", draft.value("parallel.chunks"))
    else:
        draft.implied(paths[1])


def _sharding(draft: Draft, context: ReadingContext) -> None:
    places = tuple(draft.value(path) for path in SHARDING_PATHS)
    row, why = nearest_row(draft.description, _ROWS)
    groups = draft.value("mesh.dp_replicate", 1)
    if places == _GROUPED:
        _in_groups(draft, "use-distributed-optimizer", groups, "")
    elif row is None and why:
        draft.refuse(SHARDING_PATHS, f"{why}: choose one of {', '.join(_ROWS)}")
    elif row == "zero0":
        draft.implied(SHARDING_PATHS, why)
    elif row == "zero1":
        draft.put(SHARDING_PATHS, "use-distributed-optimizer", True, why)
    elif row == "shard_grad_op":
        _torchs(draft, why, context)
    elif row in ("hybrid_shard", "hfsdp"):
        if row == "hfsdp":
            draft.write("outer-dp-sharding-strategy", "optim")
        draft.write("ckpt-format", "fsdp_dtensor")
        _in_groups(draft, "use-megatron-fsdp", groups, why)
    elif row is not None:
        _megatrons(draft, row, why)
    if not draft.has(_GROUPS):
        draft.holds(DATA_AXIS_PATHS, "all ranks that the other axes leave")


def _megatrons(draft: Draft, row: str, why: str) -> None:
    """Write Megatron-FSDP, with the format that its checkpoints have to have."""
    draft.put(SHARDING_PATHS, "use-megatron-fsdp", True, why, "lossy" if why else "applied")
    strategy = next(word for word, named in FSDP_ROWS.items() if named == row)
    draft.write("data-parallel-sharding-strategy", strategy)
    draft.write("ckpt-format", "fsdp_dtensor")


def _torchs(draft: Draft, why: str, context: ReadingContext) -> None:
    """FSDP2, which alone keeps gathered weights for backward, and does not go with every axis or model."""
    for path in ("mesh.pp", "mesh.ep"):
        if draft.value(path, 1) != 1:
            draft.refuse(path, "--use-torch-fsdp2, which shard_grad_op is, does not go with it: choose zero1 or zero3")
    fault = "is not run in fp16" if draft.value("precision.compute") == "fp16" else ""
    if fault := fault or ("takes no model whose head is its embedding" if context.tied else ""):
        draft.refuse(SHARDING_PATHS, f"--use-torch-fsdp2, which shard_grad_op is, {fault}: choose zero1 or zero3")
        return
    draft.put(SHARDING_PATHS, "use-torch-fsdp2", True, why, "lossy" if why else "applied")
    for switch in ("torch-fsdp2-no-reshard-after-forward", "no-gradient-accumulation-fusion"):
        draft.write(switch, True)
    draft.write(untied := "untie-embeddings-and-output-weights", True)
    if context.layers is None:  # the model is not known
        text = "--use-torch-fsdp2 stops without it, and it makes a model whose head is its embedding another one"
        draft.missing("sharding.between", untied, f"{text}: choose zero1 or zero3 for such a model")


def _in_groups(draft: Draft, switch: str, groups: int | None, why: str) -> None:
    """Split over the ranks of a group, and whole in each of several."""
    if groups is None or groups == 1:
        draft.refuse(
            (*SHARDING_PATHS, *DATA_AXIS_PATHS), "the number of groups of data ranks is not known, or is 1: set it"
        )
        return
    draft.put(SHARDING_PATHS, switch, True, why, "lossy" if why else "applied")
    draft.put("mesh.dp_replicate", _GROUPS, groups)
    draft.implied("mesh.dp_shard", "all ranks of a group that the other axes leave")


def _offload(draft: Draft) -> None:
    tiers = {path: draft.value(path, "device") for path in TIER_PATHS}
    moved = [path for path, tier in tiers.items() if tier != "device"]
    for path in moved:
        if path != "offload.optim":
            draft.lossy(path, "of the states, the optimizer's alone goes to host memory: the device needs more room")
    tier, share, several = tier_and_share(tiers["offload.optim"])
    if tier != "device" and not (draft.has("use-distributed-optimizer") or draft.has("use-megatron-fsdp")):
        draft.lossy("offload.optim", "an optimizer that is split goes to host memory alone: choose zero1 or zero3")
    elif tier != "device":
        why = "it has host memory alone" if tier == "nvme" or several else ""
        draft.put("offload.optim", "optimizer-cpu-offload", True, why, "lossy" if why else "applied")
        draft.write("use-precision-aware-optimizer", True)
        if share is not None:
            draft.write("optimizer-offload-fraction", share)
    if "nvme" not in "".join(tiers.values()):
        draft.implied(NVME_ONLY)
    if not moved:
        draft.implied([path for path in _WAYS if draft.is_set(path)])
    if draft.value("offload.step") in ("auto", "synchronous"):
        draft.holds("offload.step", ON_CPU)
    if draft.value("offload.pin"):
        draft.holds("offload.pin", "its copies on the CPU are pinned by default")


_WAYS = ("offload.step", "offload.pin", "offload.threads", "offload.buffers")
