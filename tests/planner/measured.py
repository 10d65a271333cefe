"""Measures what a training step really holds: every allocation and free of torch's CPU allocator, from its profiler."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import terrazzo as tz
from terrazzo.config import config_from_dict
from terrazzo.engine import LossScaling, Precision, named_mesh
from terrazzo.parallel import context_of
from terrazzo.train.data import Batch
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.model.parallel import parallelize_model
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.session.data_share import DataShare
from terrazzo.train.settings.optimizer import build_optimizer
from terrazzo.train.settings.plan import build_plan, build_precision, mesh_shape, micro_batches_per_rank

MARKER_BYTES = 77_777
"""An allocation of a size that nothing else has: the measured step begins with it."""


def peaks_of_steps(raws: Sequence[dict[str, Any]], world_size: int) -> list[int]:
    """`peak_bytes_of_step` of several runs."""
    return [peak_bytes_of_step(raw, world_size) for raw in raws]


def peak_bytes_of_step(raw: dict[str, Any], world_size: int, device: str = "cpu") -> int:
    """The most bytes that torch's CPU allocator had given out at once in the second step of a training run.

    On every rank of a group of `world_size`. The run is made of the trainer's own parts, with random tokens.
    """
    config = config_from_dict(raw)
    gc.collect()  # what an earlier run has left must not be freed while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        _train(config, world_size, torch.device(device), steps=2)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return _peak([change for _, change in changes])


def _train(config: Any, world_size: int, device: torch.device, steps: int) -> None:
    model: Any = prepare_model(config)
    vocab_size, shared = model.config.vocab_size, config.plan.mesh.cp > 1
    mesh = named_mesh(device.type, mesh_shape(config.plan.mesh, world_size))
    parallelize_model(model, config, mesh)
    parts = DataShare(0, 1, context_of(model))
    optimizer = build_optimizer(config.optimizer, model)
    model, optimizer = tz.shard(
        model,
        optimizer,
        plan=build_plan(config),
        units=config.plan.units,
        precision=_unscaled(build_precision(config)),
        mesh=mesh,
        prefetch=config.plan.prefetch,
    )
    count = micro_batches_per_rank(config.batch, world_size, config.plan.mesh)
    size = (config.batch.micro_batch, config.batch.sequence_length)
    objective = objective_of(config)
    for step in range(steps):
        if step == steps - 1:
            torch.empty(MARKER_BYTES, dtype=torch.uint8)
        for index in range(count):
            tokens = torch.randint(vocab_size, size)
            positions = torch.arange(size[1]).expand(size).clone() if shared or config.cuts_attention else None
            batch = parts.of(Batch(tokens, tokens, tokens.numel(), tokens.numel(), positions=positions))
            with nullcontext() if index == count - 1 else tz.accumulate(model):
                inputs = objective.inputs(model, batch, device)
                objective.loss_of(model, model(**inputs), batch).backward()  # no name holds the logits
        tz.clip_grad_norm_(model, config.train.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()


def _unscaled(precision: Precision) -> Precision:
    """With a loss scale of one, so that no step is skipped."""
    return replace(precision, loss_scaling=LossScaling(init=1.0)) if precision.loss_scaling else precision


def _peak(changes: Sequence[int]) -> int:
    """The highest running sum from the marker on."""
    live = peak = 0
    begun = False
    for change in changes:
        live += change
        begun = begun or change == MARKER_BYTES
        peak = max(peak, live) if begun else 0
    assert begun, "the marker is missing: the profiler has not seen the allocations"
    return peak
