"""The folder of a run (`log.folder` in its configuration), and the names of the files in it."""

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
"""Largest size of a configuration or note that is read; a larger file is not ours."""


def note_of(folder: Path) -> Path:
    """The file beside an exported Hugging Face folder that says which run and step it is from."""
    return folder.with_name(f"{folder.name}.json")


def rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The rank and the path of each file `rank-NUMBER.*` in a folder."""
    for path in sorted(folder.glob("rank-*.*")):
        if (number := path.stem.removeprefix("rank-")).isdecimal():
            yield int(number), path


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files. A run of `attach` has no `config` and no `plan`."""

    path: Path

    @classmethod
    def of(cls, run: Path) -> RunFolder:
        """The run's folder, given as that folder or as the `metrics.jsonl` in it. Neither has to exist.

        Raises:
            BadInput: `run` is another file.
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
        """A JSON object per line for everything that is measured or happens."""
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
        """The report: curves, tables and all of the above, in one file."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """A folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def exit_note(self) -> Path:
        """How the run ended."""
        return self.path / "exit.json"

    @property
    def flight(self) -> Path:
        """A folder with the flight of each rank."""
        return self.path / "flight"

    @property
    def trace(self) -> Path:
        """The flights as a timeline, once `terrazzo trace` has written it."""
        return self.path / "trace.json"

    @property
    def stall(self) -> Path:
        """A folder with what ranks were doing when they stood still."""
        return self.path / "stall"

    @property
    def script(self) -> Path:
        """What a script uses that `terrazzo profile` has measured."""
        return self.path / "script.json"

    @property
    def ranks(self) -> Path:
        """A folder with what each rank of such a script has recorded."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, unless `checkpoint.folder` names another."""
        return self.path / CHECKPOINTS

    @property
    def swap(self) -> Path:
        """The folder of swap files that `terrazzo init` writes into `offload.path`."""
        return self.path / "swap"

    @property
    def hf(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "hf"

    @property
    def every_file(self) -> tuple[Path, ...]:
        """One file of each kind that is written there, without checkpoints and swap files: keys name their folders."""
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
        """The configuration as it was written; None if there is none, or it cannot be read."""
        return self.read(self.config)

    def read(self, file: Path) -> dict[str, Any] | None:
        """The JSON object in a file; None if there is none, or it cannot be read."""
        try:
            content = read_json(file, _MOST_BYTES)
        except (OSError, BadInput):
            return None
        return content if isinstance(content, dict) else None
