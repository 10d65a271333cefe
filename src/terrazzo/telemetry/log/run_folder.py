"""The folder of a run, which `log.folder` of its configuration names, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.files import CHECKPOINTS
from terrazzo.untrusted_files import read_json

__all__ = ["RunFolder", "note_of", "rank_files"]

_MOST_BYTES = 1 << 20
"""The largest configuration or note; more is somebody else's file."""


def note_of(folder: Path) -> Path:
    """Beside a Hugging Face folder of a run: of which run and step it is."""
    return folder.with_name(f"{folder.name}.json")


def rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The number of the rank, and the path, of each `rank-NUMBER.*` in a folder of a run."""
    for path in sorted(folder.glob("rank-*.*")):
        if (number := path.stem.removeprefix("rank-")).isdecimal():
            yield int(number), path


@dataclass(frozen=True)
class RunFolder:
    """Where each file of a run is. A loop of one's own has no configuration and no plan."""

    path: Path

    @classmethod
    def of(cls, run: Path) -> RunFolder:
        """The folder of a run, which is named by it or by its `metrics.jsonl`, whether they are there or not.

        Raises:
            BadInput: it is another file.
        """
        if run.is_dir():
            return cls(run)
        if run.name == cls(run).metrics.name:
            return cls(run.parent)
        if run.exists():
            raise BadInput(
                f"'{run}' is a file: give the folder of a run, which `log.folder` names, or its metrics.jsonl in there."
            )
        return cls(run)

    @property
    def metrics(self) -> Path:
        """A line for each thing that is measured or happens."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The configuration of the newest start, without passwords."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The plan, and the bill of its memory, as text."""
        return self.path / "plan.txt"

    @property
    def page(self) -> Path:
        """Curves, tables and all of the above, in one file."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """A folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def exit_note(self) -> Path:
        """How the run has ended."""
        return self.path / "exit.json"

    @property
    def flight(self) -> Path:
        """A folder of what each rank has recorded, exchange by exchange."""
        return self.path / "flight"

    @property
    def trace(self) -> Path:
        """The same on one line of time, once somebody has asked for it."""
        return self.path / "trace.json"

    @property
    def stall(self) -> Path:
        """A folder of what ranks were doing that stood still."""
        return self.path / "stall"

    @property
    def script(self) -> Path:
        """What a script uses that was only looked at."""
        return self.path / "script.json"

    @property
    def ranks(self) -> Path:
        """A folder of what each rank of a script that was only looked at has recorded."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, where `checkpoint.folder` names no other."""
        return self.path / CHECKPOINTS

    @property
    def swap(self) -> Path:
        """The folder of swap files that `terrazzo init` names in `offload.path`."""
        return self.path / "swap"

    @property
    def hf(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "hf"

    @property
    def every_file(self) -> tuple[Path, ...]:
        """A file of each kind that is written there: without checkpoints and swap files, whose folders have keys."""
        model = ("config.json", "model.safetensors", "merges.txt", "chat_template.jinja")
        return (
            self.metrics,
            self.config,
            self.plan,
            self.page,
            self.exit_note,
            self.trace,
            self.script,
            note_of(self.hf),
            self.tensorboard / "events.out.tfevents.0",
            self.flight / "rank-00000.live",
            self.stall / "stall.txt",
            self.ranks / "rank-00000.jsonl",
            *(self.hf / name for name in model),
        )

    def settings(self) -> dict[str, Any] | None:
        """The configuration as it was written; None where there is none that can be read."""
        return self.read(self.config)

    def read(self, file: Path) -> dict[str, Any] | None:
        """A JSON object of one of its files; None where there is none that can be read."""
        try:
            content = read_json(file, _MOST_BYTES)
        except (OSError, BadInput):
            return None
        return content if isinstance(content, dict) else None
