"""The estimate that a planner has to beat: one model FLOPs utilisation per device, format and checkpointing mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from benchmarks.planner.rows import Row
from terrazzo.planner.setup.setup import Setup

__all__ = ["Key", "constants", "held_out", "key", "model_flops", "step_s"]

Key = tuple[str, str, str]


def key(setup: Setup) -> Key:
    """Device, format of its matrix products, checkpointing mode."""
    return setup.cluster.device.name, setup.matmul, setup.checkpointing


def model_flops(setup: Setup) -> float:
    """FLOPs of one optimizer step: 6N + 12Lhs per token (arXiv 2204.02311, appendix B), N without mere look-ups."""
    model = setup.model
    per_token = 6 * model.matmul_numel + 12 * model.layers * model.hidden * setup.sequence
    return float(per_token * setup.global_batch * setup.sequence)


def constants(rows: Iterable[Row]) -> dict[Key, float]:
    """Median utilisation of the rows of each key."""
    found: dict[Key, list[float]] = defaultdict(list)
    for row in rows:
        if row.step_s:
            found[key(row.setup)].append(model_flops(row.setup) / (row.step_s * _peak(row.setup)))
    return {name: median(values) for name, values in found.items()}


def held_out(rows: Iterable[Row], family: str) -> dict[Key, float]:
    """Constants from the rows of all other families."""
    return constants(row for row in rows if row.family != family)


def step_s(setup: Setup, utilisation: Mapping[Key, float]) -> float | None:
    """Seconds of a step at that utilisation; of the nearest key where its own is absent, None without any."""
    device, matmul, mode = key(setup)
    near = [
        [value for name, value in utilisation.items() if name[:2] == (device, matmul)],
        [value for name, value in utilisation.items() if name[2] == mode],
        list(utilisation.values()),
    ]
    found = utilisation.get((device, matmul, mode)) or next((median(values) for values in near if values), None)
    return model_flops(setup) / (found * _peak(setup)) if found else None


def _peak(setup: Setup) -> float:
    return setup.cluster.count * setup.cluster.device.peak_flops[setup.matmul]
