"""The section `log`: what a run writes."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from terrazzo.config.section import Section

__all__ = ["LogConfig"]


class LogConfig(Section):
    """What is written while training."""

    folder: Path = Field(
        Path("runs/default"),
        description="for report.html, metrics.jsonl, plan.txt, config.json, tensorboard and, by default, checkpoints",
    )
    every: int = Field(10, gt=0, description="steps between rows of the log; the first step of each start has one too")
    tensorboard: bool = Field(True, description="write event files to log.folder/tensorboard")
    note: str | None = Field(
        None, description="printed at the end; {terrazzo} is that command, as your shell finds it; null: nothing"
    )
