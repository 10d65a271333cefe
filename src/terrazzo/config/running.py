"""The sections `checkpoint`, `launch` and `log`: how a run is saved, how its ranks start, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticKnownError

from terrazzo.config.files import RANGE
from terrazzo.config.section import Section, whole_number

__all__ = ["CheckpointConfig", "LaunchConfig", "LogConfig"]


class LocalConfig(Section):
    """Further checkpoints in memory, or on a drive, of each host, for a run that is started again there."""

    folder: str | None = Field(
        None,
        description="such as /dev/shm, or a folder on an NVMe drive; $NAME is as each host's environment has it; null: "
        "none are taken",
    )
    every: int = Field(10, gt=0, description="steps between them; there is one at a time")
    partner: Literal["auto", "required", "none"] = Field(
        "auto",
        description="copies of each host's part on another host, so that one may be lost: `auto`: where there are "
        "several, and go on, and say so, where one fails; `required`: refuse one host, and end; `none`: take none",
    )


class CheckpointConfig(Section):
    """When training state is saved, where, and what a new start does with what is there."""

    folder: str | None = Field(None, description="folder or fsspec URL; default: log.folder/checkpoints")
    every: int | str | None = Field(
        None,
        description="steps between checkpoints; auto: as the cost of one, measured, and mtbf_hours have it; null: at "
        "the end and on SIGTERM",
    )
    mtbf_hours: float = Field(
        50_000.0,
        gt=0,
        description="auto: hours between failures of one rank, in the mean; default: as in Llama 3's training, 419 in "
        "54 days of 16,384 GPUs",
    )
    overhead: float = Field(0.05, gt=0, lt=1, description="auto: largest share of the time that saves hold training up")
    local: LocalConfig = LocalConfig()
    keep_last: int | None = Field(2, gt=0, description="older checkpoints are removed; null: all are kept")
    keep_every: int | None = Field(None, gt=0, description="those of steps divisible by this are kept as well")
    keep_best: int = Field(0, ge=0, description="so many of the lowest validation loss are kept as well")
    background: bool = Field(False, description="train on while a copy of the state is written by another process")
    staging_gib: float | None = Field(None, gt=0, description="background: largest copy per rank, in GiB; null: any")
    resume: Literal["if_exists", "required", "never"] = Field(
        "if_exists",
        description="`if_exists`: continue from the newest, else start; `required`: refuse to start without one; "
        "`never`: start anew",
    )
    overwrite: bool = Field(False, description="with resume 'never': remove checkpoints already in the folder")
    cast: bool = Field(False, description="resume although states are rounded to a narrower dtype")
    allow_changed_data: bool = Field(False, description="resume although the data or their order are others")
    save_format: Literal["terrazzo", "hf"] = Field(
        "terrazzo",
        description="`hf`: at the end also a Hugging Face folder, log.folder/hf; with adapters a PEFT folder",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _as_number_or_auto(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"'{value}' is neither a number of steps nor auto")
        return value if value in (None, "auto") else whole_number(value)


class LaunchConfig(Section):
    """How many processes this command starts when torchrun or Slurm has not started it."""

    ranks: int | str | None = Field(
        None,
        description="default: one per GPU, or one on a CPU; least:most, such as 2:4: as many of these as start, with "
        "launch.restarts",
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
    threads: int | None = Field(None, gt=0, description="CPU threads per rank; default: cores divided by ranks")
    ignore_planner: bool = Field(False, description="start a run that the planner refuses: memory, known-bad settings")

    @field_validator("ranks", mode="before")
    @classmethod
    def _as_number_or_range(cls, value: Any) -> Any:
        if value is None or isinstance(value, int | float):
            return value if value is None else whole_number(value)
        if isinstance(value, str) and value.isdigit():
            raise PydanticKnownError("int_type")
        if not isinstance(value, str) or not RANGE.fullmatch(value):
            raise ValueError(f"{value!r} is neither a number of ranks nor a range of them, least:most, such as 2:4")
        least, most = map(int, value.split(":"))
        if not 0 < least < most:
            meant = f"{max(1, min(least, most))}:{max(least, most)}" if least != most else str(max(1, most))
            raise ValueError(f"'{value}' is no range of ranks, which is least:most: write {meant}")
        return f"{least}:{most}"

    def numbers(self, of: int = 1) -> Sequence[int]:
        """How many ranks there may be, in ascending order, as multiples `of` so many; none where nothing says so."""
        if not isinstance(self.ranks, str):
            return [] if self.ranks is None else [self.ranks]
        least, most = map(int, self.ranks.split(":"))
        return range(-(-least // of) * of, most + 1, of)

    def _agrees(self) -> None:
        if isinstance(self.ranks, str) and not self.restarts:
            raise ValueError(
                f"ranks '{self.ranks}' lets ranks become fewer when they are started again, and restarts is 0: set"
                f" launch.restarts to how often that may be, or launch.ranks to {self.numbers()[-1]}"
            )
        if self.stall_s > self.timeout_s and self.stall_s != type(self).model_fields["stall_s"].default:
            raise ValueError(
                f"stall_s {self.stall_s:g} is longer than timeout_s {self.timeout_s:g}, after which ranks give up"
                " waiting for each other: no rank that stands still would be named before. Lower launch.stall_s, or"
                " raise launch.timeout_s above it"
            )


class LogConfig(Section):
    """What is written while training."""

    folder: Path = Field(
        Path("runs/default"),
        description="for report.html, metrics.jsonl, plan.txt, config.json, tensorboard and, by default, checkpoints",
    )
    every: int = Field(10, gt=0, description="steps between console lines")
    tensorboard: bool = Field(True, description="write event files to log.folder/tensorboard")
    note: str | None = Field(None, description="printed at the end; {terrazzo} is that command, as your shell finds it")
