"""Run scripts of other libraries as they are and on Terrazzo, on two CPU ranks, and print a table of their losses.

    python -m tools.third_party CHECKOUTS            all of the table
    python -m tools.third_party CHECKOUTS sft nlp    those with one of these words in their path

CHECKOUTS is a folder with a checkout of each repository of scripts.toml, named as the repository is. Nothing in it is
changed: copies are, by the edits of the table. Exits 1 if something is otherwise than the table expects.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import shutil
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.third_party import stand_ins
from tools.third_party.rank import Ended, run

__all__ = ["Script", "main", "scripts", "verdict"]

TABLE = Path(__file__).with_name("scripts.toml")
RANKS = 2
TOLERANCE = 1e-5
"""The largest difference of two losses, as a part of the larger or of one."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
PRELOADED = (
    "torch._dynamo",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
    "lightning",
    "terrazzo.integrations",
)


@dataclass(frozen=True)
class Script:
    """One row of the table.

    Attributes:
        repository: such as `huggingface/trl`.
        path: within it.
        arguments: of the script.
        door: what stands between `python` and the script on Terrazzo; empty where the script is changed.
        changes: (old, new), for Terrazzo's copy.
        both: (old, new), for both: fewer steps, or a check for GPUs taken out.
        refused: a pattern that what Terrazzo raises on every rank must match; None where losses must be equal.
        alone: the original cannot run here: only Terrazzo's copy does.
    """

    repository: str
    path: str
    arguments: tuple[str, ...] = ()
    door: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    both: tuple[tuple[str, str], ...] = ()
    refused: str | None = None
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.repository.partition('/')[2]}/{self.path}"


def scripts() -> list[Script]:
    """The table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["script"]
    return [Script(**{key: _frozen(value) for key, value in row.items()}) for row in rows]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def prepared(script: Script, checkouts: Path, folder: Path, ours: bool) -> list[str]:
    """Copy the script's own folder into `folder` with its edits; the command that runs it.

    Raises: `ValueError` for a checkout that is not there, or in which an edit finds nothing.
    """
    source = checkouts / script.name
    if not source.exists():
        raise ValueError(f"{source} is not there: clone {script.repository} into {checkouts}.")
    copy = folder / "script"
    shutil.copytree(source.parent, copy)
    path = copy / source.name
    text = path.read_text(encoding="utf-8")
    for old, new in script.both + (script.changes if ours else ()):
        if old not in text:
            raise ValueError(f"{source} has no line {old!r}: check out the commit that scripts.toml names.")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return [*(script.door if ours else ()), str(path), *script.arguments]


def verdict(script: Script, theirs: Sequence[Ended], ours: Sequence[Ended]) -> tuple[bool, str]:
    """Whether it is as expected, and what to say in the table."""
    if script.refused is not None:
        told = [each.error or "it ran" for each in ours]
        matched = all(re.search(script.refused, each) for each in told)
        return matched, f"{'refused' if matched else 'NOT REFUSED'}: {_short(told[0])}"
    for who, ranks in (("original", theirs), ("Terrazzo", ours)):
        for rank, each in enumerate(ranks):
            if each.error is not None:
                return False, f"FAILED: {who}, rank {rank}: {_short(each.error)}"
    if script.alone:
        return True, "ran; the original cannot run here"
    if {len(each.losses) for each in theirs} != {len(each.losses) for each in ours} or not theirs[0].losses:
        return False, f"DIFFERENT numbers of losses: {[len(each.losses) for each in (*theirs, *ours)]}"
    pairs = [pair for rank in range(len(ours)) for pair in zip(theirs[rank].losses, ours[rank].losses, strict=True)]
    differences = [abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs]
    equal = all(each <= TOLERANCE for each in differences)  # which a loss that is not a number never is
    apart = next((each for each in differences if math.isnan(each)), max(differences))
    return equal, f"{'equal' if equal else 'DIFFERENT'}, at most {apart:.1e} apart"


def _short(text: str, limit: int = 150) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]} ..."


def both(script: Script, checkouts: Path, downloads: Path, limit_s: float) -> tuple[bool, list[str]]:
    """Run it as it is and on Terrazzo: whether it is as expected, and its row."""
    with tempfile.TemporaryDirectory(prefix="third-party-") as name:
        ended: list[list[Ended]] = []
        for ours in (False, True):
            folder = Path(name) / ("ours" if ours else "theirs")
            if not ours and (script.alone or script.refused is not None):
                ended.append([])
                continue
            shutil.copytree(downloads, folder)
            command = prepared(script, checkouts, folder, ours)
            ended.append(run(command, RANKS, folder, {"PYTHONPATH": os.pathsep.join(sys.path)}, limit_s))
        good, text = verdict(script, *ended)
        if not good and (keep := os.environ.get("THIRD_PARTY_KEEP")):
            shutil.copytree(name, Path(keep) / script.name.replace("/", "-"), dirs_exist_ok=True)
    return good, [script.name, *map(_series, ended), text]


def _series(ranks: Sequence[Ended]) -> str:
    """First and last loss of the first rank, and how many."""
    losses = ranks[0].losses if ranks else []
    return f"{losses[0]:.5f} ... {losses[-1]:.5f} ({len(losses)})" if losses else "-"


def chosen(words: Sequence[str]) -> Iterator[Script]:
    for script in scripts():
        if not words or any(word in script.name for word in words):
            yield script


def _preload() -> None:
    """Import what ranks, which are forks of this process, would each import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in PRELOADED:
            importlib.import_module(module)
    importlib.import_module("transformers").utils.logging.disable_progress_bar()


def main(arguments: Sequence[str]) -> int:
    """Run those asked for, and print each row when it is there; 1 if one is not as expected."""
    parser = argparse.ArgumentParser("python -m tools.third_party", description="Scripts of other libraries.")
    parser.add_argument("checkouts", type=Path, help="a folder with a checkout of each repository")
    parser.add_argument("words", nargs="*", help="only scripts with one of these in their path")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (default: %(default)s)")
    told = parser.parse_intermixed_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="third-party-") as made:
        os.environ.update(ENVIRONMENT, HF_HOME=f"{made}/cache")  # before what reads it is imported
        _preload()
        downloads = Path(made) / "downloads"
        downloads.mkdir()
        stand_ins.make(downloads)
        print("| script | original | on Terrazzo | |\n|---|---|---|---|", flush=True)
        for script in chosen(told.words):
            try:
                good, row = both(script, told.checkouts.resolve(), downloads, told.limit)
            except ValueError as error:
                good, row = False, [script.name, "-", "-", str(error)]
            wrong += not good
            print(f"| {' | '.join(row)} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
