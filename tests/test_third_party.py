"""The table of scripts of other libraries can be run, and what the tool says of a run is what happened."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools.third_party import __main__ as tool
from tools.third_party.rank import Ended, run
from tools.third_party.script import Script, copied, scripts
from tools.third_party.table import Outcome, Verdict, counts, filled, row, verdict

pytestmark = pytest.mark.alone  # ranks are forks

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "third-party.md"

SCRIPT = """
import os, sys
import torch
weight = torch.ones(1, requires_grad=True)
for step in range(int(sys.argv[1])):
    (weight.sum() * step + int(os.environ["RANK"])).backward()
raise SystemExit(sys.argv[2] if len(sys.argv) > 2 else 0)
"""


def committed(folder: Path) -> str:
    """The commit, in a new repository, of what is in `folder`."""

    def git(*arguments: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", folder, *named, *arguments], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return git("rev-parse", "HEAD").strip()


def test_every_script_is_of_a_known_commit_and_goes_through_a_runner() -> None:
    table = scripts()
    assert len(table) == len({script.name for script in table}) >= 30
    for script in table:
        assert re.fullmatch(r"[0-9a-f]{40}", script.commit), script.name
        assert script.runner or script.changes, script.name
        assert not any(old == new for old, new in script.changes + script.both), script.name
        if script.runner:
            assert importlib.util.find_spec(script.runner[1]) is not None, script.name
        if script.alone:
            assert script.repository == "deepspeedai/DeepSpeedExamples", "only DeepSpeed is not installed"


def test_the_guide_has_what_the_tool_printed_of_the_table_as_it_is() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    printed = page.split("<!-- table: make third-party ")[1].split("<!-- end of table -->")[0]
    table = scripts()
    assert dict(re.findall(r"^\| `(\S+)` \| `(\w{40})` \|$", printed, re.MULTILINE)) == {
        script.repository: script.commit for script in table
    }
    rows = re.findall(r"^\| `(\S+)` \|.*\| ([^|:]+)(?::[^|]*)? \|$", printed, re.MULTILINE)
    assert [name for name, _ in rows] == [script.name for script in table], "make third-party with PAGE"
    for script, (_, outcome) in zip(table, rows, strict=True):
        expected = {Outcome.SAME, Outcome.CLOSE}
        if script.refused is not None or script.alone:
            expected = {Outcome.ALONE if script.refused is None else Outcome.REFUSED}
        assert outcome in expected, script.name
    assert counts([Outcome(outcome) for _, outcome in rows]) in printed
    assert filled(page, printed.split("-->\n", 1)[1].strip()) == page


def test_the_copy_is_of_the_commit_and_changed_and_the_clone_is_not(tmp_path: Path) -> None:
    source = tmp_path / "clones" / "examples" / "a.py"
    (source.parent / "data").mkdir(parents=True)
    source.write_text("steps = 9\nmodel = DDP(model)\n", encoding="utf-8")
    (source.parent / "data" / "large").write_text("text", encoding="utf-8")
    commit = committed(source.parent)
    source.write_text("model = wrap(model)\n", encoding="utf-8")  # whatever is there now
    (source.parent / "untracked.py").touch()
    script = Script("pytorch/examples", commit, "a.py", ("--cpu",), changes=(("DDP", "shard"),), both=(("9", "2"),))
    theirs = copied(script, tmp_path / "clones", tmp_path / "theirs", ours=False)
    ours = copied(script, tmp_path / "clones", tmp_path / "ours", ours=True)
    assert Path(theirs[0]).read_text(encoding="utf-8") == "steps = 2\nmodel = DDP(model)\n"
    assert Path(ours[0]).read_text(encoding="utf-8") == "steps = 2\nmodel = shard(model)\n"
    assert [path.name for path in Path(ours[0]).parent.iterdir()] == ["a.py"]
    assert source.read_text(encoding="utf-8") == "model = wrap(model)\n"
    assert ours[1:] == ["--cpu"]
    with pytest.raises(ValueError, match=r"a\.py has no line 'FSDP': mend the edit"):
        copied(replace(script, changes=(("FSDP", "shard"),)), tmp_path / "clones", tmp_path / "again", ours=True)
    with pytest.raises(ValueError, match=rf"no b\.py in commit {commit}"):
        copied(replace(script, path="b.py"), tmp_path / "clones", tmp_path / "other", ours=True)


def test_a_clone_or_a_commit_that_is_missing_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("examples", "trl"):
        (tmp_path / name).mkdir()
    (tmp_path / "examples" / "a.py").touch()
    other = committed(tmp_path / "examples")
    commits = {script.checkout: script.commit for script in scripts()}
    assert other not in commits.values()
    with pytest.raises(SystemExit, match="2"):
        tool.main([str(tmp_path), "regression", "dpo", "nlp_example"])
    said = capsys.readouterr()
    assert said.out == ""
    for line in (
        f"{tmp_path}/examples does not have commit {commits['examples']}: git -C {tmp_path}/examples fetch origin",
        f"{tmp_path}/trl is no git repository: git clone https://github.com/huggingface/trl {tmp_path}/trl",
        f"{tmp_path}/accelerate is no git repository: git clone",
    ):
        assert line in said.err
    page = tmp_path / "page.md"
    page.write_text("no marks", encoding="utf-8")
    for arguments, told in (
        (["nonesuch"], "no script of scripts.toml has nonesuch in its path"),
        (["dpo", "--page", str(page)], "--page is for all scripts"),
        (["--page", str(page)], "has no '<!-- table: make third-party"),
    ):
        with pytest.raises(SystemExit, match="2"):
            tool.main([str(tmp_path), *arguments])
        assert told in capsys.readouterr().err


def test_losses_are_what_backward_was_called_of(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ended = run([str(tmp_path / "script.py"), "3"], 2, tmp_path, {}, 60.0)
    assert ended == [Ended([0.0, 1.0, 2.0], None), Ended([1.0, 2.0, 3.0], None)]
    assert run([str(tmp_path / "script.py"), "1", "no"], 1, tmp_path, {}, 60.0) == [Ended([0.0], "SystemExit: no")]


def test_a_rank_that_is_killed_has_said_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('there', flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    assert run([str(tmp_path / "script.py")], 1, tmp_path, {}, 10.0) == [Ended([], "killed")]
    assert 'script.py", line 3 in <module>' in (tmp_path / "rank0.log").read_text(encoding="utf-8")


def test_what_is_not_as_expected_is_said() -> None:
    equal = Script("a/b", "0" * 40, "c.py")
    refused, alone = replace(equal, refused="LBFGS"), replace(equal, alone=True)
    good, bad = [Ended([1.0, 2.0], None)] * 2, [Ended([1.0], "BadInput: LBFGS | is not there")] * 2

    def says(script: Script, theirs: list[Ended], ours: list[Ended]) -> str:
        return str(verdict(script, theirs, ours))

    assert says(equal, good, good) == "equal to the bit"
    assert says(equal, good, [good[0], Ended([1.0, 2.000002], None)]) == "equal within rounding: at most 1.0e-06 apart"
    assert says(equal, [Ended([0.0], None)], [Ended([-0.0], None)]) == "equal within rounding: at most 0.0e+00 apart"
    assert says(equal, good, [good[0], Ended([1.0, 2.1], None)]) == "FAILED: at most 4.8e-02 apart"
    lost = [Ended([1.0, float("nan")], None)]
    assert says(equal, lost, lost) == "FAILED: a loss is not a number"
    assert says(equal, good, [Ended([1.0], None)] * 2) == "FAILED: different numbers of losses: [2, 2, 1, 1]"
    assert says(equal, [Ended([], None)], [Ended([], None)]) == "FAILED: different numbers of losses: [0, 0]"
    assert says(equal, good, bad) == "FAILED: Terrazzo, rank 0: BadInput: LBFGS | is not there"
    assert says(equal, bad, good).startswith("FAILED: original, rank 0:")
    assert says(alone, [], good) == "not compared: the original cannot run here"
    assert says(alone, [], bad).startswith("FAILED: Terrazzo")
    assert says(refused, [], bad).startswith("refused: BadInput")
    assert says(refused, [], [bad[0], good[0]]) == "FAILED: not refused on rank 1: it ran"


def test_a_row_and_the_line_of_counts() -> None:
    losses = [Ended([1.0, 2.0], None)]
    found = row("b/c.py", [], losses, Verdict(Outcome.REFUSED, "a | b"))
    assert found == "| `b/c.py` | - | 1.00000 ... 2.00000 (2) | refused: a \\| b |"
    told = counts([Outcome.SAME, Outcome.FAILED, Outcome.SAME])
    assert told == "3 scripts: 2 equal to the bit, 0 equal within rounding, 0 refused, 0 not compared, 1 failed."
