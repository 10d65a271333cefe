"""Every command of the guides is one that its program takes.

Conversions and plans of a named model are run. What would train, start ranks, read a checkpoint or measure this machine
is read by the program's own command line, as are the files that it names; tests of each integration run its examples.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed import run as torchrun
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.config import load_config
from tests.test_commands import ROOT, commands_of

GUIDES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/guides").glob("*.md"))
COMMANDS = list(dict.fromkeys(command for page in GUIDES for command in commands_of(page)))
YOURS = {"script.py", "yourscript.py", "yourpackage.train", "run_clm.py", "config.yaml", "mine.yaml", "llama.yaml"}
"""What a reader has, and this repository has not."""


def verbs(group: Any) -> Iterator[Any]:
    for verb in group.commands.values():
        if hasattr(verb, "commands"):
            yield from verbs(verb)
        else:
            yield verb


@functools.cache
def idle() -> Any:
    """Terrazzo's command line, whose commands do nothing."""
    root: Any = typer.main.get_command(cli.app)
    for verb in verbs(root):
        verb.callback = lambda **_: None
    return root


def read(words: list[str]) -> None:
    """Terrazzo's command line takes these words. Nothing is done."""
    idle().main(words, prog_name="terrazzo", standalone_mode=False)
    if configures(words) and words[1] not in YOURS:
        load_config(ROOT / words[1], [word for word in words[2:] if not word.startswith("-")])


def configures(words: list[str]) -> bool:
    return words[0] in ("train", "plan") and words[1].endswith(".yaml")


def follow(words: list[str]) -> None:
    """Do what a command does, or have the program that it starts read it."""
    name, arguments = words[0], words[1:]
    if name == "pip":
        assert arguments[:2] == ["install", "-e"]  # without it the clone's own installation would become a copy
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert re.fullmatch(r"\.\[(\w+)\]", arguments[2])[1] in extras  # type: ignore[index]
    elif name == "torchrun":
        asked = torchrun.parse_args(arguments)
        target, rest = asked.training_script, asked.training_script_args
        if target == "terrazzo":
            follow(["terrazzo", *rest])
        else:
            follow(["python", *(["-m"] if asked.module else []), target, *rest])
    elif name == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif name in ("python", "sbatch"):
        modules = arguments[0] == "-m"
        target = arguments[modules]
        assert target in YOURS or (importlib.util.find_spec(target) if modules else (ROOT / target).is_file()), target
    else:
        assert name == "terrazzo", f"not known here: {words}"
        read(arguments)
        if (arguments[0] == "plan" and not configures(arguments)) or arguments[:2] == ["config", "convert"]:
            done = CliRunner().invoke(cli.app, arguments)
            assert done.exit_code == 0, done.output
            assert done.output


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(ROOT / "examples", tmp_path_factory.mktemp("copied") / "examples"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_guides_is_taken(
    command: str, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(examples)
    monkeypatch.chdir(tmp_path)
    inner = re.fullmatch(r"\(ulimit -d \d+; (.*)\)", command)  # a limit of the shell's
    follow(shlex.split(inner[1] if inner else command, comments=True))


def test_a_word_that_no_program_takes_is_found() -> None:
    for wrong in ("terrazzo plan --parms 70e9", "terrazzo checkpoint convrt a b", "terrazzo train a.yaml --quick"):
        with pytest.raises(Exception, match=r"[Nn]o (such )?(option|command)"):
            read(shlex.split(wrong)[1:])
    with pytest.raises(AssertionError, match=r"gone\.py"):
        follow(shlex.split("torchrun --nproc-per-node 2 examples/gone.py"))
    assert len(COMMANDS) > 30
