"""Ranks that compute wrongly: named by what others make of the same micro-batch; nothing goes on from there."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo import checkpoint
from terrazzo.checkpoint import complete_checkpoints, latest, open_source
from terrazzo.config import config_from_dict
from terrazzo.engine import engine_of
from terrazzo.engine.buckets.weights.full import FullWeights
from terrazzo.engine.states import unit_snapshot
from terrazzo.engine.states.pieces import held_pieces
from terrazzo.errors import BadInput, Corrupted
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.train.data import Cursor
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.objectives import NextToken
from terrazzo.train.preflight import check
from terrazzo.train.session.build_session import open_session
from terrazzo.train.steps.disagreement import RankAnswer, finding_of
from terrazzo.train.steps.replay import Replay
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.helpers.threads import run_in_threads
from tests.train.test_run_edges import on_ranks_of_a_run
from tests.train.test_session import StopAfter, config_in

REAL = NextToken.loss_of
RIGHT = {0: ((1,), (2,)), 1: ((3,), (4,)), 2: ((5,), (6,))}
WRONG = ((7,), (8,))
ELSE = ((9,), (8,))


def answers(
    asked: Mapping[int, Sequence[int]], given: Mapping[tuple[int, int], Sequence[Any]] = {}
) -> list[RankAnswer]:
    """Of each rank to these micro-batches; right, but for what is `given` one after the other."""
    left = {key: iter(values) for key, values in given.items()}
    return [
        RankAnswer(rank, (of, 0), ("unit blocks.1", "the root unit"), next(left.get((rank, of), iter(())), RIGHT[of]))
        for rank, batches in asked.items()
        for of in batches
    ]


TWO = {0: (0, 1, 0, 1), 1: (1, 0, 1, 0)}
THREE = {0: (0, 2, 0, 2, 1), 1: (1, 0, 1, 0, 2), 2: (2, 1, 2, 1, 0)}


@pytest.mark.parametrize(
    ("asked", "given", "match"),
    [
        (
            THREE,
            {(1, of): [WRONG] * 2 for of in range(3)},
            r"^Rank 1 .* of unit blocks\.1 .* ranks 0, 2,.*: each",
        ),
        (THREE, {(1, 0): [WRONG]}, r"^Rank 1 computes the gradients.*: 1 of 5 times\.$"),
        (THREE, {(1, 0): [(RIGHT[0][0], (8,))]}, r"gradients of the root unit differently"),
        (TWO, {(1, 0): [WRONG]}, r"^Rank 1 computes .* from rank 0, .*: 1 of 4 times\.$"),
        (
            TWO,
            {(1, 0): [WRONG, ELSE]},
            r"^Rank 1 computed the gradients .* twice from one",
        ),
        (TWO, {(1, 0): [WRONG] * 2, (1, 1): [WRONG] * 2}, r"^Inconclusive: ranks 0, 1 compute"),
        ({0: (0, 0, 0)}, {(0, 0): [WRONG]}, r"^Rank 0 computed the gradients .* twice"),
    ],
)
def test_who_is_wrong(asked: Any, given: Any, match: str) -> None:
    assert finding_of(answers(asked)) is None
    finding = finding_of(answers(asked, given))
    assert finding is not None and not finding.of_kernels
    assert re.search(match, finding.text), finding.text


def test_where_most_ranks_do_not_repeat_themselves_no_machine_is_at_fault() -> None:
    given = {(rank, rank): [WRONG, ELSE] for rank in range(2)}
    finding = finding_of(answers(THREE, given))
    assert finding is not None and finding.of_kernels


def spoil(monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int, int], bool]) -> None:
    """The losses of a rank, by its number and that of the call."""
    calls = {rank: itertools.count(1) for rank in range(3)}

    def loss_of(*arguments: Any) -> Tensor:
        rank = dist.get_rank()
        return REAL(*arguments) * (1.25 if is_wrong(rank, next(calls[rank])) else 1.0)

    monkeypatch.setattr(NextToken, "loss_of", loss_of)


def config_of(folder: Path, ranks: int, replay: int | None, plan: str = "zero3", **more: dict[str, Any]) -> Any:
    guard = {"replay_every": replay, "memory_every": replay} | more.pop("guard_", {})
    batch = {"micro_batch": 1, "global_batch": 2 * ranks}
    return config_in(folder, plan={"name": plan}, batch=batch, guard=guard, **more)


def run(session: Any) -> str:
    """What the run ends with."""
    try:
        TrainingLoop(session, StopAfter(None)).run()
    except Corrupted as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("plan", mostly_long(["zero0", "zero3"], "zero3"))
def test_the_run_is_the_same_to_the_bit_with_and_without(two_processes: Pool, tmp_path: Path, plan: str) -> None:
    """Weights, moments, random generators and the place in the data."""
    found = []
    for replay in (None, 1):
        folder = tmp_path / str(replay)
        folder.mkdir()
        assert two_processes.run(run_of, config_of(folder, 2, replay, plan, train={"steps": 2})) == ["", ""]
        source = open_source(str(latest(folder / "run" / "checkpoints")))
        states = {
            (name, kind): source.read(name, kind, 0, state.numel)
            for name, info in source.tensors.items()
            for kind, state in info.states.items()
        }
        found.append((states, [source.ranks, source.extra["data"], source.extra["step"]]))
    (states, rest), (others, others_rest) = found
    assert states.keys() == others.keys() and all(torch.equal(states[key], others[key]) for key in states)
    assert rest == others_rest


def run_of(config: Any) -> str:
    random.seed(1)
    np.random.seed(1)
    with open_session(config, Ranks(dist.get_rank(), 2, torch.device("cpu"))) as session:
        return run(session)


def test_a_rank_that_computes_wrongly_is_named_and_what_was_saved_meanwhile_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 3 on: each step has two micro-batches, and the replays behind steps 1 and 2 had two each."""
    spoil(monkeypatch, lambda rank, call: rank == 1 and call > 8)
    config = config_of(tmp_path, 3, 2, train={"steps": 6}, guard_={"memory_every": None})
    said = on_ranks_of_a_run(3, config, run)
    assert len(set(said)) == 1
    assert re.search(
        r"In a replay behind step 4: Rank 1 computes the gradients of .* differently from ranks 0, 2, .*: each"
        r" time\..* 1 checkpoint saved since step 2, .* is put aside as suspect \(step-00000003\.suspect-.*\): a new"
        r" start goes on from '.*step-00000002', and",
        said[0],
    ), said[0]
    folder = tmp_path / "run" / "checkpoints"
    assert str(latest(folder)).endswith("/step-00000002")

    monkeypatch.setattr(NextToken, "loss_of", REAL)
    notes = on_ranks_of_a_run(3, config, lambda session: (session.step, session.notes))[0]
    assert notes[0] == 2
    assert any(re.search(r"resume: step-00000003\.suspect-\w+ in .* not used", note) for note in notes[1]), notes


def test_two_ranks_cannot_tell_which_of_them_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda rank, call: rank == 1)
    said = on_ranks_of_a_run(2, config_of(tmp_path, 2, 1, "zero0"), run)
    assert "Inconclusive: ranks 0, 1 compute" in said[0]
    assert "Nothing was saved so far" in said[0] and "begins anew" in said[0]


@pytest.mark.parametrize("known", [(True, True), (True, False)])
def test_pairs_without_a_reference_are_not_replayed(known: tuple[bool, bool]) -> None:
    """As behind the last step of DPO, where gradients would be NaN on all ranks alike, and nothing would be seen."""

    def body(rank: int) -> tuple[Any, list[float]]:
        def first_of(reader: int, cursor: Cursor | None = None) -> Any:
            value = 1.0 if known[reader] or cursor is not None else float("nan")
            return SimpleNamespace(reference=torch.full((1, 2), value), samples=1)

        session: Any = SimpleNamespace(
            config=config_from_dict({"objective": "dpo"}),
            loader=SimpleNamespace(first_of=first_of),
            share=SimpleNamespace(reader=rank, readers=2),
            step=1,
        )
        found = Replay(session)._known_from()
        return found, [first_of(reader, found).reference[0, 0].item() for reader in range(2)]

    assert run_in_threads(2, body) == [(None if all(known) else Cursor(), [1.0, 1.0])] * 2


def test_the_newest_checkpoint_that_is_known_to_be_right_is_never_pruned(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, 2, 4, train={"steps": 7}, checkpoint={"every": 1, "keep_last": 1}, guard_={"memory_every": None}
    )
    on_ranks_of_a_run(2, config, run)
    found = [Path(path).name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert found == ["step-00000004", "step-00000007"]
    assert checkpoint.suspect(tmp_path / "run" / "checkpoints", after=4)[0].startswith("step-00000007.suspect-")


def test_steps_behind_a_rollback_are_sure_once_all_has_been_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are compared every 100 steps, gradients every 30; at step 205 the run goes back to 160."""
    monkeypatch.setattr(Replay, "check", lambda self: None)
    config = config_of(tmp_path, 1, 30, train={"check_replicas_every": 100}, guard_={"memory_every": None})

    def work(session: Any) -> list[int | None]:
        trainer, sure = TrainingLoop(session, StopAfter(None)), list[int | None]()
        for step in (100, 180, 200, 160, 180, 200):
            went_back = step < session.step
            session.progress.step = step
            if went_back:
                trainer.went_back()
            else:
                trainer.checks.after_step()
            sure.append(session.checkpoints.sure_step)
        trainer.report.leave()
        return sure

    assert on_ranks_of_a_run(1, config, work) == [[0, 100, 180, 160, 160, 180]]


def test_what_is_said_to_be_saved_is_there_once_others_are_put_aside(tmp_path: Path) -> None:
    """All was right up to step 4, of which there is no checkpoint."""

    def work(session: Any) -> tuple[list[str], int]:
        for step in (2, 5):
            session.progress.step = step
            session.save()
        session.checkpoints.sure_step = 4
        return session.checkpoints.suspect(), session.checkpoints.saved_step

    ((names, saved),) = on_ranks_of_a_run(1, config_in(tmp_path), work)
    assert [name.partition(".")[0] for name in names] == ["step-00000005"]
    assert saved == 2


def test_what_cannot_be_replayed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"guard\.replay_every is 1, and plan\.mesh\.pp 2"):
        config_in(tmp_path, plan={"mesh": {"pp": 2}}, guard={"replay_every": 1}, model={"layers": 2})
    offload = config_in(tmp_path, offload={"optim": "cpu"}, guard={"memory_every": 1})
    with pytest.raises(BadInput, match=r"guard\.memory_every is 1, and offload\.optim 'cpu'"):
        check(offload, 2)


def flip(bits: Tensor) -> None:
    bits.view(torch.int32)[3] ^= 1 << 7


@pytest.mark.parametrize("state", ["weight", "exp_avg_sq"])
def test_a_bit_that_flips_between_two_updates_is_found_under_zero3(tmp_path: Path, state: str) -> None:
    """The run looks at the unit of step 3 alone; the bit flips while the update before is over."""
    config = config_in(tmp_path, batch={"micro_batch": 1}, guard={"memory_every": 3})

    def work(session: Any) -> str:
        engine, trainer = engine_of(session.model), TrainingLoop(session, StopAfter(None))
        assert engine.plan.name == "zero3"
        begin = trainer.checks.begin_step

        def then_flip() -> None:
            begin()
            if session.step == 2 and session.ranks.rank == 1:
                pieces = held_pieces(engine.units[1 % len(engine.units)].buckets, engine.drivers.stepping())
                flip(next(each for each in pieces if each.kind == state).tensor)

        trainer.checks.begin_step = then_flip  # type: ignore[method-assign]
        with pytest.raises(Corrupted) as caught:
            trainer.run()
        return str(caught.value)

    said = on_ranks_of_a_run(2, config, work)
    assert said[0] == said[1]
    assert re.search(rf"between the updates of steps 2 and 3, in .*, of rank 1: [\w.]+, {state}\.", said[0]), said[0]
    assert "2 checkpoints saved so far" in said[0]


def test_weights_that_a_rank_has_gathered_otherwise_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FullWeights.install

    def install(full: FullWeights) -> None:
        fresh = not full.present
        real(full)
        if fresh and dist.get_rank() == 2 and full.space.layout.slots[0].name.startswith("embedding"):
            flip(full.data)

    monkeypatch.setattr(FullWeights, "install", install)
    said = on_ranks_of_a_run(3, config_of(tmp_path, 3, None, guard_={"memory_every": 1}), run)
    # The block's turn is step 1.
    assert "In step 2 rank 2 computed with other weights of the root unit than 2 other ranks" in said[0]


@pytest.mark.parametrize(
    ("mesh", "ranks"), mostly_long([({"ep": 2}, 2), ({"ep": 2}, 4), ({"tp": 2}, 2), ({"pp": 2}, 2)], ({"ep": 2}, 2))
)
def test_ranks_that_have_other_weights_by_the_mesh_are_not_compared(
    mesh: dict[str, int], ranks: int, tmp_path: Path
) -> None:
    plan = {"name": "zero3", "mesh": mesh}
    experts = {"model": {"experts": {"count": 4}}} if "ep" in mesh else {}
    batch = {"global_batch": 4}  # a micro-batch for each of two stages
    config = config_in(tmp_path, plan=plan, batch=batch, train={"steps": 3}, guard={"memory_every": 1}, **experts)
    assert on_ranks_of_a_run(ranks, config, run) == [""] * ranks


def test_experts_that_a_rank_has_gathered_otherwise_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FullWeights.install

    def install(full: FullWeights) -> None:
        fresh = not full.present
        real(full)
        if fresh and dist.get_rank() == 2 and "experts" in full.space.layout.slots[0].name:
            flip(full.data)

    monkeypatch.setattr(FullWeights, "install", install)
    plan, experts = {"name": "zero3", "mesh": {"ep": 2}}, {"experts": {"count": 4}}
    config = config_in(tmp_path, plan=plan, train={"steps": 3}, guard={"memory_every": 1}, model=experts)
    said = on_ranks_of_a_run(4, config, run)
    assert "In step 1 ranks 0, 2 computed with other weights of unit 'blocks.0' than each other" in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_every_bit_counts_in_what_stands_for_a_state(dtype: torch.dtype, start: int) -> None:
    """At the edges too, which do not fill eight bytes."""
    part = torch.arange(20).to(dtype)[start : start + 11]
    before, raw = unit_snapshot._sum(part), part.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert unit_snapshot._sum(part) != before
            raw[place] ^= 1 << bit
    assert unit_snapshot._sum(part) == before
