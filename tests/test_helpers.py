"""The helpers themselves, with plain torch collectives."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import rewrite
from torch.distributed.device_mesh import init_device_mesh

from terrazzo.engine.comm.collectives import MessageRoute
from terrazzo.engine.comm.failed_exchanges import MeshGroups
from terrazzo.engine.comm.links import Links
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from tests.helpers import processes, programs, suite
from tests.helpers.cover import cover, in_turns, places, turn_of
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool, RankFailed, run_in_processes
from tests.helpers.rewritten import make_a_part, make_ahead
from tests.helpers.threaded import ThreadedCollectives
from tests.helpers.threads import RanksStuck, exclusive, run_in_threads


def _sum_of_ranks() -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_threads_are_ranks(world_size: int) -> None:
    results = run_in_threads(world_size, lambda rank: (rank, dist.get_rank(), _sum_of_ranks()))
    assert results == [(r, r, float(sum(range(world_size)))) for r in range(world_size)]
    assert not dist.is_initialized()


def test_threads_with_a_mesh_of_two_axes() -> None:
    def sums(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        found = []
        for axis in ("dp_replicate", "dp_shard"):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=mesh.get_group(axis))
            found.append(tensor.item())
        return found[0], found[1]

    # Ranks 0 and 1 are one shard group, 0 and 2 one replica group.
    assert run_in_threads(4, sums) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


def test_collectives_from_backward_hooks_in_threads() -> None:
    def gradient(rank: int) -> float:
        with exclusive():
            torch.manual_seed(0)
            layer = torch.nn.Linear(3, 1)
        weight = layer.weight
        weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        layer(torch.full((1, 3), float(rank + 1))).sum().backward()
        assert weight.grad is not None
        return weight.grad.sum().item()

    assert run_in_threads(2, gradient) == [9.0, 9.0]


def test_a_failing_thread_is_raised_as_itself_and_frees_the_others() -> None:
    def fail_on_one(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank one says no")
        dist.barrier()

    with pytest.raises(ValueError, match="rank one says no") as caught:
        run_in_threads(3, fail_on_one)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert "fail_on_one" in {entry.name for entry in caught.traceback}
    assert run_in_threads(3, lambda rank: _sum_of_ranks()) == [3.0] * 3


def test_a_thread_that_waits_for_a_message_ends_with_the_one_that_fails() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            raise ZeroDivisionError
        links = ThreadedCollectives(Links(dist.group.WORLD, dist.group.WORLD, "pp", MeshGroups()), Traffic(), Ledger())
        links.receive(torch.empty(2), MessageRoute("value", 0, 1), 0).wait()

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        run_in_threads(2, body)
    assert threading.active_count() == before


def test_threads_that_wait_forever_are_named() -> None:
    def one_stays_away(rank: int) -> None:
        if rank != 2:
            dist.barrier()

    with pytest.raises(RanksStuck, match=r"ranks \[0, 1\] of 3"):
        run_in_threads(3, one_stays_away, timeout_s=0.5)
    assert run_in_threads(2, lambda rank: _sum_of_ranks()) == [1.0, 1.0]


@pytest.mark.parametrize("world_size", [2, 8, 1024])
def test_the_fake_group_has_any_size(world_size: int) -> None:
    with fake_group(world_size, rank=1):
        assert (dist.get_rank(), dist.get_world_size()) == (1, world_size)
        dist.all_to_all_single(torch.empty(world_size * 4), torch.ones(world_size * 4))
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert mesh["dp_shard"].size() == world_size // 2
    assert not dist.is_initialized()


def _environment() -> tuple[int, str, int]:
    return os.getpid(), os.environ["RANK"], torch.get_num_threads()


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _exit_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    time.sleep(60)


@pytest.mark.processes
def test_a_pool_serves_many_functions(two_processes: Pool) -> None:
    first = two_processes.run(_environment)
    assert [(rank, threads) for _, rank, threads in first] == [("0", 1), ("1", 1)]
    assert len({pid for pid, _, _ in first} | {os.getpid()}) == 3
    assert two_processes.run(_sum_of_ranks) == [1.0, 1.0]
    assert two_processes.run(_environment) == first


@pytest.mark.processes
def test_workers_and_ranks_are_forks_of_one_server(two_processes: Pool, request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("no worker of xdist's runs this")
    assert two_processes.run(os.getppid) == [os.getppid()] * 2


class _Node:
    """A worker that is told what to run, and has run it at once."""

    shutting_down = False
    gateway = SimpleNamespace(id="gw0")

    def __init__(self) -> None:
        self.told: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_worker_gets_files_and_groups_whole_and_fillers_last(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "xdist" not in sys.modules:
        pytest.skip("no xdist")
    from tests.helpers.handed_out import Files

    named = ["config/test_a.py::test[0]", "config/test_a.py::test[1]", "engine/test_b.py::test"]
    named += [f"engine/test_c.py::test_{number}" for number in range(9)] + ["cli/test_d.py::test[a@b]"]
    named += ["engine/test_c.py::test@g", "engine/test_e.py::test@g", "cli/test_f.py::test@test_f.py"]
    tests = [f"tests/{name}" for name in named]
    monkeypatch.setattr(pytestconfig.option, "tx", ["2*popen"])
    scheduler, nodes = Files(pytestconfig), [_Node(), _Node()]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    busy, free = nodes
    assert busy.told == [13, 14, *range(3, 12)]
    assert free.told[:2] == [15, 2]
    for done in range(5):
        scheduler.mark_test_complete(free, free.told[done])
    assert free.told[2:] == [12, 0, 1]
    assert free.shutting_down


@pytest.mark.processes
def test_a_failing_process_shows_the_first_traceback() -> None:
    with Pool(2) as pool:
        with pytest.raises(RankFailed, match=r"(?s)rank 1 failed first:.*_raise_on_rank_one.*rank one says no"):
            pool.run(_raise_on_rank_one)
        assert pool.run(_sum_of_ranks) == [1.0, 1.0]


def _say(what: str, fails: bool) -> None:
    os.write(2, what.encode())
    if fails:
        print("on the other stream")
        raise ValueError("it fails")


@pytest.mark.processes
def test_what_ranks_print_is_shown_where_a_function_fails() -> None:
    with Pool(1) as pool:
        pool.run(_say, "of one that does not fail", False)
        with pytest.raises(
            RankFailed, match="it fails\n\nrank 0 said:\nof one that does\non the other stream"
        ) as failed:
            pool.run(_say, "of one that does\n", True)
        assert "does not fail" not in str(failed.value)


@pytest.mark.processes
def test_an_interrupted_run_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(deadline: float, grace_s: float) -> None:
        raise KeyboardInterrupt

    with Pool(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_collect", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.run(str, "late")
        assert pool.run(str, "next") == ["next"]


@pytest.mark.processes
def test_pools_end_with_the_group_of_their_tests_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def item(group: str | None) -> Any:
        marker = None if group is None else pytest.mark.xdist_group(group).mark
        config = SimpleNamespace(workerinput={})
        return SimpleNamespace(path=Path(), config=config, get_closest_marker=lambda name: marker)

    with Pool(1) as pool:
        (first,) = pool.run(os.getpid)
        monkeypatch.setattr(processes, "_running", {pool})  # those of other tests stay
        suite.pytest_runtest_teardown(item("a"), item("a"))
        assert pool.run(os.getpid) == [first]
        suite.pytest_runtest_teardown(item("a"), item(None))
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert pool.run(os.getpid) != [first]


def test_a_dead_process_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 0 failed first:\nthe process ended with exit code 7"):
        run_in_processes(2, _exit_on_rank_zero)


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_cover_meets_all_that_the_grid_meets(strength: int) -> None:
    grid = [
        dict(zip("abc", case, strict=True)) for case in itertools.product(range(5), range(4), range(3)) if sum(case)
    ]
    chosen = [grid[index] for index in cover(grid, strength)]
    for axes in itertools.combinations("abc", strength):
        wanted = {tuple(case[axis] for axis in axes) for case in grid}
        assert {tuple(case[axis] for axis in axes) for case in chosen} == wanted
    assert len(chosen) <= {1: 5, 2: 22, 3: 59}[strength]
    assert cover(grid, strength) == cover(grid, strength)


def test_a_grid_of_one_axis_is_its_own_cover() -> None:
    assert cover([{"a": value} for value in "xyz"]) == [0, 1, 2]
    assert cover([{"a": value} for value in "xyx"]) == [0, 1]


def test_what_a_test_leaves_to_others_some_other_takes() -> None:
    taken = [turn_of(f"test_{number}", [2, 5, 7, 9], 2) for number in range(20)]
    assert {*map(tuple, taken)} == {(2, 7), (5, 9)}
    assert turn_of("test_0", [4], 2) == turn_of("test_1", [4], 2) == [4], "a test without cases"


def test_of_cases_in_turns_each_has_one_value_that_is_not_long() -> None:
    cases = in_turns((("a",), ("b",), ("c",)), [1, 2])
    assert len(cases) == 6
    assert [case.values for case in cases if not case.marks] == [("a", 1), ("b", 2), ("c", 1)]


def test_workers_rewrite_a_part_of_the_modules_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    config, kept = request.config, []
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("VALUE = 1\ndef test_it():\n    assert VALUE == 1\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    for number in range(2):
        worker = {"workerid": f"gw{number}", "workercount": 2}
        monkeypatch.setattr(config, "workerinput", worker, raising=False)
        make_a_part(config, tmp_path)
        kept.append(len(list(tmp_path.glob("__pycache__/*"))))
    assert kept == [2, 3]
    monkeypatch.setattr(rewrite, "_rewrite_test", None)  # nothing is left to do
    hook = rewrite.AssertionRewritingHook(config)
    for name in "abc":
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"test_{name}.py", loader=hook)
        assert spec is not None
        hook.exec_module(module := importlib.util.module_from_spec(spec))
        assert module.VALUE == 1


def test_a_module_is_rewritten_ahead_where_it_is_another_than_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path, taken, rewrites = tmp_path / "test_it.py", [], rewrite._rewrite_test

    def counted(path: Path, config: pytest.Config) -> Any:
        taken.append(path.read_text())
        return rewrites(path, config)

    monkeypatch.setattr(rewrite, "_rewrite_test", counted)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    for source, second in (("1", 7), ("1", 7), ("10", 7), ("20", 7), ("20", 8)):
        path.write_text(source)
        os.utime(path, (second, second))
        make_ahead(request.config, tmp_path).join()
    assert taken == ["1", "10", "20"], "as pytest itself does, by size and second"


def test_plans_are_told_apart_by_their_places() -> None:
    assert places("zero2") == {"weight": "-", "between": "-", "grad": "D", "optim": "D"}
    assert places("zero2@cpu")["optim"] == "D@cpu"


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_program_has_arguments_environment_folder_and_outputs_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(sys.argv[1:], __name__, os.environ['A'], os.getcwd())\n1 / 0"
    )
    environment = {**os.environ, "A": "b"}
    for words in (["script.py"], ["-m", "script"], ["-c", (tmp_path / "script.py").read_text()]):
        done = programs.run(*words, "x", cwd=tmp_path, env=environment)
        assert done.stdout == f"['x'] __main__ b {tmp_path}\n"
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
        assert done.returncode == 1
    assert programs.run("-c", "import sys; sys.exit(75)").returncode == 75
    assert programs.run("-c", "import os; os.kill(os.getpid(), 9)").returncode == -9
    with pytest.raises(subprocess.TimeoutExpired) as late:
        programs.run("-c", "import time; print('begun', flush=True); time.sleep(60)", timeout_s=4.0)
    assert late.value.output == "begun\n"


@pytest.mark.processes
def test_programs_on_ranks_meet() -> None:
    code = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print(dist.get_rank())"
    ranks = programs.on_ranks(2, "-c", code)
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "0\n"), (0, "1\n")]
