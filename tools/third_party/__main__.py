"""Run scripts of other libraries as they are and on Terrazzo, on two CPU ranks, and print a table of their losses.

    python -m tools.third_party CHECKOUTS              all of the table
    python -m tools.third_party CHECKOUTS sft nlp      those with one of these words in their path
    python -m tools.third_party CHECKOUTS --page FILE  all, and put what is printed between the marks of a page

CHECKOUTS is a folder with a clone of each repository of scripts.toml, named as the repository is. Scripts are taken
from the commits that are named there, whatever is checked out, and the copies are changed by the edits of the table.
Exits 1 if something is otherwise than the table expects; 2, before anything runs, if a clone or its commit is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tools.third_party import stand_ins
from tools.third_party.rank import Ended, run
from tools.third_party.script import Script, absent, chosen, copied
from tools.third_party.table import COLUMNS, Outcome, Verdict, counts, filled, heading, row, verdict

__all__ = ["main"]

RANKS = 2
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


def compare(script: Script, told: argparse.Namespace, downloads: Path) -> tuple[Outcome, str]:
    """Run it as it is, where the table asks for that, and on Terrazzo: how it ended, and its row."""
    theirs: list[Ended] = []
    ours: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="third-party-") as name:
        try:
            if not (script.alone or script.refused is not None):
                theirs = _ran(script, told, downloads, Path(name) / "theirs")
            ours = _ran(script, told, downloads, Path(name) / "ours")
            found = verdict(script, theirs, ours)
        except ValueError as error:
            found = Verdict(Outcome.FAILED, str(error))
        if found.outcome is Outcome.FAILED and told.keep:
            shutil.copytree(name, told.keep / script.name.replace("/", "-"), dirs_exist_ok=True)
    return found.outcome, row(script.name, theirs, ours, found)


def _ran(script: Script, told: argparse.Namespace, downloads: Path, folder: Path) -> list[Ended]:
    shutil.copytree(downloads, folder)
    command = copied(script, told.checkouts, folder, ours=folder.name == "ours")
    return run(command, RANKS, folder, {"PYTHONPATH": os.pathsep.join(sys.path)}, told.limit)


def _preload() -> None:
    """Import what ranks, which are forks of this process, would each import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in PRELOADED:
            importlib.import_module(module)
    importlib.import_module("transformers").utils.logging.disable_progress_bar()


def _asked(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Script]]:
    """The arguments, and the scripts that they choose. Exits with 2 where these cannot be had."""
    parser = argparse.ArgumentParser("python -m tools.third_party", description="Scripts of other libraries.")
    parser.add_argument("checkouts", type=Path, help="a folder with a clone of each repository")
    parser.add_argument("words", nargs="*", help="only scripts with one of these in their path")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write what is printed between the marks of this page, too")
    parser.add_argument("--keep", type=Path, help="copy what a script that failed has left into this folder")
    told = parser.parse_intermixed_args(arguments)
    told.checkouts = told.checkouts.resolve()
    wanted = chosen(told.words)
    if not wanted:
        parser.error(f"no script of scripts.toml has {' or '.join(told.words)} in its path: leave the words out.")
    if told.page and told.words:
        parser.error("--page is for all scripts: leave out the words, or --page.")
    if told.page:
        try:
            filled(told.page.read_text(encoding="utf-8"), "")
        except (OSError, ValueError) as error:
            parser.error(f"--page {told.page}: {error}")
    if problems := absent(wanted, told.checkouts):
        parser.error("\n".join(problems))
    return told, wanted


def main(arguments: Sequence[str]) -> int:
    """Run those asked for, and print each row when it is there; 1 if one is not as expected."""
    told, wanted = _asked(arguments)
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="third-party-") as made:
        os.environ.update(ENVIRONMENT, HF_HOME=f"{made}/cache")  # before what reads it is imported
        _preload()
        downloads = Path(made) / "downloads"
        downloads.mkdir()
        stand_ins.make(downloads)
        say(f"{heading(wanted)}\n\n{COLUMNS}")
        for script in wanted:
            outcome, line = compare(script, told, downloads)
            outcomes.append(outcome)
            say(line)
        say(f"\n{counts(outcomes)}")
    if told.page:
        told.page.write_text(filled(told.page.read_text(encoding="utf-8"), "\n".join(lines)), encoding="utf-8")
    return 1 if Outcome.FAILED in outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
