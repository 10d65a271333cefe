"""The section `launch`: how a run's ranks start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticKnownError

from terrazzo.config.section import KeyDisagreement, Section, whole_number

__all__ = ["LaunchConfig", "is_rank_range"]

_RANK_RANGE = re.compile(r"[0-9]{1,9}:[0-9]{1,9}")


def is_rank_range(key: str, text: str) -> bool:
    """Whether `text` is a range of ranks such as `2:4`, and `key` is `ranks` or a dotted key that ends so.

    To YAML 1.1 it is a number in base 60, 124.
    """
    return key.rpartition(".")[2] == "ranks" and _RANK_RANGE.fullmatch(text) is not None


class LaunchConfig(Section):
    """How many processes this command starts when torchrun or Slurm has not started it."""

    ranks: int | str | None = Field(
        None,
        description="how many; least:most, such as 2:4: as many of these as start, with launch.restarts; null: one per "
        "GPU, or one on a CPU",
    )
    restarts: int = Field(
        0,
        ge=0,
        description="so often all ranks are started again after a failure, from the newest checkpoint; not under "
        "torchrun or Slurm, which do so by --max-restarts and --requeue",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees it")
    timeout_s: float = Field(
        600.0, gt=0, description="longest wait for another rank, and for a background save that stands still"
    )
    stall_s: float = Field(
        20.0,
        gt=0,
        description="seconds in which nothing happens, and five times a phase's longest, after which a run hangs",
    )
    threads: int | None = Field(
        None, gt=0, description="CPU threads per rank; null: OMP_NUM_THREADS, else cores divided by ranks"
    )
    ignore_planner: bool = Field(False, description="start a run that the planner refuses: memory, known-bad settings")

    @field_validator("ranks", mode="before")
    @classmethod
    def _as_number_or_range(cls, value: Any) -> Any:
        if value is None or isinstance(value, int | float):
            return value if value is None else whole_number(value)
        if isinstance(value, str) and value.isdigit():
            raise PydanticKnownError("int_type")
        return _checked_range(value)

    def numbers(self, of: int = 1) -> Sequence[int]:
        """Multiples of `of` that `ranks` allows, ascending; empty where `ranks` is null."""
        if not isinstance(self.ranks, str):
            return [] if self.ranks is None else [self.ranks]
        least, most = _ends_of_range(self.ranks)
        return range(-(-least // of) * of, most + 1, of)

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if isinstance(self.ranks, str) and not self.restarts:
            yield KeyDisagreement(
                "ranks",
                f"'{self.ranks}' lets ranks become fewer when they are started again, and restarts is 0: set"
                f" launch.restarts to how often that may be, or launch.ranks to {self.numbers()[-1]}",
            )
        if self.stall_s > self.timeout_s and self.changed_keys("stall_s"):
            yield KeyDisagreement(
                "stall_s",
                f"{self.stall_s:g} is longer than timeout_s {self.timeout_s:g}, after which ranks give up"
                " waiting for each other: no rank that stands still would be named before. Lower launch.stall_s, or"
                " raise launch.timeout_s above it",
            )


def _checked_range(value: Any) -> str:
    """The range `least:most` without leading zeros. Raises: `ValueError` for text that is no such range."""
    if not isinstance(value, str) or not is_rank_range("ranks", value):
        raise ValueError(f"{value!r} is neither a number of ranks nor a range of them, least:most, such as 2:4")
    least, most = _ends_of_range(value)
    if not 0 < least < most:
        meant = f"{max(1, min(least, most))}:{max(least, most)}" if least != most else str(max(1, most))
        raise ValueError(f"'{value}' is no range of ranks, which is least:most: write {meant}")
    return f"{least}:{most}"


def _ends_of_range(text: str) -> tuple[int, int]:
    """The least and the most of a range."""
    least, most = map(int, text.split(":"))
    return least, most
