"""DeepSpeed's learning-rate schedules: the same rates, step by step.

Each sets the rates of an optimizer's param groups when it is built, and again at every `step()`. The count starts at
-1: the optimizer's first step runs with what building it set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from terrazzo.errors import BadInput

__all__ = ["SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

Rates = float | Sequence[float]
"""One for all param groups, or one for each."""


class _Schedule:
    """The part that all share. Its fields are the arguments of the JSON."""

    optimizer: Optimizer
    last_batch_iteration: int

    def __post_init__(self) -> None:
        self.own = [group["lr"] for group in self.optimizer.param_groups]
        for name in ("warmup_num_steps", "lr_range_test_step_size", "cycle_first_step_size"):
            value = getattr(self, name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise BadInput(f"{name} is {value!r}; it must be a whole number of 1 or more.")
        if getattr(self, "warmup_type", "log") not in ("log", "linear"):
            raise BadInput("warmup_type must be 'log' or 'linear'.")
        if self.last_batch_iteration == -1:
            self._set(self.first())

    def get_lr(self) -> list[float]:
        """The rate of each param group at the present count."""
        raise NotImplementedError

    def first(self) -> list[float]:
        """The rates that building the schedule sets."""
        return self.get_lr()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count on, or to a given number, and set the rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _each(self, value: Rates) -> list[float]:
        rates = list(value) if isinstance(value, Sequence) else [value] * len(self.own)
        if len(rates) != len(self.own):
            raise BadInput(f"The schedule has {len(rates)} values for {len(self.own)} param groups: give one for each.")
        return rates

    def _between(self, low: Rates, high: Rates, share: float) -> list[float]:
        return [a + (b - a) * share for a, b in zip(self._each(low), self._each(high), strict=True)]


@dataclass(eq=False)
class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (default: the first group's rate, for all), then constant."""

    optimizer: Optimizer
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def get_lr(self) -> list[float]:
        share = _climb(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        high = self.own[0] if self.warmup_max_lr is None else self.warmup_max_lr
        return self._between(self.warmup_min_lr, high, 1.0 if share is None else share)


@dataclass(eq=False)
class WarmupDecayLR(_Schedule):
    """The same, then down along a line: `warmup_min_lr` again at `total_num_steps`."""

    optimizer: Optimizer
    total_num_steps: int
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def get_lr(self) -> list[float]:
        share = _climb(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        if share is None:
            left = self.total_num_steps - self.last_batch_iteration
            share = max(0.0, left / max(1.0, self.total_num_steps - _least(self.warmup_num_steps)))
        return self._between(self.warmup_min_lr, self.warmup_max_lr, share)


@dataclass(eq=False)
class WarmupCosineLR(_Schedule):
    """Shares of each group's own rate: from `warmup_min_ratio` to 1, then along a cosine to `cos_min_ratio`."""

    optimizer: Optimizer
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def first(self) -> list[float]:
        return [0.0] * len(self.own)

    def get_lr(self) -> list[float]:
        return [rate * self.get_lr_ratio() for rate in self.own]

    def get_lr_ratio(self) -> float:
        """The share at the present count."""
        share = _climb(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        if share is not None:
            return self.warmup_min_ratio + share * (1 - self.warmup_min_ratio)
        start = _least(self.warmup_num_steps)
        gone = min(1.0, (self.last_batch_iteration - start + 1) / max(1, self.total_num_steps - start))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * gone)) / 2)


@dataclass(eq=False)
class LRRangeTest(_Schedule):
    """Rates that only grow, by `lr_range_test_step_rate` of the first one in every `lr_range_test_step_size` steps."""

    optimizer: Optimizer
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return [rate * (1 + self.lr_range_test_step_rate * intervals) for rate in self._each(self.lr_range_test_min_lr)]


@dataclass(eq=False)
class OneCycle(_Schedule):
    """Up, down, and then decaying, with Adam's first beta on the opposite course (Smith, arXiv 1803.09820)."""

    optimizer: Optimizer
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        first, second, stairs = self.cycle_first_step_size, self.cycle_second_step_size, self.cycle_first_stair_count
        self.halves = first, first if second is None else second
        self.stairs = stairs, stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        self.cycle_momentum = self.cycle_momentum and "betas" in self.optimizer.defaults
        super().__post_init__()

    def first(self) -> list[float]:
        return self._each(self.cycle_min_lr)

    def get_lr(self) -> list[float]:
        past = self._past()
        if past is not None:
            return [low / (1 + self.decay_lr_rate * past) for low in self._each(self.cycle_min_lr)]
        return self._between(self.cycle_min_lr, self.cycle_max_lr, self._scale())

    def get_mom(self) -> list[float]:
        """The first beta of each group."""
        past, lows, highs = self._past(), self._each(self.cycle_min_mom), self._each(self.cycle_max_mom)
        if self.last_batch_iteration == -1:
            return lows
        if past is not None:
            return [high * (1 + self.decay_mom_rate * past) for high in highs]
        scale = self._scale()
        return [high - (high - low) * scale for low, high in zip(lows, highs, strict=True)]

    def _past(self) -> float | None:
        """Intervals of decay since the end of the cycle; None within it."""
        past = self.last_batch_iteration - sum(self.halves) + 1
        return None if past < 1 else past / self.decay_step_size if self.decay_step_size else 0.0

    def _scale(self) -> float:
        """The share of the way up, in stairs if there are any."""
        total, count = float(sum(self.halves)), self.last_batch_iteration + 1
        x, turn = 1.0 + count / total - math.floor(1 + count / total), self.halves[0] / total
        stairs = self.stairs[0] if x <= turn else self.stairs[1]
        if not stairs:
            return x / turn if x <= turn else (x - 1) / (turn - 1)
        at = count % total
        climbed = at / self.halves[0] if at <= self.halves[0] else (total - at) / self.halves[1]
        return math.floor(climbed * stairs) / stairs

    def _set(self, rates: Sequence[float]) -> None:
        super()._set(rates)
        if self.cycle_momentum:
            for group, first in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
                group["betas"] = (first, 0.99)


SCHEDULES = {each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}


def _least(steps: int) -> int:
    """The steps of a warm-up: two at least, as DeepSpeed has it."""
    return max(2, steps)


def _climb(count: int, steps: int, kind: str) -> float | None:
    """The share of the way up at a count; None after warm-up."""
    steps = _least(steps)
    if count < 0 or count >= steps:
        return 0.0 if count < 0 else None
    return math.log(count + 1) * (1.0 / math.log(steps)) if kind == "log" else count / steps
