"""What the engine's other tests say of a user's loop holds on every tier: they are run again with states elsewhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine import test_at_rest as at_rest
from tests.engine import test_lifecycle as lifecycle
from tests.engine import test_state as state
from tests.engine import test_unused as unused
from tests.engine.offload.runs import SMALL_BLOCK, TIERS
from tests.helpers.fake import fake_group

PLACES = [("cpu-all", "overlapped"), ("all on nvme", "overlapped"), ("shares", "backward"), ("nvme", "synchronous")]


def each(test: Callable[..., None], **choices: Any) -> list[tuple[str, Callable[[], None], bool]]:
    """A test with every combination of arguments; whether one of these is there already."""
    found = []
    for values in itertools.product(*choices.values()):
        shown = "-".join(getattr(value, "__name__", str(value)) for value in values)
        arguments = dict(zip(choices, values, strict=True))
        name = f"{test.__name__.removeprefix('test_')}-{shown}"
        found.append((name, functools.partial(test, **arguments), len(found) > 0))
    return found


BEHAVIOURS = [
    *each(lifecycle.test_evaluation_before_between_and_after_training, plan=["zero0", "hpz"], mode=[torch.no_grad]),
    *each(lifecycle.test_evaluation_between_forward_and_backward),
    *each(lifecycle.test_a_forward_whose_backward_never_comes, plan=["zero1", "zero3"]),
    *each(lifecycle.test_a_pass_that_raises_is_retried, plan=["zero1", "zero3"], where=["forward", "backward"]),
    *each(lifecycle.test_an_exception_leaves_the_parameters_at_rest),
    *each(lifecycle.test_units_in_any_order_and_number, plan=["zero2"], kind=[lifecycle.Twice, lifecycle.TwiceInARow]),
    *each(lifecycle.test_units_in_any_order_and_number, plan=["hpz"], kind=[lifecycle.Wandering, lifecycle.Backwards]),
    *each(lifecycle.test_a_changed_order_costs_no_correctness_at_any_prefetch, prefetch=[0, 3]),
    *each(lifecycle.test_two_forwards_before_two_backwards),
    *each(lifecycle.test_two_forwards_before_one_backward, plan=["shard_grad_op"]),
    *each(lifecycle.test_two_backwards_before_a_step_add_up, plan=["zero1", "zero3"]),
    *each(lifecycle.test_backward_through_a_retained_graph_twice),
    *each(lifecycle.test_a_unit_called_directly),
    *each(lifecycle.test_outputs_may_be_structures, plan=["zero1"], form=["tuple", "dataclass"]),
    *each(lifecycle.test_the_ledger_returns_to_zero_after_each_step),
    *each(unused.test_parameters_out_of_use_on_all_ranks_are_left_alone, plan=["zero1"], schedule=unused.SCHEDULES),
    *each(unused.test_parameters_out_of_use_on_all_ranks_are_left_alone, plan=["zero3"], schedule=["in turn"]),
    *each(unused.test_units_skipped_on_some_ranks_only, plan=["zero0", "zero3", "hfsdp"]),
    *each(unused.test_ranks_that_run_different_units_in_evaluation, plan=["zero3"]),
    *each(unused.test_a_unit_used_only_in_an_earlier_micro_batch_is_updated, plan=["zero0", "zero3"]),
    *each(unused.test_a_step_without_gradients_changes_nothing, plan=["zero1"]),
    *each(unused.test_zero_grad, set_to_none=[True, False], by_model=[True, False]),
    *each(unused.test_an_unused_root_parameter_and_an_unused_unit),
    *each(at_rest.test_gathered_gives_every_value_under_every_name, plan=["zero0", "zero3"]),
    *each(at_rest.test_written_values_are_kept_and_trained_on, plan=["zero0", "zero2", "hpz"]),
    *each(at_rest.test_without_write_changes_are_refused_where_weights_are_split, plan=["zero3"]),
    *each(at_rest.test_masters_are_replaced_only_where_a_value_changed, plan=["zero1", "zero3"]),
    *each(at_rest.test_a_forward_inside_gathered_works_and_values_rest_again_after),
    *each(at_rest.test_an_exception_inside_gathered_writes_nothing),
    *each(state.test_pieces_of_all_ranks_are_the_whole_state, plan=["zero1", "hfsdp"]),
    *each(state.test_state_travels_between_plans_and_world_sizes_bit_for_bit, precision=["fp32", "bf16"]),
    *each(state.test_a_restored_run_continues_bit_for_bit, plan=["zero0", "zero3", "hfsdp"]),
    *each(state.test_parameters_without_state_are_restored_to_having_none),
    *each(state.test_tied_and_frozen_parameters_come_once_under_their_first_name),
    *each(state.test_a_full_state_dict_is_loaded, plan=["zero0", "zero3"], wrap=[dict, state.Lazy]),
    *each(state.test_a_state_dict_inside_gathered_is_a_plain_one),
]
MET_ELSEWHERE = (
    "state_travels_between_plans",  # test_checkpoints: any tier loads what any other saved
    "a_restored_run_continues",  # the same
    "pieces_of_all_ranks",  # test_checkpoints: all tiers save the same
    "units_in_any_order_and_number-zero2",  # under hpz, here
    "parameters_out_of_use_on_all_ranks_are_left_alone-zero1",  # under zero3, here
)
"""What is long, since another test of the tiers has it."""
NOT_IN_BACKWARD = (  # gradients that come late, or after an update that cannot be taken back
    "a_pass_that_raises_is_retried-zero1-backward",
    "a_pass_that_raises_is_retried-zero3-backward",
    "units_in_any_order_and_number-hpz-Wandering",
    "a_changed_order",
    "two_forwards_before",
    "two_backwards_before",
    "backward_through_a_retained_graph",
)


def place_of(number: int, name: str) -> tuple[str, str]:
    """Each of the places in turn."""
    chosen = PLACES[number % len(PLACES)]
    return PLACES[0] if chosen[1] == "backward" and name.startswith(NOT_IN_BACKWARD) else chosen


CASES = [
    pytest.param(
        behaviour,
        *place_of(number, name),
        id="-".join((name, *place_of(number, name))),
        marks=[pytest.mark.long] if more or name.startswith(MET_ELSEWHERE) else [],
    )
    for number, (name, behaviour, more) in enumerate(BEHAVIOURS)
]


@pytest.mark.parametrize(("behaviour", "tiers", "mode"), CASES)
def test_elsewhere(
    behaviour: Callable[[], None], tiers: str, mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, made = tz.shard, []

    def placed(model: Any, optimizer: Any = None, plan: str = "zero3", **options: Any) -> Any:
        offload = tz.Offload(path=tmp_path, step=mode, block_mib=SMALL_BLOCK, depth=2, direct=False)
        made.append(tz.Plan.named(plan).on(**TIERS[tiers]))
        return shard(model, optimizer, made[-1], offload=offload.used_under(made[-1]), **options)

    monkeypatch.setattr(tz, "shard", placed)
    behaviour()
    assert made, "the test makes its models in another way"


def test_states_in_files_are_keys_as_others_are(tmp_path: Path) -> None:
    with fake_group(2):
        options = {"offload": tz.Offload(path=tmp_path), "precision": tz.Precision(weight=torch.bfloat16)}
        model, _ = tz.shard(nn.Linear(4, 4), None, "zero3@nvme-all", **options)
        (bucket,) = engine_of(model).buckets()
        held = {bucket.master: "master", bucket.weight: "weight"}
        assert [held[bucket.master], held[bucket.weight]] == ["master", "weight"]
        engine_of(model).close()
