"""The order of a pipeline is that in which torch's own schedules run."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import terrazzo as tz
from terrazzo.parallel.pipeline.schedules import Action, ActionKind, actions_of, balanced, forwards_of
from terrazzo.planner.layout.stages import in_flight
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.words import SCHEDULES


def run_by_torch(kind: type, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What torch's schedule of one stage for each rank asks of a stage that only notes it."""
    ran: list[Action] = []
    stage = MagicMock(
        num_stages=ranks,
        stage_index=rank,
        group_rank=rank,
        group_size=ranks,
        device=torch.device("cpu"),
        is_first=rank == 0,
        is_last=rank == ranks - 1,
        has_backward=True,
    )
    stage.forward_one_chunk.side_effect = lambda number, *_, **__: ran.append(Action(rank, ActionKind.FORWARD, number))
    stage.backward_one_chunk.side_effect = lambda number, *_, **__: ran.append(
        Action(rank, ActionKind.BACKWARD, number)
    )
    for ask in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ask).return_value = []
    schedule = kind(stage, micro_batches, loss_fn=None)
    schedule._initialize_stage = MagicMock()
    schedule._step_microbatches([()] * micro_batches, [None] * micro_batches, [{}] * micro_batches)
    return ran


@pytest.mark.parametrize(("name", "kind"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8)])
def test_one_stage_for_each_rank(name, kind, ranks, micro_batches):
    expected = [run_by_torch(kind, rank, ranks, micro_batches) for rank in range(ranks)]
    assert actions_of(name, ranks, 1, micro_batches) == expected


def interleaved_by_torch(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """What torch's schedule of several stages for each rank has this rank do."""
    torchs = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // (micro_batches // ranks),
    )
    return [
        Action(each.stage_index, ActionKind[each.computation_type.name.removeprefix("FULL_")], each.microbatch_index)
        for each in ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, rank)
        if each is not None
    ]


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 2), (2, 2, 6), (3, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaved(ranks, chunks, micro_batches):
    for rank, own in enumerate(actions_of("1f1b", ranks, chunks, micro_batches)):
        assert own == interleaved_by_torch(rank, ranks, chunks, micro_batches)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches"),
    [
        ("gpipe", 4, 1, 9),
        ("1f1b", 2, 1, 2),
        ("1f1b", 4, 1, 9),
        ("1f1b", 4, 2, 8),
        ("1f1b", 4, 3, 12),
        ("1f1b", 2, 3, 2),
    ],
)
def test_a_plan_counts_the_micro_batches_that_wait_in_torchs_order(schedule, ranks, chunks, micro_batches):
    """Those that have gone forward and not back, at their most, in parts of a rank's stages."""
    planned = SimpleNamespace(
        mesh=Mesh(pp=ranks),
        micro_batches=micro_batches,
        virtual_stages=chunks,
        pipeline=schedule,
        as_megatron=False,
    )
    for rank in range(ranks):
        if chunks > 1:
            ran = interleaved_by_torch(rank, ranks, chunks, micro_batches)
        else:
            kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
            ran = run_by_torch(kind, rank, ranks, micro_batches)
        waiting = itertools.accumulate(1 if each.kind is ActionKind.FORWARD else -1 for each in ran)
        assert in_flight(planned, rank) == pytest.approx(max(waiting) / chunks)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_plan_counts_what_waits_in_every_list_of_actions(schedule: str, chunks: int) -> None:
    """Until its backward, or where weights' gradients are put off until these."""
    ends = ActionKind.WEIGHT if schedule == "zero_bubble" else ActionKind.BACKWARD
    for ranks, micro_batches in itertools.product((2, 3, 4, 8), range(2, 26)):
        made = SimpleNamespace(
            mesh=Mesh(pp=ranks),
            micro_batches=micro_batches,
            virtual_stages=chunks,
            pipeline=schedule,
            as_megatron=False,
        )
        try:
            orders = actions_of(schedule, ranks, chunks, micro_batches)
        except tz.BadInput:
            continue
        for rank, order in enumerate(orders):
            steps = ({ActionKind.FORWARD: 1, ends: -1}.get(each.kind, 0) for each in order)
            assert in_flight(made, rank) == pytest.approx(max(itertools.accumulate(steps)) / chunks)


def test_stages_are_balanced_as_well_as_can_be_and_begin_early() -> None:
    """Against all cuts there are: the least of the highest cost, then for the last stage the earliest begin, and so on
    for what is before it.
    """
    generator = random.Random(1)

    def best(costs: list[int], stages: int) -> list[int]:
        if stages == 1:
            return [0]
        cuts = range(stages - 1, len(costs))
        worst = {cut: max(lowest(costs[:cut], stages - 1), sum(costs[cut:])) for cut in cuts}
        begin = min(cuts, key=lambda cut: (worst[cut], cut))
        return [*best(costs[:begin], stages - 1), begin]

    def lowest(costs: list[int], stages: int) -> int:
        ends = itertools.combinations(range(1, len(costs)), stages - 1)
        return min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in ends)

    for _ in range(200):
        costs = generator.choices([0, 0, 1, 2, 3, 7, 20], k=generator.randint(1, 8))
        stages = generator.randint(1, len(costs))
        assert balanced(costs, stages) == best(costs, stages), (costs, stages)


def test_without_backwards_each_micro_batch_goes_through_all_stages_before_the_next():
    assert [str(action.stage) + str(action.micro_batch) for action in forwards_of(2, 2, 2)[1]] == [
        *("10", "30", "11", "31")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 4, 1, 3), "3 micro-batches does not fill a pipeline of 4 ranks"),
        (("1f1b", 4, 2, 9), "rounds"),
        (("gpipe", 2, 2, 4), "one stage for each rank"),
        (("1f1c", 2, 1, 4), "Did you mean '1f1b'"),
        (("dualpipev", 2, 1, 4), "does not exist"),
        (("1f1b", 2, 0, 4), "chunks 0"),
    ],
)
def test_what_does_not_go_round_is_refused(arguments, message):
    with pytest.raises(tz.BadInput, match=message):
        actions_of(*arguments)


def steps_of(orders: list[list[Action]], lasts: dict[ActionKind, int]) -> int:
    """How long a step takes in which each rank runs its actions in their order, as soon as what they need is there."""
    ranks, ended, free = len(orders), dict[Action, int](), [0] * len(orders)
    waiting = [list(each) for each in orders]
    while any(waiting):
        for rank, own in enumerate(waiting):
            while own:
                stage, kind, number = own[0]
                needs = {
                    ActionKind.FORWARD: [Action(stage - 1, ActionKind.FORWARD, number)] * (stage > 0),
                    ActionKind.BACKWARD: [Action(stage + 1, ActionKind.BACKWARD, number)] * (stage < ranks - 1),
                    ActionKind.WEIGHT: [],
                }[kind]
                if not all(each in ended for each in needs):
                    break
                free[rank] = max([free[rank], *(ended[each] for each in needs)]) + lasts[kind]
                ended[own.pop(0)] = free[rank]
    return max(free)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8), (8, 24)])
def test_zero_bubble_waits_a_third_of_the_time_with_no_more_in_flight(ranks: int, micro_batches: int) -> None:
    """The bubble of ZB-H1 is (p - 1) (F + B - W), that of 1F1B (p - 1) (F + B + W): arXiv 2401.10241, table 2."""
    orders = actions_of("zero_bubble", ranks, 1, micro_batches)
    plain = steps_of(actions_of("1f1b", ranks, 1, micro_batches), {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2})
    busy = 3 * micro_batches
    assert plain == busy + 3 * (ranks - 1)
    assert steps_of(orders, dict.fromkeys(ActionKind, 1)) == busy + ranks - 1
    for rank, order in enumerate(orders):
        under_way = 0
        for stage, kind, _ in order:
            under_way += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 0, ActionKind.WEIGHT: -1}[kind]
            assert stage == rank and under_way <= ranks
        for kind in ActionKind:
            assert [each.micro_batch for each in order if each.kind is kind] == list(range(micro_batches))


def asked(actions: list[Action], stages: int) -> list[Action]:
    """What a rank asks for, in its order: each action's own, and that of the next one while it runs."""
    found: list[Action] = []
    ran: set[tuple[int, int]] = set()
    for action, following in itertools.zip_longest(actions, actions[1:]):
        for each in (action, following):
            if each is None or each in found or each.kind is ActionKind.WEIGHT:
                continue
            forward = each.kind is ActionKind.FORWARD
            comes = each.stage > 0 if forward else each.stage < stages - 1 and (each.stage, each.micro_batch) in ran
            if comes:
                found.append(each)
        if action.kind is ActionKind.FORWARD:
            ran.add((action.stage, action.micro_batch))
    return found


def sent(actions: list[Action], stages: int) -> list[Action]:
    """The actions of others that begin with what a rank sends, in the order in which it does."""
    ahead = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}
    found = [each._replace(stage=each.stage + ahead[each.kind]) for each in actions if each.kind in ahead]
    return [each for each in found if 0 <= each.stage < stages]


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("1f1b", 2), ("1f1b", 3)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 3])
def test_messages_of_a_route_are_asked_for_in_the_order_in_which_they_are_sent(schedule, chunks, ranks, rounds):
    """NCCL knows no tags."""
    stages = ranks * chunks
    actions = actions_of(schedule, ranks, chunks, ranks * rounds)
    for source, kind in itertools.product(range(ranks), (ActionKind.FORWARD, ActionKind.BACKWARD)):
        to = (source + (1 if kind is ActionKind.FORWARD else -1)) % ranks
        on_route = [each for each in sent(actions[source], stages) if each.kind is kind and each.stage % ranks == to]
        assert [each for each in asked(actions[to], stages) if each.kind is kind] == on_route
        assert on_route or chunks == 1
