"""Checkpoints at their edges: a save behind another, pruning beside damage, no right to write, and a long run."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint import step_path
from terrazzo.checkpoint.saving import background as saver_module
from terrazzo.errors import BadInput, SaveFailed
from tests.checkpoint import faults
from tests.checkpoint.faults import Call, Tap, tapped_for_all
from tests.checkpoint.subject import Witness, build, differences, fast_folder, one_rank, put, save, state_of
from tests.checkpoint.test_crash_saver import Forked, forked  # noqa: F401
from tests.engine.offload.test_soak import resident_bytes
from tests.helpers.fake import fake_group
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.alone


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


def test_a_second_background_save_waits_for_the_first(root: Path, forked: Forked) -> None:  # noqa: F811
    def body(rank: int) -> None:
        forked(faults.harmless)
        witness = Witness(root, range(1, 4))
        with checkpoint.Saver(witness.model, witness.optimizer) as saver:
            for step in (1, 2, 3):
                put(witness.model, witness.optimizer, step)
                saver.save(step_path(root, step), {"step": step})
                assert checkpoint.complete_checkpoints(root)[: step - 1] == [step_path(root, n) for n in range(1, step)]
        assert witness.sees() == [1, 2, 3]

    run_in_threads(1, body)


def test_a_writer_leaves_signals_to_the_run(root: Path, forked: Forked) -> None:  # noqa: F811
    """Ctrl-C, a queue's SIGTERM and a closed terminal's SIGHUP reach every process of a job."""

    def body(rank: int) -> None:
        forked(faults.paused_after({3}, lambda: time.sleep(0.3)))
        witness = Witness(root, range(1, 2))
        put(witness.model, witness.optimizer, 1)
        with checkpoint.Saver(witness.model, witness.optimizer) as saver:
            saver.save(step_path(root, 1), {"step": 1})
            while not list(root.glob(".*/rank-*")):
                time.sleep(0.001)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(saver._writer._process.pid, number)
        assert witness.sees() == [1]

    run_in_threads(1, body)


def test_pruning_beside_a_damaged_newest_keeps_the_newest_whole_one(root: Path) -> None:
    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        for step in (1, 2, 3):
            save(root, step)
        (Path(step_path(root, 3)) / "manifest.sha256").write_text("")
        assert checkpoint.prune(root, keep_last=1) == ["step-00000001"]
        witness.loads(2)

    run_in_threads(1, body)


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_an_error_of_the_disk_names_the_file(root: Path, code: int) -> None:
    def work(witness: Witness, attempt: Any) -> None:
        for name in ("open", "posix_fallocate", "write", "fsync"):

            def fault(call: Call, real: faults.Real, name: str = name) -> Any:
                if call.name == name and call.changes and call.path.endswith("rank-00000.safetensors"):
                    raise OSError(code, os.strerror(code), *(() if call.descriptor is not None else (call.path,)))
                return real()

            with Tap(root, fault), pytest.raises(SaveFailed, match=rf"{os.strerror(code)}.*rank-00000\.safetensors"):
                attempt()
            assert witness.sees() == [1]

    one_rank(root, work)


def test_a_whole_checkpoint_in_a_model_without_an_optimizer_gives_its_weights(root: Path) -> None:
    def body(rank: int) -> None:
        save(root, 1)
        expected, _ = build(1)
        model, _ = build(5)
        with tz.gathered(expected) as wanted:
            values = {name: value.detach().clone() for name, value in wanted.items()}
        checkpoint.load(step_path(root, 1), model, None)
        with tz.gathered(model) as found:
            assert all(torch.equal(value, values[name]) for name, value in found.items())

    run_in_threads(1, body)


def test_weights_alone_do_not_pass_for_a_run(root: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = build(1)
        checkpoint.save(step_path(root, 1), model, None)
        put(model, optimizer, 5)
        before = state_of(model, optimizer)
        with pytest.raises(BadInput, match="holds no optimizer state"):
            checkpoint.load(step_path(root, 1), model, optimizer)
        assert differences(state_of(model, optimizer), before) == []

    run_in_threads(1, body)


def test_loading_changes_nothing_on_the_disk(root: Path) -> None:
    """So that a folder that cannot be written to can be loaded from."""

    def read_only(call: Call, real: faults.Real) -> Any:
        if call.changes and call.name != "close":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), call.path)
        return real()

    def body(rank: int) -> None:
        witness = Witness(root, range(1, 3))
        for step in (1, 2):
            save(root, step)
        put(witness.model, witness.optimizer, 9)
        with tapped_for_all(root, read_only):
            resumed = checkpoint.load_newest(root, witness.model, witness.optimizer)
        assert resumed is not None and resumed.path == step_path(root, 2)
        assert differences(state_of(witness.model, witness.optimizer), witness.expected[2]) == []

    run_in_threads(2, body)


def test_a_copy_for_which_there_is_no_memory_is_a_failed_save(
    root: Path,
    forked: Forked,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.posix_fallocate

    def body(rank: int) -> None:
        forked(faults.harmless)
        witness = Witness(root, range(1, 4))
        with checkpoint.Saver(witness.model, witness.optimizer) as saver:

            def refused(descriptor: int, offset: int, length: int) -> None:
                if descriptor == saver._staging.descriptor:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                real(descriptor, offset, length)

            with monkeypatch.context() as patch:
                patch.setattr(saver_module.os, "posix_fallocate", refused)
                with pytest.raises(SaveFailed, match="No space left"):
                    saver.save(step_path(root, 1), {"step": 1})
            assert witness.sees() == []
            put(witness.model, witness.optimizer, 2)
            saver.save(step_path(root, 2), {"step": 2})
        assert witness.sees() == [2]

    run_in_threads(1, body)


def test_fifty_saves_between_steps_leave_everything_flat(root: Path) -> None:
    """150 steps; 1000 in the long form, with `TERRAZZO_FAULTS`."""
    x, every = torch.randn(4, 8), 20 if faults.DENSITY > 1 else 3
    with fake_group(1):
        model = nn.Sequential(nn.Linear(8, 80), nn.Tanh(), nn.Linear(80, 64))
        model, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters()), "zero3", units=[nn.Linear])
        seen = []
        for step in range(1, 50 * every + 1):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0:
                checkpoint.save(step_path(root, step), model, optimizer, {"step": step})
                checkpoint.prune(root, keep_last=2)
            if step in (25 * every, 50 * every):
                seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()))
    (threads, descriptors, resident), last = seen
    assert last[:2] == (threads, descriptors)
    assert last[2] - resident < 4 * 2**20
    assert len(os.listdir(root)) == 2
