"""The reference model of DPO: the model itself before its first step, whose log-probabilities are computed in advance.

So no second model is in memory, and no rank gathers one. What is computed goes into checkpoints, as a resumed run has
other weights.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from terrazzo.config import Config, setting_texts
from terrazzo.errors import BadInput
from terrazzo.train.data import Cursor, GlobalOrder, Indices, PairDataset, TokenData, evaluated, micro_batches_of
from terrazzo.train.model.objectives import completion_log_probs, inputs_of
from terrazzo.train.session.data_share import DataShare

__all__ = [
    "DueReference",
    "check_same_initial",
    "compute_reference",
    "initial_model",
    "reference_due",
    "reference_state",
]


class DueReference(NamedTuple):
    """Pairs of a dataset whose reference is not known yet."""

    dataset: PairDataset
    pairs: Indices


def reference_due(
    config: Config, data: TokenData, evaluation_limit: int, saved: Mapping[str, Any]
) -> list[DueReference]:
    """Give the datasets what is `saved` of them, and return what the run needs beyond it.

    Args:
        saved: the extra values of the checkpoint that the run continues from, with what `reference_state` gave; empty
            for a new run.
    """
    if not config.objective.kind.against_initial:
        return []
    due = []
    for name, dataset in _datasets(data).items():
        table = _decoded(saved.get("reference", {}).get(name, {}), dataset)
        wanted = _read(config, dataset, saved) if name == "train" else evaluated(dataset, evaluation_limit)
        dataset.reference = table
        if len(pairs := wanted[table[torch.from_numpy(wanted)].isnan().any(dim=1).numpy()]):
            due.append(DueReference(dataset, pairs))
    return due


def initial_model(config: Config, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the weights before the first step follow from: as `saved` has them of the first run, if any.

    Args:
        saved: the extra values of the checkpoint that the run continues from; empty for a new run.
    """
    if saved.get("initial"):
        return dict(saved["initial"])
    values = setting_texts(Config()) | setting_texts(saved["config"] if saved else config)
    settings = {key: json.loads(values[key]) for key in ("model.path", "model.weights", "train.seed")}
    if settings["model.weights"] == "pretrained":
        del settings["train.seed"]
    return settings


def check_same_initial(due: list[DueReference], config: Config, saved: Mapping[str, Any]) -> None:
    """Raise `BadInput` where the reference that is `due` would be of another model than the one that is `saved`."""
    if not due or not saved:
        return
    now = setting_texts(config)
    for key, before in initial_model(config, saved).items():
        here = json.loads(now[key])
        same = here == before or (key == "model.path" and here and before and _same_folder(here, before))
        if not same:
            raise BadInput(
                f"{key} is {_shown(here)} and was {_shown(before)} when the run in the checkpoint began:"
                f" {sum(len(part.pairs) for part in due):,} preference pairs that it has not read yet would be compared"
                f" with another model than those before. Set {key} to {_shown(before)}, or start anew with"
                " checkpoint.resume=never."
            )


def _shown(value: Any) -> str:
    return "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def _same_folder(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


@torch.no_grad()
def compute_reference(
    due: list[DueReference], model: nn.Module, config: Config, parts: DataShare, device: torch.device
) -> None:
    """Fill the datasets' tables from the model as it is, each rank for its share of the pairs. Collective.

    Raises:
        BadInput: on all ranks, where the model makes NaN of a pair.
    """
    model.eval()
    for dataset, pairs in due:
        table = torch.zeros(len(dataset), 2, device=device)
        for indices in micro_batches_of(pairs, config.batch.micro_batch, parts.reader, parts.readers):
            batch = dataset.batch(indices)
            log_probs = completion_log_probs(model, model(**inputs_of(model, batch, device)), batch)[: batch.samples]
            table[torch.from_numpy(indices[: batch.samples]).to(device)] = log_probs
        parts.total(table)
        known = torch.from_numpy(pairs)
        assert dataset.reference is not None
        dataset.reference[known] = table.cpu()[known]
        if bad := int(dataset.reference[known].isnan().any(dim=1).sum()):
            raise BadInput(
                f"Before its first step the model makes NaN of {bad:,} of {len(pairs):,} preference pairs, with which"
                " objective 'dpo' compares: look for NaN in the weights (model.path), or set precision.name=fp32."
            )
    model.train()


def reference_state(data: TokenData) -> dict[str, Any]:
    """Everything that is known, as plain values."""
    return {
        name: {"dataset": dataset.fingerprint, "log_probs": _encoded(dataset.reference)}
        for name, dataset in _datasets(data).items()
        if dataset.reference is not None
    }


def _read(config: Config, dataset: PairDataset, saved: Mapping[str, Any]) -> Indices:
    """The pairs that the steps to come read: any of them, where a rollback may go around others."""
    count = (config.train.steps - saved.get("step", 0)) * config.batch.global_batch
    if count <= 0 or count >= len(dataset) or config.guard.action == "rollback":
        return np.arange(len(dataset) if count > 0 else 0)
    cursor = saved.get("data", {"epoch": 0, "samples": 0})
    epochs, samples = divmod(int(cursor["samples"]), len(dataset))
    order = GlobalOrder(len(dataset), config.train.seed)
    wanted, _ = order.take(Cursor(int(cursor["epoch"]) + epochs, samples), count)
    return np.unique(wanted)


def _datasets(data: TokenData) -> dict[str, PairDataset]:
    both = {"train": data.train, "validation": data.validation}
    return {name: dataset for name, dataset in both.items() if isinstance(dataset, PairDataset)}


def _encoded(table: Tensor) -> str:
    return base64.b64encode(table.numpy().astype("<f4").tobytes()).decode("ascii")


def _decoded(saved: Mapping[str, Any], dataset: PairDataset) -> Tensor:
    """The table; NaN where nothing is known, and everywhere where `saved` is of other data."""
    if saved.get("dataset") != dataset.fingerprint:
        return torch.full((len(dataset), 2), torch.nan)
    values = np.frombuffer(base64.b64decode(saved["log_probs"]), dtype="<f4").astype(np.float32)
    return torch.from_numpy(values.reshape(len(dataset), 2))
