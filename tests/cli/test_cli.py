"""The command line: help, version, and refusals that come before anything is started."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.errors import BadInput, Diverged, Misuse, SaveFailed
from terrazzo.exit_codes import DIVERGED, EXIT_CODES, INTERRUPTED, UNREAD
from tests.helpers import programs

ROOT = Path(__file__).parents[2]


def test_help_lists_the_verbs_and_their_arguments() -> None:
    runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"})
    assert "train" in runner.invoke(cli.app, ["--help"]).output
    shown = runner.invoke(cli.app, ["train", "--help"])
    assert shown.exit_code == 0
    assert all(word in shown.output for word in ("CONFIG", "section.key=value", "exit", "75"))


@pytest.mark.parametrize("verb", ["init", "train", "run", "plan", "bench", "checkpoint verify", "config convert"])
def test_paragraphs_of_the_help_fill_the_terminal(verb: str) -> None:
    """Whatever the width that docstrings are written in."""
    runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"})
    lines = [line.strip() for line in runner.invoke(cli.app, [*verb.split(), "--help"]).output.splitlines()]
    for line, following in itertools.pairwise(lines[: next(i for i, line in enumerate(lines) if line[:1] == "╭")]):
        assert not following or not line or len(line) + 1 + len(following.split()[0]) > 78, line


def test_version_is_the_projects() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"terrazzo {stated}\n"


def test_an_interrupt_of_the_imports_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "terrazzo.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "terrazzo.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("terrazzo", run_name="__main__")
    assert ended.value.code == INTERRUPTED


@pytest.mark.parametrize(
    ("words", "starts", "said"),
    [
        ("train a.yaml", "terrazzo.config.load_config", "Ended before training began: nothing is lost.\n"),
        ("run a.py", "terrazzo.launch.script.start_script.run_script", "Ended before the script began.\n"),
    ],
)
def test_an_interrupt_before_anything_was_started_has_a_line(
    words: str, starts: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the seconds of imports and checks, in which nobody passes it on yet."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(starts, interrupted)
    monkeypatch.setattr(sys, "argv", ["terrazzo", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, said)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_that_a_configuration_is_checked(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes seconds, of imports alone."""
    path = tmp_path / "a.yaml"
    path.write_text("plan: zero3\n")
    monkeypatch.setattr("terrazzo.train.start_trainer.start_training", lambda *arguments: 0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with pytest.raises(typer.Exit):
        cli.train(path, [])
    assert capsys.readouterr().out == (f"checking {path} ...\n" if is_terminal else "")


def test_bad_input_is_one_paragraph_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("plan: zero33\n")
    monkeypatch.setattr(sys, "argv", ["terrazzo", "train", str(path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.err.startswith("Error: ")
    assert "Did you mean 'zero3'" in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(("error", "code"), [(BadInput, 2), (SaveFailed, 1), (Diverged, DIVERGED), (OSError, 1)])
def test_an_error_ends_with_its_exit_code_and_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception], code: int
) -> None:
    def fails(*_: object) -> None:
        raise error("'s3://key:secret@host/run' is not there.")

    monkeypatch.setattr("terrazzo.config.load_config", fails)
    monkeypatch.setattr(sys, "argv", ["terrazzo", "train", "a.yaml"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr().err
    assert caught.value.code == code
    assert "'s3://***@host/run' is not there." in shown
    assert "key:secret" not in shown
    assert ("Traceback" in shown) is (error is OSError)


@pytest.mark.processes
def test_a_mesh_that_does_not_make_up_the_ranks_starts_no_process(tmp_path: Path) -> None:
    start = time.monotonic()
    overrides = ["plan.mesh.tp=3", f"log.folder={tmp_path}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    config = str(ROOT / "examples/quickstart.yaml")
    done = programs.run("-m", "terrazzo", "train", config, *overrides, env=environment)
    assert done.returncode == 2
    assert "plan.mesh: " in done.stderr and "the product of its axes must be 2" in done.stderr
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - start < 60


@pytest.mark.processes
def test_a_reader_that_leaves_ends_a_report_quietly() -> None:
    """As `head` does. The first verb prints at its end, the second one more than a pipe holds."""
    environment = os.environ | {"COLUMNS": "500"}
    for arguments in (["plan", "--params", "70e9", "--world", "64"], ["plan", "--help"], ["--version"]):
        program = programs.Program("-m", "terrazzo", *arguments, env=environment)
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait(60) == 141
        program.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code"), [("--help", 1), ("--version", 1), ("train --help", 1), ("config check a.yaml", 70)]
)
def test_a_full_disk_under_the_output_is_one_line(words: str, code: int, tmp_path: Path) -> None:
    """Also of what is printed at the end, and of the help of a verb which goes on where nobody reads."""
    (tmp_path / "a.yaml").write_text("plan: zero3\n")
    full = f"{sys.executable} -m terrazzo {words} > /dev/full"
    done = subprocess.run(["sh", "-c", full], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    said = "Error: stdout cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (code, said)


CLOSED = """
import os, subprocess, sys
from terrazzo.processes.standard_streams import open_missing
open_missing()
print(sys.stdin.read(), sys.stdout.isatty(), flush=True)
print("lost", file=sys.stderr, flush=True)
subprocess.run([sys.executable, "-c", "print(1, flush=True)"], check=True)
os.write(int(sys.argv[1]), b"%d" % os.open("/dev/null", os.O_RDONLY))
"""


def test_streams_that_are_closed_lead_nowhere_and_no_file_gets_their_place() -> None:
    told, tell = os.pipe()
    words = f'exec {sys.executable} -c "$0" {tell} <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", words, CLOSED], pass_fds=[tell], timeout=60, check=False)
    os.close(tell)
    with os.fdopen(told) as pipe:
        assert (done.returncode, int(pipe.read() or 0) > 2) == (0, True)


@pytest.mark.processes
def test_a_verb_without_stdout_says_what_is_wrong_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("plan: zero33\n")
    closed = f"{sys.executable} -m terrazzo train a.yaml >&-"
    done = subprocess.run(
        ["sh", "-c", closed], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'zero3'" in done.stderr


def test_the_page_of_exit_codes_names_the_verbs_that_outlive_their_reader() -> None:
    verbs = [row.function.__name__ for row in cli.VERBS if row.outlives_reader]
    assert re.findall(r"`(\w+)`", EXIT_CODES[UNREAD].edit.partition(" ends so")[0]) == verbs


@pytest.mark.long
@pytest.mark.processes
def test_a_misspelt_key_under_torchrun_is_one_paragraph_of_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("trian: {steps: 3}\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = programs.run(*launcher, "-m", "terrazzo", "train", str(path), env=environment, timeout_s=120)
    assert done.returncode
    assert len(re.findall(r"^\[rank \d\] .*unknown key 'trian'", done.stderr, re.MULTILINE)) == 1
    assert done.stderr.count("unknown key 'trian'") == 2  # and in torchrun's own report
    assert len(re.findall(r"exitcode +: 2", done.stderr)) == 1
    assert "terrazzo/train" not in done.stderr, "no frames of ours"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train a.yaml --plan zero1", "Write plan=zero1."),
        ("train a.yaml --train.steps=50", "Write train.steps=50."),
        ("train a.yaml --eval-every 5", "Write train.eval_every=5."),
        (
            "train a.yaml --lr 1e-3 --steps 9",
            "Write optimizer.lr=1e-3 or plan.outer.lr=1e-3 or optimizer.muon.lr=1e-3.",
        ),
        ("train a.yaml --folder x", "Write checkpoint.folder=x or log.folder=x or checkpoint.local.folder=x."),
        ("train a.yaml --compile", "Write train.compile=true."),
        ("train --config a.yaml", "the file stands without one: a.yaml."),
        ("plan a.yaml --plan zero1", "Write plan=zero1."),
        ("init --output y.yaml", " init y.yaml."),
        ("init --plan zero1", "change the file that it writes, or train with plan=zero1 behind that."),
        ("run --nproc-per-node 2 a.py", "write --ranks 2."),
    ],
)
def test_an_option_that_is_a_setting_is_answered_with_how_it_is_written(words: str, said: str) -> None:
    caught = CliRunner().invoke(cli.app, words.split()).exception
    assert isinstance(caught, BadInput)
    verb, option = words.split()[0], next(word for word in words.split() if word.startswith("--")).partition("=")[0]
    assert str(caught).startswith(f"'{option}' is no option of `terrazzo {verb}`: ")
    assert str(caught).endswith(said)


@pytest.mark.parametrize(("verb", "file", "other"), [("train", "a.py", "run"), ("run", "a.yaml", "train")])
def test_a_script_and_a_configuration_have_each_a_verb(tmp_path: Path, verb: str, file: str, other: str) -> None:
    (tmp_path / file).write_text("")
    caught = CliRunner().invoke(cli.app, [verb, str(tmp_path / file)]).exception
    assert isinstance(caught, BadInput)
    assert str(caught).endswith(f" {other} {tmp_path / file}.")


@pytest.mark.parametrize(
    ("words", "error", "code"),
    [
        (["checkpoint", "verify", "a"], ZeroDivisionError(), 70),
        (["checkpoint", "diff", "a", "b"], Misuse("now"), 70),
        (["config", "check", "a"], BadInput("no file"), 2),
        (["verdict", "a"], ZeroDivisionError(), 1),
    ],
)
def test_a_bug_is_no_answer_of_a_verb_that_answers_by_its_exit_code(
    words: list[str], error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["terrazzo", *words])
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(cli, "ending_unread", contextlib.nullcontext)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert ("Traceback" in capsys.readouterr().err) == (code != 2)


@pytest.mark.parametrize("words", ["train a.yaml --quite", "run --lr 3 a.py", "init --quite"])
def test_any_other_option_has_the_usual_answer(words: str) -> None:
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 2
    assert "No such option" in done.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "cup"], "there are: cpu, axes, stages, mixture, tiny"),
        (["--suite", "tiny", "--out", "README.md/out"], "'README.md/out' cannot be written"),
        (["--suite", "tiny", "--cases", "tiny,traffic"], "--cases has traffic; suite tiny has: tiny"),
    ],
)
def test_bench_names_what_there_is(arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    caught = CliRunner().invoke(cli.app, ["bench", *arguments]).exception
    assert isinstance(caught, BadInput)
    assert named in str(caught)


def test_bench_without_matplotlib_is_refused_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    caught = CliRunner().invoke(cli.app, ["bench", "--suite", "tiny"]).exception
    assert isinstance(caught, BadInput)
    assert "extra 'bench'" in str(caught)


def test_bench_into_a_folder_that_takes_no_file_is_refused_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there may be read only, also for root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setattr(sys.modules["matplotlib"], "__spec__", ModuleSpec("matplotlib", None))
    caught = CliRunner().invoke(cli.app, ["bench", "--suite", "tiny", "--out", "/proc/self"]).exception
    assert isinstance(caught, BadInput)
    assert "'/proc/self' cannot be written" in str(caught)


def test_bench_outside_a_checkout_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, "benchmarks").is_dir()])
    caught = CliRunner().invoke(cli.app, ["bench"]).exception
    assert isinstance(caught, BadInput)
    assert "root of a checkout" in str(caught)


def test_what_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    """In a fresh interpreter: the version, the help, a look at what trains nothing, what is refused."""
    lines = [["--version"], ["--help"], ["plan", "--help"], ["checkpoint", "inspect", "--help"]]
    lines += [["profile", "--out", str(tmp_path / "seen"), "--", "true"], ["train", "--sped"]]
    config = str(ROOT / "examples/quickstart.yaml")
    lines += [["train", config, f"schedule.warmup_steps={10**6}"], ["train", config, "precision=fp8"]]
    code = (
        "import sys\nfrom terrazzo.cli import main\n"
        f"for words in {lines!r}:\n"
        "    sys.argv = ['terrazzo', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        print('ended', ended.code, 'torch' in sys.modules)\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == [*(["ended 0 False"] * 5), *(["ended 2 False"] * 3)]
