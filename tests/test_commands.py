"""Every command that the first pages and the demo print does something: it is read by the command line, and run.

A run of `terrazzo train` is made small and takes place in this process; its ranks are a thread.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo import cli
from terrazzo.config import Config, load_config
from terrazzo.exit_codes import PREEMPTED
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.shell_command import fold_command, terrazzo_command
from terrazzo.train import start_trainer
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.preflight import check
from terrazzo.train.session.build_session import open_session
from terrazzo.train.settings.run_command import RunCommand
from tests.helpers.threads import run_in_threads

ROOT = Path(__file__).parents[1]
FIRST_PAGES = ("README.md", "docs/start.md")
SMALL = {
    "model.dim": 16, "model.layers": 1, "model.heads": 2, "model.kv_heads": 1, "data.max_bytes": 60_000,
    "batch.global_batch": 2, "batch.micro_batch": 1, "batch.sequence_length": 16, "train.sample_tokens": 8,
    "schedule.warmup_steps": 0, "train.eval_every": "null", "log.tensorboard": "false",
}  # fmt: skip


class _AskedAfter(StopRequest):
    """Signals belong to the main thread: it is asked after so many steps, or never."""

    def __init__(self, steps: int | None = None) -> None:
        self.requested, self._left = False, steps

    def agreed(self, broken: bool) -> tuple[bool, bool]:
        self._left = None if self._left is None else self._left - 1
        self.requested = self._left == 0
        return super().agreed(broken)


class Runs:
    """Stands in for `start_training`: the same reading and refusing, then one rank in a thread."""

    def __init__(self, folder: Path) -> None:
        self._small = [f"{key}={value}" for key, value in SMALL.items()]
        self._small += [f"data.cache={folder / 'cache'}"]
        self._folder = folder
        self.steps: list[int] = []
        self.stop_after: int | None = None

    def __call__(self, asked: Config, path: Path, overrides: list[str]) -> int:
        check(asked, asked.launch.ranks or 1)
        steps = asked.train.steps if asked.train.steps < 10 else max(2, asked.train.steps // 125)
        here = [f"log.folder={self._folder / asked.log.folder}", f"train.steps={steps}", "launch.ranks=1"]
        config = load_config(path, [*overrides, *self._small, *here])

        def body(rank: int) -> int:
            with open_session(config, Ranks(0, 1, torch.device("cpu"))) as session:
                self.steps.append(session.step)
                return TrainingLoop(session, _AskedAfter(self.stop_after), RunCommand(path, overrides)).run()

        return run_in_threads(1, body)[0]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs(tmp_path)
    steps_may_be_few = ["schedule.warmup_steps=0"]
    monkeypatch.setattr(
        "terrazzo.config.load_config", lambda path, words: load_config(path, [*steps_may_be_few, *words])
    )
    monkeypatch.setattr(start_trainer, "start_training", made)
    monkeypatch.chdir(ROOT)
    return made


def obey(command: str, code: int = 0) -> None:
    """Do what a shell would; it ends the test where a shell would say that there is an error, or another exit code."""
    words = shlex.split(command, comments=True)
    name, arguments = Path(words[0]).name, words[1:]
    if name == "make":
        subprocess.run(
            ["make", "--no-print-directory", "--dry-run", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=60,
        )
    elif (name, arguments[0]) == ("terrazzo", "run"):
        script = arguments[-1]
        assert arguments[1:3] == ["--ranks", "2"]
        assert (ROOT / script).exists() or f"Save it as `{script}`" in (ROOT / "docs/start.md").read_text()
    else:
        assert name == "terrazzo", f"not known here: {command}"
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            if arguments[0] == "init":  # which asks, and writes
                patch.chdir(folder)
                words.append("--yes")
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        assert (ended.value.code or 0) == code, command


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]


def test_every_command_of_the_first_pages_works(runs: Runs) -> None:
    commands = dict.fromkeys(command for page in FIRST_PAGES for command in commands_of(page))
    assert len(commands) >= 8
    for command in commands:
        obey(command)
    assert len(runs.steps) >= 4, "some of them train"


def test_stop_and_continue_does_what_the_page_says(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    section = page.partition("## Stop and continue")[2].partition("\n## ")[0]
    first, stop, second = re.findall(
        r"^(?:\$ )?(\S.*)$", section.partition("```console\n")[2].partition("```")[0], re.M
    )
    assert stop == "^C"
    obey("terrazzo train examples/quickstart.yaml")  # the demo, which ends at its last step
    runs.stop_after = 1
    obey(first, PREEMPTED)
    assert "stopping as asked: saving" in capsys.readouterr().out
    runs.stop_after = None
    obey(second)
    assert runs.steps == [0, 2, 3]
    out = capsys.readouterr().out
    assert "done      step 4 of 4" in out
    assert "\nplan      zero1 on 1 CPU rank" in out


def test_the_demo_is_short_and_its_commands_work(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    make = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    shown = subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert shown[0].startswith("echo "), "something to see at once"
    assert not any("--quiet" in line for line in shown), "pip says what it downloads"
    obey(shown[-1])
    out = capsys.readouterr().out
    summary = out.split("\n\n")[-1].splitlines()
    assert summary[0].startswith("done  ")
    assert len(summary) <= 9
    joined = out.replace("\\\n", " ")
    found = re.search(r"^your text (\S+ train .*)\ncontinue  (\S+ train .*)\n\Z", joined, re.MULTILINE)
    assert found is not None, "how to go on comes last"
    own, going_on = found.groups()
    obey(going_on)
    assert "resumed at step 2" in capsys.readouterr().out
    obey(own)
    assert runs.steps == [0, 2, 0]


def test_no_line_tells_to_install_what_no_index_has() -> None:
    """The package has no name on an index: extras come from a clone, and are those of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "constraints.txt"]
    texts += [path for folder in ("docs", "src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    found = 0
    for path in texts:
        if path.suffix in (".md", ".py", ".yaml", ".txt", "") and path != ROOT / "docs/decisions.md":
            content = path.read_text(encoding="utf-8")
            assert not re.search(r"pip install[^`\n]*\bterrazzo\b", content), path
            for names in re.findall(r"'\.\[([a-z0-9,]+)\]'", content):
                found += 1
                assert set(names.split(",")) <= set(extras), path
    assert found > 6


@pytest.mark.parametrize("active", [True, False])
def test_a_printed_command_is_one_that_the_shell_finds(
    active: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "my folder" / ".venv" / "bin"
    beside.mkdir(parents=True)
    shutil.copy("/bin/true", beside / "terrazzo")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(beside) if active else "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert terrazzo_command() == ("terrazzo" if active else "'my folder/.venv/bin/terrazzo'")
    monkeypatch.chdir(beside)
    assert terrazzo_command() == ("terrazzo" if active else "./terrazzo")
    (beside / "terrazzo").unlink()
    assert terrazzo_command() == f"'{beside}/python' -m terrazzo"


def test_going_on_repeats_what_was_asked_for() -> None:
    asked = ["plan=zero1", "train.steps=250", "log.note=two words"]
    config: Any = load_config(ROOT / "examples/quickstart.yaml", asked)
    said = RunCommand(Path("a b.yaml"), asked).going_on(config, finished=False)
    words = shlex.split(said.replace(terrazzo_command(), "terrazzo"))
    assert words == ["terrazzo", "train", "a b.yaml", *asked, "checkpoint.resume=if_exists"]
    said = RunCommand(Path("a.yaml"), asked).going_on(config, finished=True)
    assert shlex.split(said)[-3:] == ["log.note=two words", "checkpoint.resume=if_exists", "train.steps=500"]
    twice = RunCommand(Path("a.yaml"), ["train.steps=3", "plan=zero1", "train.steps=5"])
    assert twice.going_on(config, finished=False).endswith(
        " a.yaml plan=zero1 train.steps=5 checkpoint.resume=if_exists"
    )
    assert RunCommand().going_on(config, finished=False) == "the same command with checkpoint.resume=if_exists"
    for width in range(40, 120):
        lines = fold_command("continue  ", said, width)
        assert max(map(len, lines.splitlines())) <= max(width, 60)
        assert shlex.split(lines.removeprefix("continue  ").replace("\\\n", "")) == shlex.split(said), width
