"""A row of `scripts.toml`: which script, of which commit, with which edits; and a copy of it that can be run."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Script", "absent", "chosen", "copied", "scripts"]

TABLE = Path(__file__).with_name("scripts.toml")


@dataclass(frozen=True)
class Script:
    """One row of the table.

    Attributes:
        repository: such as `huggingface/trl`.
        commit: of the repository: the one that the edits were made for, in full.
        path: within it.
        arguments: of the script.
        runner: what stands between `python` and the script on Terrazzo; empty where the script is changed.
        changes: (old, new), for Terrazzo's copy.
        both: (old, new), for both copies: fewer steps, or a check for GPUs taken out.
        refused: a pattern that what Terrazzo raises on every rank must match; None where losses must be equal.
        alone: the original cannot run here: only Terrazzo's copy does.
    """

    repository: str
    commit: str
    path: str
    arguments: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    both: tuple[tuple[str, str], ...] = ()
    refused: str | None = None
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.path}"

    @property
    def checkout(self) -> str:
        """The name of its repository's folder."""
        return self.repository.partition("/")[2]


def scripts() -> list[Script]:
    """The table."""
    told = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [
        Script(commit=told["commits"][row["repository"]], **{key: _frozen(value) for key, value in row.items()})
        for row in told["script"]
    ]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def chosen(words: Sequence[str]) -> list[Script]:
    """Those with one of `words` in their name; all where there are none."""
    return [script for script in scripts() if not words or any(word in script.name for word in words)]


def absent(wanted: Iterable[Script], checkouts: Path) -> list[str]:
    """What is missing in `checkouts`, a line for each repository that is not there, or not with the script's commit."""
    problems = []
    for repository, commit, checkout in sorted({(each.repository, each.commit, each.checkout) for each in wanted}):
        folder = checkouts / checkout
        if not folder.is_dir() or _git(folder, "rev-parse", "--git-dir").returncode:
            problems.append(f"{folder} is no git repository: git clone https://github.com/{repository} {folder}")
        elif _git(folder, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
            problems.append(f"{folder} does not have commit {commit}: git -C {folder} fetch origin {commit}")
    return problems


def copied(script: Script, checkouts: Path, folder: Path, ours: bool) -> list[str]:
    """Put the script's own folder, as it is in its commit, into `folder` with its edits; the command that runs it.

    Whatever is checked out, or changed there, is not looked at. Its folder `data` is left out: a stand-in replaces it.

    Raises:
        ValueError: The commit has no such script, or an edit finds nothing in it.
    """
    parent, _, name = script.path.rpartition("/")
    packed = _git(checkouts / script.checkout, "archive", f"{script.commit}:{parent}", "--", ".", ":(exclude)data")
    if packed.returncode:
        raise ValueError(f"no {parent} in commit {script.commit}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as members:
        # The filter came with Python 3.11.4.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        members.extractall(folder / "script", **safely)
    copy = folder / "script" / name
    if not copy.exists():
        raise ValueError(f"no {script.path} in commit {script.commit}: mend its row in scripts.toml.")
    text = copy.read_text(encoding="utf-8")
    for old, new in script.both + (script.changes if ours else ()):
        if old not in text:
            raise ValueError(f"{script.name} has no line {old!r}: mend the edit in scripts.toml.")
        text = text.replace(old, new)
    copy.write_text(text, encoding="utf-8")
    return [*(script.runner if ours else ()), str(copy), *script.arguments]


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Of `folder` itself, never of a repository around it."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, env=environment, check=False)
