"""What a run refuses of its configuration alone, before its model, its ranks and its folders are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from terrazzo.config import Config
from terrazzo.engine import check_narrow
from terrazzo.errors import BadInput
from terrazzo.train.settings.optimizer import check_settings, optimizer_class
from terrazzo.train.settings.plan import build_offload, build_plan, build_precision, check_rounds

__all__ = ["refusals"]


def refusals(config: Config) -> Iterator[tuple[str, BadInput]]:
    """Each refusal, behind the section or key that it is of; what follows from one before it is left out."""
    refused: set[str] = set()
    for key, check in _CHECKS.items():
        try:
            check(config)
        except BadInput as error:
            if str(error) not in refused:
                refused.add(str(error))
                yield key, error


def _check_guard(config: Config) -> None:
    """Raise `BadInput` for `guard.memory_every` where it would see nothing."""
    optim = build_plan(config).optim
    if config.guard.memory_every is not None and set(optim.shares) != {"device"}:
        raise BadInput(
            f"guard.memory_every is {config.guard.memory_every}, and offload.optim '{optim.tier}': states away from the"
            " device are not looked at. Set guard.memory_every=null and, for drives, offload.digest=true."
        )


def _check_moments(config: Config) -> None:
    """Raise `BadInput` for moments in 8 bits that the optimizer does not have."""
    check_narrow([optimizer_class(config.optimizer)], build_precision(config))


_CHECKS: dict[str, Callable[[Config], object]] = {
    "plan.sync_every": lambda config: check_rounds(config, 0),
    "plan": build_plan,
    "precision": build_precision,
    "offload.step": build_offload,
    "guard.memory_every": _check_guard,
    "optimizer": lambda config: check_settings(config.optimizer),
    "precision.moments": _check_moments,
}
