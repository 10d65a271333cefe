"""The table of scripts of other libraries can be run, and what the tool says of a run is what happened."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from tools.third_party import __main__ as tool
from tools.third_party.rank import Ended, run

pytestmark = pytest.mark.alone  # ranks are forks

SCRIPT = """
import os, sys
import torch
weight = torch.ones(1, requires_grad=True)
for step in range(int(sys.argv[1])):
    (weight.sum() * step + int(os.environ["RANK"])).backward()
raise SystemExit(sys.argv[2] if len(sys.argv) > 2 else 0)
"""


def test_every_script_is_of_a_known_commit_and_goes_through_a_door() -> None:
    commits = tomllib.loads(tool.TABLE.read_text(encoding="utf-8"))["commits"]
    table = tool.scripts()
    assert len(table) == len({script.name for script in table}) >= 30
    for script in table:
        assert len(commits[script.repository]) == 40
        assert script.door or script.changes, script.name
        assert not any(old == new for old, new in script.changes + script.both), script.name
        if script.door:
            assert importlib.util.find_spec(script.door[1]) is not None, script.name
        if script.alone:
            assert script.repository == "deepspeedai/DeepSpeedExamples", "only DeepSpeed is not installed"


def test_the_copy_is_changed_and_the_checkout_is_not(tmp_path: Path) -> None:
    source = tmp_path / "checkouts" / "examples" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("steps = 9\nmodel = DDP(model)\n", encoding="utf-8")
    script = tool.Script("pytorch/examples", "a.py", ("--cpu",), changes=(("DDP", "shard"),), both=(("9", "2"),))
    theirs = tool.prepared(script, tmp_path / "checkouts", tmp_path / "theirs", ours=False)
    ours = tool.prepared(script, tmp_path / "checkouts", tmp_path / "ours", ours=True)
    assert Path(theirs[0]).read_text(encoding="utf-8") == "steps = 2\nmodel = DDP(model)\n"
    assert Path(ours[0]).read_text(encoding="utf-8") == "steps = 2\nmodel = shard(model)\n"
    assert source.read_text(encoding="utf-8") == "steps = 9\nmodel = DDP(model)\n"
    assert ours[1:] == ["--cpu"]
    source.write_text("model = wrap(model)\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.py has no line '9': check out the commit"):
        tool.prepared(script, tmp_path / "checkouts", tmp_path / "again", ours=True)
    with pytest.raises(ValueError, match="clone pytorch/other into"):
        tool.prepared(tool.Script("pytorch/other", "a.py"), tmp_path / "checkouts", tmp_path / "other", ours=True)


def test_losses_are_what_backward_was_called_of(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ended = run([str(tmp_path / "script.py"), "3"], 2, tmp_path, {}, 60.0)
    assert ended == [Ended([0.0, 1.0, 2.0], None), Ended([1.0, 2.0, 3.0], None)]
    assert run([str(tmp_path / "script.py"), "1", "no"], 1, tmp_path, {}, 60.0) == [Ended([0.0], "SystemExit: no")]


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    assert run([str(tmp_path / "script.py")], 1, tmp_path, {}, 0.3) == [Ended([], "killed")]


def test_what_is_not_as_expected_is_said() -> None:
    equal, refused = tool.Script("a/b", "c.py"), tool.Script("a/b", "c.py", refused="LBFGS")
    good, bad = [Ended([1.0, 2.0], None)] * 2, [Ended([1.0], "BadInput: LBFGS")] * 2

    def says(script: tool.Script, theirs: list[Ended], ours: list[Ended]) -> tuple[bool, str]:
        right, text = tool.verdict(script, theirs, ours)
        return right, text.split(":")[0].split(",")[0]

    assert says(equal, good, good) == (True, "equal")
    assert says(equal, good, [good[0], Ended([1.0, 2.1], None)]) == (False, "DIFFERENT")
    lost = [Ended([1.0, float("nan")], None)]
    assert says(equal, lost, lost) == (False, "DIFFERENT")
    assert says(equal, good, [Ended([1.0], None)] * 2) == (False, "DIFFERENT numbers of losses")
    assert says(equal, [Ended([], None)], [Ended([], None)]) == (False, "DIFFERENT numbers of losses")
    assert says(equal, good, bad) == (False, "FAILED")
    assert says(refused, [], bad) == (True, "refused")
    assert says(refused, [], [bad[0], good[0]]) == (False, "NOT REFUSED")
