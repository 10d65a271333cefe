"""What torchtitan refuses, or what does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.formats.torchtitan.keys import KEYS, OPAQUE
from terrazzo.dialects.formats.torchtitan.torchtitan_reader import is_earlier
from terrazzo.documents.dotted_keys import flatten

__all__ = ["findings"]

HF_STORAGE = (2, 9)
"""The version of torch from which on shards of a tensor are put together in a Hugging Face folder."""


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What torchtitan refuses of a document, or takes otherwise than it looks."""
    flat, pipelined = flatten(reading.document, OPAQUE), reading.description.value("mesh.pp") != 1
    yield from _together(reading.values, flat)
    yield from _schedule(reading.values)
    graphs = not reading.values.get("training.disable_cuda_graphs")
    if pipelined and graphs and not is_earlier(flat, context):
        text = "CUDA graphs are on by default and do not support pipelines: say training.disable_cuda_graphs: true."
        yield Finding.error("parallelism.pipeline_parallel_degree", text)
    if not reading.description["training.loss_mean"].is_set:
        text = (
            "a step's loss is a mean over all of its tokens since torchtitan 0.2.2, and one over micro-batches before:"
            " say of which release the file is, --library torchtitan=0.2.1"
        )
        yield Finding.warning("training", text)
    torch_version = context.version("torch", torch.__version__)
    if reading.description.value("saving.export") == "hf" and torch_version < HF_STORAGE:
        text = "torch writes a Hugging Face folder from shards since 2.8, and joins the parts of a tensor since 2.9"
        yield Finding("checkpoint.last_save_in_hf", "error" if torch_version < (2, 8) else "warning", text)


def _together(values: Mapping[str, Any], flat: Mapping[str, Any]) -> Iterable[Finding]:
    """Combinations that torchtitan refuses, or that do nothing; `flat` is as in the file."""

    def get(key: str) -> Any:
        return values.get(key, KEYS[key].default)

    budget = str(flat.get("activation_checkpoint.type", flat.get("activation_checkpoint"))).lower() == "memorybudgetac"
    if (budget or "activation_checkpoint.memory_budget" in flat) and not get("compile.enable"):
        text = "MemoryBudgetAC needs the compiled model: say compile.enable: true."
        yield Finding.error("activation_checkpoint", text)
    if get("compile.enable_async_tensor_parallel") and not get("compile.enable"):
        text = "async tensor parallelism needs the compiled model: say compile.enable: true."
        yield Finding.error("compile.enable_async_tensor_parallel", text)
    if get("checkpoint.keep_latest_k") == 1:
        text = "torchtitan refuses 1: the last checkpoint may be half written; keep 2, or 0 for all."
        yield Finding.error("checkpoint.keep_latest_k", text)
    whole, steps = not get("checkpoint.last_save_model_only"), get("training.steps")
    if get("checkpoint.last_save_in_hf") and whole:
        text = "torchtitan refuses it beside last_save_model_only: false: the folder has weights alone; keep one."
        yield Finding.error("checkpoint.last_save_in_hf", text)
    saves = get("checkpoint.enable") and not get("checkpoint.load_only")
    if saves and not whole and steps is not None and (get("checkpoint.interval") or 0) >= steps:
        text = (
            "the one checkpoint, at the end, has weights alone, and nothing goes on from it: say"
            " checkpoint.last_save_model_only: false."
        )
        yield Finding.warning("checkpoint.interval", text)
    if not get("checkpoint.enable") and any(
        key.startswith("checkpoint.") and key != "checkpoint.enable" for key in flat
    ):
        yield Finding.warning("checkpoint.enable", "it is off: no checkpoint is written, whatever the section says.")


def _schedule(values: Mapping[str, Any]) -> Iterable[Finding]:
    """Lengths that torchtitan cuts, with a warning of its own."""
    steps, warmup, ratio = (
        KEYS[key].neutral if values.get(key) is None else values[key]
        for key in ("training.steps", "lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio")
    )
    if warmup > steps:
        text = f"{warmup} steps of warm-up are more than the {steps} of the run: torchtitan cuts them to it."
        yield Finding.warning("lr_scheduler.warmup_steps", text)
    left, decay = max(0, steps - warmup), round(steps * (ratio or 0))
    if decay > left:
        text = f"a decay of {decay} steps is longer than the {left} that warm-up leaves: torchtitan cuts it to them."
        yield Finding.warning("lr_scheduler.decay_ratio", text)
