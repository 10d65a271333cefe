"""Writing Terrazzo's YAML from a description."""

from __future__ import annotations

from terrazzo.config import CONFIG_KEYS
from terrazzo.dialects.core.agreement import NVME_ONLY, has_no_effect
from terrazzo.dialects.core.description import MODEL_AXES, STATES, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, degrees, ranks_left, ranks_needed
from terrazzo.dialects.core.wording import as_text
from terrazzo.dialects.formats.shared.batch_words import ACCUMULATION_FOLLOWS, size_follows
from terrazzo.dialects.formats.shared.fsdp_arguments import bare_classes
from terrazzo.dialects.formats.shared.launcher import leave_to_launcher
from terrazzo.dialects.formats.shared.saving_words import write_folder
from terrazzo.dialects.formats.shared.schedule_words import warmup_steps, write_lags
from terrazzo.dialects.formats.terrazzo.optimizer_arguments import OPTIMIZERS, arguments
from terrazzo.dialects.formats.terrazzo.terrazzo_draft import TerrazzoDraft
from terrazzo.dialects.formats.terrazzo.write_precision import write_precision
from terrazzo.words import CHECKPOINT_MODES

__all__ = ["write"]

_SCHEDULES = CONFIG_KEYS["schedule.name"].choices
_PIPELINES = CONFIG_KEYS["parallel.pipeline.schedule"].choices
_ARGUMENTS = ("optimizer.betas", "optimizer.eps", "optimizer.options")
_MIB = 2**20


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document."""
    draft = TerrazzoDraft(description)
    _plan(draft)
    _tiers(draft)
    _mesh(draft)
    _units(draft)
    write_precision(draft)
    _batch(draft, context)
    _optimizer(draft)
    _schedule(draft)
    _training(draft)
    _activation_checkpointing(draft)
    _saving(draft)
    writing = draft.finish()
    order = [key.partition(".")[0] for key in CONFIG_KEYS]
    document = {section: writing.document[section] for section in sorted(writing.document, key=order.index)}
    return Writing(document, writing.verdicts)


# -- where states live ---------------------------------------------------------------------------------------------


def _plan(draft: TerrazzoDraft) -> None:
    paths = [f"sharding.{state}" for state in STATES]
    if not any(map(draft.is_set, paths)):
        return
    row = draft.description.row
    if _needs_mesh(draft) and degrees(draft.description)["dp_replicate"] in (None, 1):
        draft.refuse(
            paths,
            f"{row or 'this plan'} splits over one node's ranks and copies between nodes, and how many nodes there"
            " are is not known: write the degrees in the file, say --world, or choose full sharding",
        )
    elif row is not None:
        draft.put(paths, "plan.name", row)
    else:
        for path, state in zip(paths, STATES, strict=True):
            draft.put(path, f"plan.{state}", draft.value(path))


def _needs_mesh(draft: TerrazzoDraft) -> bool:
    return any(axis in str(draft.value(f"sharding.{state}")) for state in STATES for axis in "SR")


def _tiers(draft: TerrazzoDraft) -> None:
    for state in ("weight", "grad", "optim"):
        if draft.value(f"offload.{state}", "device") != "device":
            draft.carry(f"offload.{state}")
    idle = all(draft.value(f"offload.{state}", "device") == "device" for state in ("weight", "grad", "optim"))
    for name in ("path", "step", "threads", "pin", "direct", "depth", "digest", "block_bytes", "buffers"):
        _way_of_offload(draft, f"offload.{name}", idle)


def _way_of_offload(draft: TerrazzoDraft, path: str, idle: bool) -> None:
    """How states come and go. `idle`: none does, and only what the file says is said again."""
    value, origin = draft.value(path), draft.setting(path).origin
    if path == "offload.buffers" and not idle:
        draft.lossy(path, "the number of staging buffers follows from plan.prefetch")
    elif idle and (origin != "file" or path == "offload.buffers"):
        draft.implied(path, "nothing is offloaded")
    elif path == "offload.path" and value:
        draft.put(path, path, value[0] if len(value) == 1 else list(value))
    elif path in NVME_ONLY and origin != "file" and has_no_effect(draft.description, path):
        draft.implied(path, "nothing is on NVMe")
    elif path == "offload.block_bytes" and value is not None:
        draft.put(path, "offload.block_mib", value / _MIB)
    elif path not in ("offload.path", "offload.block_bytes"):
        draft.carry(path)


def _mesh(draft: TerrazzoDraft) -> None:
    replicas = degrees(draft.description)["dp_replicate"]
    if draft.value("mesh.dp_replicate") is None and replicas not in (None, 1):
        draft.put("mesh.dp_replicate", "plan.mesh.dp_replicate", replicas)
    else:
        draft.carry("mesh.dp_replicate")
    draft.carry("mesh.tp")
    draft.carry("mesh.ep")
    draft.carry("mesh.pp")
    known = ("tp", "ep", "pp", *_sequences(draft))
    others = [axis for axis in MODEL_AXES if axis not in known and draft.value(f"mesh.{axis}", 1) != 1]
    if others and draft.value("mesh.dp_shard") is not None:
        draft.lossy("mesh.dp_shard", f"without {' and '.join(others)} more ranks are left to it: it takes them all")
    else:
        draft.carry("mesh.dp_shard")
    if draft.value("mesh.nodes", 1) > 1:
        leave_to_launcher(draft, program="-m terrazzo train")
    elif draft.value("mesh.world") is not None:
        why = "how many `terrazzo train` starts by itself on one machine; torchrun and Slurm say it themselves"
        draft.put("mesh.world", "launch.ranks", draft.value("mesh.world"), why)
    _together(draft)
    for axis in others:
        draft.refuse(f"mesh.{axis}", "`terrazzo train` has pp, dp_replicate, dp_shard, cp, tp and ep: set it to 1")


def _together(draft: TerrazzoDraft) -> None:
    """How the ranks of an axis work together, where it has more than one."""
    schedule, chunks = draft.value("parallel.schedule", "1f1b"), draft.value("parallel.chunks", 1)
    for path in ("parallel.schedule", "parallel.chunks", "parallel.sequence"):
        if has_no_effect(draft.description, path):
            draft.implied(path)
        elif path == "parallel.schedule" and schedule not in _PIPELINES:
            draft.lossy(path, f"there is no order of stages {schedule}: it is 1f1b, the numbers are the same")
        elif path == "parallel.chunks" and schedule in _PIPELINES[1:] and chunks != 1:
            draft.lossy(path, f"by {schedule} each rank has one stage")
        else:
            draft.carry(path)


def _sequences(draft: TerrazzoDraft) -> tuple[str, ...]:
    """Write how many ranks share sequences, and how; returns the neutral axes that this says."""
    if draft.value("mesh.sp", 1) == 1 or draft.value("mesh.cp", 1) != 1:
        draft.carry("mesh.cp")
        return ("cp",)
    draft.put("mesh.sp", "plan.mesh.cp", draft.value("mesh.sp"), "with parallel.context.mode: ulysses")
    draft.write("parallel.context.mode", "ulysses")
    draft.implied("mesh.cp")
    return ("cp", "sp")


def _units(draft: TerrazzoDraft) -> None:
    policy, classes = draft.value("units.policy"), draft.value("units.classes", ())
    if policy == "classes" and classes:
        draft.put(["units.policy", "units.classes"], "plan.units", *bare_classes(draft))
    elif policy == "none":
        draft.put("units.policy", "plan.units", [], "the whole model is one unit")
    elif policy == "min_numel":
        draft.lossy(["units.policy", "units.min_numel"], "units are found by themselves: the model's repeated blocks")
    else:
        draft.implied(["units.policy", "units.min_numel", "units.classes"])
    if draft.value("units.ignored"):
        draft.refuse("units.ignored", "every parameter is sharded: there is no list of exceptions yet; remove it")
    _prefetch(draft)


def _prefetch(draft: TerrazzoDraft) -> None:
    both = ["prefetch.forward", "prefetch.backward"]
    if not any(map(draft.is_set, both)):
        return
    forward, backward = draft.value(both[0]), draft.value(both[1])
    ahead = max(value for value in (forward, backward, 0) if value is not None)
    draft.put([path for path in both if draft.value(path) == ahead], "plan.prefetch", ahead)
    for path in both:
        if draft.value(path, ahead) != ahead:
            draft.lossy(path, f"one number for both directions, plan.prefetch {ahead}", "plan.prefetch")


# -- batch, optimizer, schedule ------------------------------------------------------------------------------------


def _batch(draft: TerrazzoDraft, context: ReadingContext) -> None:
    draft.carry("batch.micro_batch", "batch.sequence_length")
    whole, micro = draft.value("batch.global_batch"), draft.value("batch.micro_batch")
    count, ranks = draft.value("batch.accumulation"), ranks_left(draft.description, context.world, SAME_DATA_AXES)
    if whole is not None:
        draft.carry("batch.global_batch")
        _agrees(draft, whole, micro, count, ranks)
    elif micro and count and ranks:
        draft.put("batch.accumulation", "batch.global_batch", micro * count * ranks)
    elif count is not None:
        missing = ranks_needed(draft.description, context.world, SAME_DATA_AXES)
        need = missing if micro else "the micro-batch"
        why = f"Terrazzo counts the global batch, which needs {need} as well: set batch.global_batch"
        draft.lossy("batch.accumulation", why)


def _agrees(draft: TerrazzoDraft, whole: int, micro: int | None, count: int | None, ranks: int | None) -> None:
    if count and micro and ranks and micro * count * ranks != whole:
        why = f"global_batch {whole} is not micro_batch {micro} × accumulation {count} × {ranks} ranks"
        draft.lossy("batch.accumulation", why)
    else:
        size_follows(draft, "batch.accumulation", "" if ranks else ACCUMULATION_FOLLOWS, "batch.global_batch")


def _optimizer(draft: TerrazzoDraft) -> None:
    name = draft.value("optimizer.name")
    if name is not None and name not in OPTIMIZERS:
        what = f"{name} does not work on flat shards, or is not there: use one of {', '.join(OPTIMIZERS)}"
        draft.refuse("optimizer.name", what)
    else:
        draft.carry("optimizer.name")
    draft.carry("optimizer.lr", "optimizer.weight_decay", "optimizer.decay")
    _options(draft, name or "AdamW")


def _options(draft: TerrazzoDraft, name: str) -> None:
    if name not in OPTIMIZERS:
        paths = [path for path in _ARGUMENTS if draft.value(path)]
        draft.refuse(paths, f"it goes with optimizer.name {name}, which there is not")
        return
    known = arguments(name)
    for path in ("optimizer.betas", "optimizer.eps"):
        field = path.rpartition(".")[2]
        if draft.value(path) is None:
            continue
        if field in known:
            draft.copy(path, f"optimizer.options.{field}")
        else:
            draft.lossy(path, f"{name} has no {field}")
    options = draft.value("optimizer.options", {})
    if not options:
        return
    for field in options:
        if field in known:
            where = f"optimizer.{field}" if field.startswith("muon.") else f"optimizer.options.{field}"
            draft.write(where, list(options[field]) if isinstance(options[field], tuple) else options[field])
    if unknown := [field for field in options if field not in known]:
        draft.lossy("optimizer.options", f"{name} has no {', '.join(unknown)}", "optimizer.options")
    else:
        draft.implied("optimizer.options", key="optimizer.options")


def _schedule(draft: TerrazzoDraft) -> None:
    name = draft.value("schedule.name")
    if name is not None and name not in _SCHEDULES:
        draft.refuse("schedule.name", f"there is no schedule {name}: choose one of {', '.join(_SCHEDULES)}")
    else:
        draft.carry("schedule.name")
    draft.carry("schedule.total_steps")
    _warmup(draft)
    _decay(draft)
    if name == "constant":
        draft.implied("schedule.final_fraction")
    else:
        draft.carry("schedule.final_fraction")
    if options := draft.value("schedule.options"):
        draft.lossy("schedule.options", f"Terrazzo's schedules warm up along a line and know no {as_text(options)}")
    write_lags(draft, 0, 0)


def _warmup(draft: TerrazzoDraft) -> None:
    warmup, total = draft.value("schedule.warmup_steps", 0), draft.value("schedule.total_steps")
    if total and warmup > total:
        why = f"a warm-up of {warmup} steps is longer than the run's {total}: it ends with the run"
        draft.put("schedule.warmup_steps", "schedule.warmup_steps", total, why, "lossy")
    else:
        draft.carry("schedule.warmup_steps")
    share = draft.value("schedule.warmup_fraction")
    if share and total:
        draft.write("schedule.warmup_steps", warmup_steps(share, total))
        draft.holds("schedule.warmup_fraction", "in steps", "schedule.warmup_steps")
    elif share:
        draft.lossy("schedule.warmup_fraction", "the length of the run is not known: set schedule.warmup_steps")
    start, path = draft.value("schedule.warmup_start"), "schedule.warmup_start"
    if start and not has_no_effect(draft.description, path):
        draft.lossy(path, f"a warm-up starts at zero, not at {start:g} of the peak")


def _decay(draft: TerrazzoDraft) -> None:
    """The decay as far as the run has room for it beside the warm-up that has been written."""
    path, total = "schedule.decay_steps", draft.value("schedule.total_steps")
    draft.does("schedule.decay_shape", "linear")
    decay, warmup = draft.value(path, 0), draft.document.get("schedule", {}).get("warmup_steps", 0)
    if not total or decay + warmup <= total:
        draft.carry(path)
        return
    why = f"a decay of {decay} steps is longer than the {total - warmup} that warm-up leaves of the run"
    if total == warmup:
        draft.lossy(path, f"{why}: there is none")
    else:
        draft.put(path, path, total - warmup, f"{why}: it takes all of them", "lossy")


# -- the loop ------------------------------------------------------------------------------------------------------


def _training(draft: TerrazzoDraft) -> None:
    draft.carry("training.clip", "training.compile", "training.seed")
    if draft.value("training.loss_mean", "tokens") == "tokens":
        draft.implied("training.loss_mean")
    else:
        why = "a step's tokens count alike here; that is the same where each micro-batch learns from as many"
        draft.lossy("training.loss_mean", why)
    if draft.value("training.nonfinite") == "go_on":
        draft.lossy("training.nonfinite", "such a step ends the run, or guard.action: skip leaves it out")
    else:
        draft.carry("training.nonfinite")
    device = draft.value("training.device")
    if device is None:
        draft.implied("training.device")
    else:
        draft.put("training.device", "launch.device", device)


def _activation_checkpointing(draft: TerrazzoDraft) -> None:
    mode, every = draft.value("activation_checkpointing.mode"), draft.value("activation_checkpointing.every")
    paths = ["activation_checkpointing.mode", "activation_checkpointing.every"]
    key = "train.activation_checkpointing"
    if mode in CHECKPOINT_MODES:
        draft.put(paths, key, mode)
    elif mode == "every" and every:
        draft.put(paths, key, f"every_{every}")
    elif mode not in (None, *CHECKPOINT_MODES):
        draft.lossy(paths, f"there is no mode {mode}; full is written", key)
        draft.write(key, "full")
    if draft.value("activation_checkpointing.ops") is not None:
        draft.carry("activation_checkpointing.ops")
    _activation_offload(draft, mode)


def _activation_offload(draft: TerrazzoDraft, mode: str | None) -> None:
    path = "activation_checkpointing.offload"
    if not draft.value(path):
        draft.implied(path)
    elif mode in (None, "none"):
        draft.lossy(path, "it moves what activation checkpointing keeps, and there is none")
    else:
        draft.put(path, "offload.activations", "cpu")


def _saved_when(draft: TerrazzoDraft) -> None:
    """There is a checkpoint at the end in any case."""
    path, when = "saving.when", draft.value("saving.when")
    if when == "never" and draft.setting(path).keys:
        draft.lossy(path, "a checkpoint is written at the end of the run, and on SIGTERM")
    elif when == "steps" and draft.value("saving.every") is None:
        draft.lossy(path, "how often is not known: set checkpoint.every; without it one is written, at the end")
    else:
        draft.holds(path, "one checkpoint is written all the same, at the end" if when == "never" else "")


def _saving(draft: TerrazzoDraft) -> None:
    export, state = draft.value("saving.export", "none"), draft.value("saving.state", "sharded")
    if draft.setting("saving.export").key or export != "none":
        draft.write("checkpoint.save_format", "hf" if export != "none" else "terrazzo")
        write_folder(draft, "checkpoint.save_format")
    draft.holds("loading.low_memory", "each rank reads its own part of the weights")
    draft.holds("loading.broadcast", "all ranks start from the same values")
    more = "" if state == "sharded" else "checkpoints are sharded, and resume on any number of ranks"
    draft.holds("saving.state", more)
    _saved_when(draft)
    draft.carry("saving.every", "saving.keep_last", "saving.folder", "saving.background")
