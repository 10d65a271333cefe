"""torchtitan's `Trainer.Config`, as the mapping that its `save_config_file` writes, and the TOML of earlier versions.

A config is built by a Python function; this is its data, section by section. The class of `activation_checkpoint` is
said as `type`, or as the section's only value; where neither is there, as in a saved file, its fields tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from terrazzo.dialects.description import Description, Setting
from terrazzo.dialects.dialect import NO_CONTEXT, Context, Dialect, Document, Finding, Reading, Writing
from terrazzo.dialects.fsdp.words import offload, row_settings
from terrazzo.dialects.reader import Reader, derived, given_only, keep_nulls, matches, refuse_rest
from terrazzo.dialects.torchtitan.keys import BELOW, DEGREES, KEPT, KEYS, OPAQUE, REMOVED
from terrazzo.dialects.torchtitan.write import write

__all__ = ["Torchtitan"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_EXPORT = {**_DTYPES, "float16": "fp16"}
_SECTIONS = {key.partition(".")[0] for key in (*KEYS, *BELOW, *REMOVED)}
_AC = {"fullac": "full", "selectiveac": "selective", "memorybudgetac": "selective"}
HF_STORAGE = (2, 9)
"""The version of torch from which on shards of a tensor are put together in a Hugging Face folder."""
_ONLY_BUDGET = ("memory_budget", "visualize_memory_budget_pareto")


class Torchtitan(Dialect):
    """The configuration of `torchtitan.trainer.Trainer`."""

    name = "torchtitan"
    title = "torchtitan Trainer.Config"
    suffix = ".yaml"
    known_keys = (*KEYS, *BELOW)

    def recognises(self, document: Document) -> bool:
        """By its sections, and at least one key that no other dialect has."""
        if not document or not set(document) <= _SECTIONS:
            return False
        inner = {
            f"{section}.{name}" for section, names in document.items() if isinstance(names, Mapping) for name in names
        }
        own = {key for key in KEYS if key.partition(".")[0] in ("parallelism", "training", "lr_scheduler", "compile")}
        return bool(inner & own)

    def meaning(self, key: str) -> str:
        return str(KEYS[key][1]) if key in KEYS else ""

    def read(self, document: Document, context: Context = NO_CONTEXT) -> Reading:
        reader = Reader(document, "torchtitan", OPAQUE)
        keep_nulls(reader, self.known_keys)
        given = {
            **_parallelism(reader),
            **_precision(reader),
            **_batch(reader),
            **_optimizer(reader),
            **_schedule(reader),
            **_training(reader),
            **_saving(reader),
        }
        _keep(reader)
        _explain_removed(reader)
        refuse_rest(reader, self.known_keys)
        return reader.finish(self.name, given, self.known_keys, unknown="raises a TypeError")

    def write(self, description: Description, context: Context = NO_CONTEXT) -> Writing:
        return write(description, context, self.name)

    def findings(self, document: Document, reading: Reading, context: Context) -> Iterable[Finding]:
        flat = Reader(document, "torchtitan", OPAQUE).flat
        yield from _findings(flat)
        torch_version = context.version("torch", torch.__version__)
        if flat.get("checkpoint.last_save_in_hf") and torch_version < HF_STORAGE:
            text = "torch writes a Hugging Face folder from shards since 2.8, and joins the parts of a tensor since 2.9"
            yield Finding("checkpoint.last_save_in_hf", "error" if torch_version < (2, 8) else "warning", text)


def _default(key: str) -> Any:
    return KEYS[key][0]


# -- plan ----------------------------------------------------------------------------------------------------------


def _parallelism(reader: Reader) -> dict[str, Setting[Any]]:
    replicas, shards = reader.integer("parallelism.data_parallel_replicate_degree", 1, low=1), _shards(reader)
    found = {
        **{path: reader.integer(key, 1, low=1) for path, key in DEGREES.items()},
        "units.policy": Setting("auto", "default"),
        "prefetch.forward": Setting(0, "default"),
        "prefetch.backward": Setting(1, "default"),
        "loading.low_memory": Setting(True, "default"),
    }
    found |= _row(reader, found, replicas, shards)
    return {**found, **offload(reader.boolean("training.enable_cpu_offload", False))}


def _shards(reader: Reader) -> Setting[Any]:
    key = "parallelism.data_parallel_shard_degree"
    if reader.get(key) == -1:
        reader.say(key, "applied")
        return Setting(None, "file", key)
    return reader.integer(key, None, low=1)


def _row(
    reader: Reader, mesh: Mapping[str, Setting[Any]], replicas: Setting[Any], shards: Setting[Any]
) -> dict[str, Setting[Any]]:
    key = "parallelism.fsdp_reshard_after_forward"
    policy = reader.choice(key, {"default": None, "always": True, "never": False}, None, fold=False)
    if reader.get(key) == "default":
        reader.keep(key, "freed after forward, unless the model is pipelined", harmless=True)
    always = mesh["mesh.pp"].value == 1 if policy.value is None else policy.value
    if shards.value == 1 and mesh["mesh.cp"].value == 1:
        if policy.origin == "file":
            reader.keep(key, "over a single rank nothing is split", harmless=True)
        whole = {"mesh.dp_replicate": Setting(1, "default"), "mesh.dp_shard": derived(replicas.value, replicas, shards)}
        return {**row_settings("zero0", shards, replicas), **whole}
    flat, hybrid = ("zero3", "hybrid_shard") if always else ("shard_grad_op", "hybrid_shard_zero2")
    row = row_settings(flat, policy) if replicas.value == 1 else row_settings(hybrid, policy, replicas)
    return {**row, "mesh.dp_replicate": replicas, "mesh.dp_shard": shards}


# -- precision, batch ----------------------------------------------------------------------------------------------


def _precision(reader: Reader) -> dict[str, Setting[Any]]:
    kept = reader.choice("training.dtype", _DTYPES, "fp32", fold=False)
    compute = reader.choice("training.mixed_precision_param", _DTYPES, "bf16", fold=False)
    way = reader.text("optimizer.implementation", _default("optimizer.implementation"))
    narrow = way.value == "fused_opt_states_bf16"
    if way.origin == "file":
        reader.keep(way.key, "how the step is computed", harmless=True)
    same = derived(kept.value, kept, origin=kept.origin)
    given = {f"precision.{state}": same for state in ("weight", "master", "accumulate")}
    return {
        **given,
        "precision.compute": compute,
        "precision.reduce": reader.choice("training.mixed_precision_reduce", {"float32": "fp32"}, "fp32", fold=False),
        "precision.moments": derived("bf16" if narrow else kept.value, kept, way, origin=way.origin),
        "precision.saved": reader.choice("checkpoint.export_dtype", _EXPORT, "fp32", fold=False),
        "precision.autocast": Setting(False, "default"),
    }


def _batch(reader: Reader) -> dict[str, Setting[Any]]:
    key = "training.global_batch_size"
    found = {
        "batch.micro_batch": reader.integer("training.local_batch_size", _default("training.local_batch_size"), low=1),
        "batch.sequence_length": reader.integer("training.seq_len", _default("training.seq_len"), low=1),
    }
    if reader.get(key, -1) == -1:
        reader.say(key, "applied", "one micro-batch per rank and step")
        origin: Any = "file" if key in reader.flat else "default"
        return {**found, "batch.accumulation": Setting(1, origin, key if key in reader.flat else "")}
    return {**found, "batch.global_batch": reader.integer(key, None, low=1)}


# -- optimizer, schedule, loop -------------------------------------------------------------------------------------


def _optimizer(reader: Reader) -> dict[str, Setting[Any]]:
    key = "optimizer.param_groups"
    groups = reader.get(key)
    if not groups:
        return {}
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        reader.refuse(key, "expected a list of {pattern, optimizer_name, optimizer_kwargs}")
        return {}
    others = "" if len(groups) == 1 else f"the last of {len(groups)} groups is read; the others are for some parameters"
    reader.keep(key, others, harmless=not others)
    name, options = groups[-1].get("optimizer_name"), groups[-1].get("optimizer_kwargs")
    options = dict(options) if isinstance(options, Mapping) else {}
    found: dict[str, Any] = {"name": name if isinstance(name, str) else None}
    found |= {each: options.pop(each) for each in ("lr", "eps", "weight_decay") if _is_number(options.get(each))}
    betas = options.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(_is_number(beta) for beta in betas):
        found["betas"] = tuple(options.pop("betas"))
    return {f"optimizer.{each}": Setting(value, "file", key) for each, value in {**found, "options": options}.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _schedule(reader: Reader) -> dict[str, Setting[Any]]:
    total = reader.integer("training.steps", _default("training.steps"), low=1)
    types = {name: name for name in ("linear", "sqrt", "cosine")}
    kind = reader.choice("lr_scheduler.decay_type", types, "linear", fold=False)
    ratio = reader.number("lr_scheduler.decay_ratio", None, high=1, null=True)
    found = {
        "schedule.total_steps": total,
        "schedule.warmup_steps": reader.integer("lr_scheduler.warmup_steps", _default("lr_scheduler.warmup_steps")),
        "schedule.final_fraction": reader.number("lr_scheduler.min_lr_factor", 0.0, high=1),
        "schedule.name": derived(kind.value, kind, origin=kind.origin),
    }
    if ratio.value is None:
        return found
    reader.keep(ratio.key, "as a share of the run", harmless=True)
    if kind.origin == "file":
        reader.keep(kind.key, "the shape of the final decay", harmless=True)
    if ratio.value == 0:
        return {**found, "schedule.name": derived("constant", ratio, origin="file")}
    found["schedule.decay_steps"] = derived(round(total.value * ratio.value), ratio, total)
    found["schedule.name"] = derived("wsd", ratio, origin="file")
    if kind.value != "linear":
        found["schedule.options"] = derived({"decay_type": kind.value}, kind, origin="file")
    return found


def _training(reader: Reader) -> dict[str, Setting[Any]]:
    return {
        "training.clip": reader.number("training.max_norm", _default("training.max_norm")),
        "training.compile": reader.boolean("compile.enable", False),
        **given_only({"training.seed": reader.integer("debug.seed", None, null=True)}),
        **_checkpointing(reader),
    }


def _checkpointing(reader: Reader) -> dict[str, Setting[Any]]:
    section, path = "activation_checkpoint", "activation_checkpointing.mode"
    below = [key.partition(".")[2] for key in reader.flat if key.startswith(f"{section}.")]
    if section in reader.flat and reader.get(section) is None:
        return {path: Setting("none", "file", section)}
    key = f"{section}.type" if "type" in below else section
    if key in reader.flat:
        mode = reader.choice(key, _AC, "selective")
        if str(reader.get(key)).lower() == "memorybudgetac":
            reader.keep(key, "the compiler keeps what fits a share of the memory: nearest is selective")
        return {path: mode}
    if not below:
        return {path: Setting("selective", "default")}
    budget = any(name in below for name in _ONLY_BUDGET)
    mode_name = "selective" if budget or "force_recompute_mm_shapes_by_fqns" in below else "full"
    return {path: Setting(mode_name, "derived", ", ".join(f"{section}.{name}" for name in below))}


def _saving(reader: Reader) -> dict[str, Setting[Any]]:
    enabled = reader.boolean("checkpoint.enable", False)
    found = {
        "saving.state": Setting("sharded", "default"),
        "saving.export": reader.choice("checkpoint.last_save_in_hf", {True: "hf", False: "none"}, "none"),
        **given_only({"saving.folder": reader.text("checkpoint.folder", _default("checkpoint.folder"))}),
        "saving.background": reader.choice(
            "checkpoint.async_mode", {"disabled": False, "async": True, "async_with_pinned_mem": True}, False
        ),
    }
    if reader.get("checkpoint.async_mode") == "async_with_pinned_mem":
        reader.keep("checkpoint.async_mode", "the copy is in pinned memory", harmless=True)
    keep = reader.integer("checkpoint.keep_latest_k", _default("checkpoint.keep_latest_k"))
    found["saving.keep_last"] = Setting(keep.value or None, keep.origin, keep.key)
    every = reader.integer("checkpoint.interval", _default("checkpoint.interval"), low=1)
    if enabled.value:
        return {**found, "saving.every": derived(every.value, enabled, every, origin="file")}
    reader.keep("checkpoint.interval", "checkpoint.enable is off: nothing is written", harmless=True)
    return {**found, "saving.every": Setting(None, enabled.origin, enabled.key)}


# -- the rest ------------------------------------------------------------------------------------------------------


def _keep(reader: Reader) -> None:
    """Known keys with no neutral meaning."""
    for key in reader.unread():
        known = key in KEYS or any(matches(key, pattern) for pattern in BELOW)
        owner = next((start for start in KEPT if key.startswith(start)), None)
        if known and owner is not None:
            why, grave = KEPT[owner]
            default = key in KEYS and reader.get(key) == _default(key)
            reader.keep(key, why, **({"harmless": True} if default else grave))


def _explain_removed(reader: Reader) -> None:
    for key in reader.unread():
        for name, why in REMOVED.items():
            if key == name or key.startswith(f"{name}."):
                reader.refuse(key, f"torchtitan 0.3 has no such key: {why}")


def _findings(flat: Mapping[str, Any]) -> Iterable[Finding]:
    """Combinations that torchtitan refuses, or that do nothing."""

    def get(key: str) -> Any:
        return flat.get(key, _default(key))

    pipelined = get("parallelism.pipeline_parallel_degree") != 1
    if pipelined and not get("training.disable_cuda_graphs"):
        text = "CUDA graphs are on by default and do not support pipelines: say training.disable_cuda_graphs: true."
        yield Finding("parallelism.pipeline_parallel_degree", "error", text)
    budget = str(flat.get("activation_checkpoint.type", flat.get("activation_checkpoint"))).lower() == "memorybudgetac"
    if (budget or "activation_checkpoint.memory_budget" in flat) and not get("compile.enable"):
        text = "MemoryBudgetAC needs the compiled model: say compile.enable: true."
        yield Finding("activation_checkpoint", "error", text)
    if get("compile.enable_async_tensor_parallel") and not get("compile.enable"):
        text = "async tensor parallelism needs the compiled model: say compile.enable: true."
        yield Finding("compile.enable_async_tensor_parallel", "error", text)
    if get("checkpoint.keep_latest_k") == 1:
        text = "torchtitan refuses 1: the last checkpoint may be half written; keep 2, or 0 for all."
        yield Finding("checkpoint.keep_latest_k", "error", text)
    if not get("checkpoint.enable") and any(
        key.startswith("checkpoint.") and key != "checkpoint.enable" for key in flat
    ):
        yield Finding("checkpoint.enable", "warning", "it is off: no checkpoint is written, whatever the section says.")
