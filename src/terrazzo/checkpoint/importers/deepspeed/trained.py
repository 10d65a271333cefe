"""What DeepSpeed says of an optimizer beside its tensors: its name, its param groups, and the fp16 loss scaler."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.checkpoint.importers.deepspeed.files import need
from terrazzo.checkpoint.importers.parts.tree import keep
from terrazzo.checkpoint.importers.parts.unpickle import StandIn
from terrazzo.checkpoint.importers.parts.values import Values
from terrazzo.errors import BadInput, Damaged

__all__ = ["EXPERTS", "Trained", "add_groups", "optimizer_name", "scaler_counters"]

EXPERTS = (
    "'{}' holds experts that are spread over ranks, and they are not imported: load it with DeepSpeed and save the"
    " state dict of the whole model with torch.save."
)
_NOT_SETTINGS = {"params", "param_names", "step"}


@dataclass
class Trained:
    """What an optimizer trained.

    Attributes:
        states: of each parameter the weight, then what the optimizer keeps for it.
        groups: for each param group its hyper-parameters, and under `params` the names.
        notes: what was left out, a line each.
    """

    states: dict[str, dict[str, Values]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_groups(trained: Trained, optimizer: Mapping[str, Any], parts: Sequence[Collection[str]], where: str) -> None:
    """The param groups of an optimizer's state dict, whose numbers are indices of `parts`: names of parameters.

    Raises:
        BadInput: they are damaged, or of experts; `where` names the file.
    """
    groups = need(optimizer, "param_groups", list, where)
    numbers: list[Any] = []
    for index in range(len(groups)):
        group = need(groups, index, dict, where)
        if group.get("moe"):
            raise BadInput(EXPERTS.format(where))
        settings: dict[str, Any] = {}
        for key, value in group.items():
            if key not in _NOT_SETTINGS:
                keep(settings, str(key), value, trained.notes, f"param group {index}")
        members = need(group, "params", list, where)
        settings["params"] = [name for number in members for name in need(parts, number, Collection, where)]  # type: ignore[type-abstract]
        trained.groups.append(settings)
        numbers += members
    if numbers != list(range(len(parts))):
        raise Damaged(f"'{where}' is not what DeepSpeed writes: its param groups are not of {len(parts)} flat tensors.")
    stateless = [name for name, states in trained.states.items() if len(states) == 1]
    if stateless and len(stateless) < len(trained.states):
        trained.notes.append(
            f"the optimizer has no state for {len(stateless)} of its parameters, such as {stateless[0]}"
        )


def optimizer_name(config: Any) -> str:
    """The optimizer's class as torch calls it, from the config of the run; empty where that does not say."""
    optimizer = config.get("optimizer") if isinstance(config, Mapping) else None
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not isinstance(name, str):
        return ""
    settings = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    decoupled = not isinstance(settings, Mapping) or settings.get("adam_w_mode", True)
    if name.lower() in ("adam", "adamw"):  # DeepSpeed's Adam is AdamW unless it is told otherwise
        return "AdamW" if decoupled or name.lower() == "adamw" else "Adam"
    return name


def scaler_counters(saved: Mapping[str, Any], skipped_steps: Any) -> dict[str, float]:
    """The loss scaler's counters, as `ShardedOptimizer.scaler_state` names them; empty where the scale is fixed.

    Stages 1 to 3 save the scaler itself, stage 0 its numbers.
    """
    scaler = saved.get("loss_scaler")
    if isinstance(scaler, StandIn):
        numbers = {
            key: _number(scaler.attribute(key))
            for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        }
    else:
        counters = {key: saved.get(key) for key in ("cur_scale", "cur_iter", "last_overflow_iter")}
        numbers = {key: float(value) for key, value in counters.items() if type(value) in (int, float)}  # type: ignore[arg-type]
    scale, iteration, overflow = (numbers.get(key) for key in ("cur_scale", "cur_iter", "last_overflow_iter"))
    if scale is None or iteration is None or overflow is None:
        return {}
    return {
        "scale": scale,
        "skipped_steps": float(skipped_steps) if type(skipped_steps) is int else 0.0,
        # DeepSpeed looks before it counts, so it doubles a step later than a scaler that counts first.
        "good_steps": max(0.0, iteration - overflow - 2),
        "patience": numbers.get("cur_hysteresis") or 1.0,
    }


def _number(value: Any) -> float | None:
    """`value` if it is a finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1 << 62 else None
