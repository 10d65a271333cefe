"""Local checkpoints of a run on several hosts: a host is lost with all that it had, and the run goes on without it."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import programs
from tests.train.test_again import STEPS, weights
from tests.train.test_loop import command, curve, environment, metrics

DIES = """
import os, runpy, signal, sys, time
from pathlib import Path
from terrazzo.train.loop import TrainingLoop

step = TrainingLoop.train_step
def train_step(self):
    if self.session.step == 7:
        while not [*Path(first).glob("terrazzo-*/step-00000006/rank-00001.safetensors")]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    step(self)

if os.environ["DISK"].endswith("/lost"):
    TrainingLoop.train_step = train_step
first = sys.argv.pop(1)
sys.argv[0] = "terrazzo"
runpy.run_module("terrazzo", run_name="__main__", alter_sys=True)
"""
"""A host that dies in step 8, once its partner has what it had saved."""


def on_hosts(hosts: list[Path], *words: str) -> list[programs.Done]:
    """As torchrun, on as many hosts as there are folders, with a rank on each, to the end."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    own = [{"RANK": str(rank), "DISK": str(host)} for rank, host in enumerate(hosts)]
    for host in hosts:
        host.mkdir(exist_ok=True)
    running = [programs.Program(*words, env={**environment(), **shared, **each}) for each in own]
    return [each.communicate() for each in running]


@pytest.mark.processes
@pytest.mark.long  # test_partners.py has the same of checkpoints alone
def test_a_lost_host_is_replaced_and_the_run_goes_on_from_what_its_partner_has(tmp_path: Path) -> None:
    """The oracle is the run that nothing has happened to, on one host and without local checkpoints."""
    (whole := tmp_path / "whole").mkdir()
    for done in programs.on_ranks(2, *command(whole, *STEPS, "train.steps=9", "plan=zero3")):
        assert done.returncode == 0, done.stderr
    (lossy := tmp_path / "lossy").mkdir()
    local = ["checkpoint.every=null", "checkpoint.local.folder=$DISK", "checkpoint.local.every=3"]
    words = command(lossy, *STEPS, "train.steps=9", "plan=zero3", *local)[2:]
    first, lost, other = (tmp_path / name for name in ("first", "lost", "other"))
    survivor, dead = on_hosts([first, lost], "-c", DIES, str(first), *words)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert survivor.returncode not in (0, None)
    assert "each host's own part and a copy of another's, until the run ends" in survivor.stdout
    shutil.rmtree(lost)
    for done in (back := on_hosts([first, other], "-c", DIES, str(first), *words)):
        assert done.returncode == 0, done.stderr
    assert re.search(r"resumed at step 6, from \$DISK/terrazzo-\d+-\w+/step-00000006", back[0].stdout), back[0].stdout
    assert curve(lossy) == curve(whole)
    assert weights(lossy) == weights(whole)
    assert not os.listdir(first) and not os.listdir(other), "the run has ended"
    (told,) = metrics(lossy, "partner")  # of the run that was lost: the other one has ended before it took a next one
    assert (told["copied"], told["bytes"] > 0, told["bytes_s"] > 0) == (3, True, True)


@pytest.mark.processes
def test_one_folder_of_several_hosts_and_a_partner_of_one_are_refused(tmp_path: Path) -> None:
    local = [f"checkpoint.local.folder={tmp_path}", "checkpoint.local.partner=required"]
    for done in on_hosts([tmp_path / "a", tmp_path / "a"], *command(tmp_path, *STEPS, *local)):
        assert done.returncode == 2, done.stderr
        assert re.search(r"partner is 'required', and all ranks see one '.*': there is one host", done.stderr), (
            done.stderr
        )
