"""The table of plans, the texts of places, and the prefix rule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.engine.plan.place import OFFLOADS, PLANS, Place, Plan
from terrazzo.errors import BadInput

S, R = "dp_shard", "dp_replicate"
ONE = (S,)
BOTH = (R, S)  # as init_device_mesh names them: outermost first

# The table of the design, written out: weight, between, grad, optim.
ON_ONE_AXIS = {
    "zero0": ((), (), (), ()),
    "ddp": ((), (), (), ()),
    "no_shard": ((), (), (), ()),
    "zero1": ((), (), (), (S,)),
    "zero2": ((), (), (S,), (S,)),
    "zero3": ((S,), (S,), (S,), (S,)),
    "full_shard": ((S,), (S,), (S,), (S,)),
    "shard_grad_op": ((S,), (), (S,), (S,)),
}
ON_TWO_AXES = {
    "zero0": ((), (), (), ()),
    "ddp": ((), (), (), ()),
    "no_shard": ((), (), (), ()),
    "zero1": ((), (), (), (S, R)),
    "zero2": ((), (), (S, R), (S, R)),
    "zero3": ((S, R), (S, R), (S, R), (S, R)),
    "full_shard": ((S, R), (S, R), (S, R), (S, R)),
    "shard_grad_op": ((S, R), (), (S, R), (S, R)),
    "hybrid_shard": ((S,), (S,), (S,), (S,)),
    "hybrid_shard_zero2": ((S,), (), (S,), (S,)),
    "hfsdp": ((S,), (S,), (S,), (S, R)),
    "hpz": ((S, R), (S,), (S, R), (S, R)),
}


def _axes(plan: Plan) -> tuple[tuple[str, ...], ...]:
    return (plan.weight.axes, plan.between.axes, plan.grad.axes, plan.optim.axes)


@pytest.mark.parametrize("name", ON_ONE_AXIS)
def test_presets_on_one_axis(name: str) -> None:
    assert _axes(Plan.named(name).resolve(ONE)) == ON_ONE_AXIS[name]


@pytest.mark.parametrize("name", ON_TWO_AXES)
def test_presets_on_two_axes(name: str) -> None:
    assert _axes(Plan.named(name).resolve(BOTH)) == ON_TWO_AXES[name]


def test_every_preset_is_in_the_tables_of_this_test() -> None:
    assert set(PLANS) == set(ON_TWO_AXES)


def test_data_axes_are_cut_innermost_first() -> None:
    assert Plan.named("zero3").resolve((R, S, "cp")).weight.axes == (S, "cp", R)


def test_axes_as_a_text_are_refused() -> None:
    with pytest.raises(BadInput, match=r"axes are a tuple of names. Write tz.Place.parse\('dp_shard'\)"):
        Place("dp_shard")  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", [("-",), ("S", "-"), ("D", "D"), (S, S), ("",)])
def test_axes_that_no_text_says_are_refused(axes: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=r"tz\.Place: axes are \(.*give names, each once, or \(\) for a whole copy"):
        Place(axes)


def test_names_ignore_case_and_dashes() -> None:
    assert Plan.named("Full-Shard").weight == Plan.named("full_shard").weight
    assert Plan.named("HYBRID-SHARD").name == "hybrid_shard"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("-", Place()),
        ("D", Place(("D",))),
        ("S,R", Place(("S", "R"))),
        (" S , R ", Place(("S", "R"))),
        ("dp_shard", Place(("dp_shard",))),
        ("D@cpu", Place(("D",), "cpu")),
        ("-@nvme", Place((), "nvme")),
    ],
)
def test_texts_of_places(text: str, place: Place) -> None:
    assert Place.parse(text) == place


@pytest.mark.parametrize("text", ["", " ", "D@", "D@ ", "@cpu", "S,-", "-,-", "D,,S", "S,", "D,D"])
def test_texts_that_leave_something_out_are_no_places(text: str) -> None:
    with pytest.raises(BadInput, match=r"is no place of a state\. Write the axes"):
        Place.parse(text)
    with pytest.raises(BadInput, match=r"is no place of a state\. Write the axes"):
        Plan(text, "-", "-", "D")


AXES = st.lists(st.sampled_from(["S", "R", "D", S, R, "cp"]), max_size=3, unique=True)


@given(AXES, st.sampled_from(["device", "cpu", "nvme"]))
def test_a_place_is_parsed_from_its_own_text(axes: list[str], tier: str) -> None:
    place = Place(tuple(axes), tier)
    assert Place.parse(str(place)) == place


def test_a_name_may_give_the_share_of_the_units_that_is_offloaded() -> None:
    plan = Plan.named("Zero3@NVMe_all:0.5")
    assert plan == Plan("D@nvme:0.5", "D", "D@cpu:0.5", "D@nvme:0.5", name="zero3@nvme-all:0.5")
    assert plan.base == "zero3"
    for share in ("", "x", "1.5", "0.5:1"):
        with pytest.raises(
            BadInput, match=f"plan zero3@cpu:{share}: grad: .* is not a number from 0 to 1. Write one of"
        ):
            Plan.named(f"zero3@cpu:{share}").resolve([S])


def test_a_plan_reads_as_its_row() -> None:
    assert str(Plan.named("hpz")) == "hpz: weight S,R | between S | grad S,R | optim S,R"
    assert str(Plan.named("zero1")) == "zero1: weight - | between - | grad - | optim D"


def test_a_custom_plan_takes_texts_or_places() -> None:
    plan = Plan(weight="S", between=Place(("S",)), grad="S", optim="S,R")
    assert plan.name == "custom"
    assert _axes(plan.resolve(BOTH)) == ON_TWO_AXES["hfsdp"]


def test_plans_are_values() -> None:
    assert Plan.named("zero3") == Plan("D", "D", "D", "D", name="zero3")
    assert hash(Plan.named("zero3")) == hash(Plan("D", "D", "D", "D", name="zero3"))
    with pytest.raises(AttributeError):
        Plan.named("zero3").name = "other"  # type: ignore[misc]


PLACES = [(), (S,), (R,), (S, R), (R, S)]


@pytest.mark.parametrize("optim", PLACES)
def test_the_prefix_rule_over_every_combination(optim: tuple[str, ...]) -> None:
    for weight, between, grad in itertools.product(PLACES, repeat=3):
        allowed = optim[: len(weight)] == weight and optim[: len(grad)] == grad and weight[: len(between)] == between
        rows = (weight, between, grad, optim)
        plan = Plan(*(Place(axes) for axes in rows))
        if allowed:
            assert _axes(plan.resolve(BOTH)) == rows
        else:
            with pytest.raises(BadInput, match="prefix"):
                plan.resolve(BOTH)


def test_a_broken_prefix_names_both_states_and_the_fix() -> None:
    with pytest.raises(BadInput) as caught:
        Plan(weight="R", between="R", grad="S", optim="S,R", name="mine").resolve(BOTH)
    text = str(caught.value)
    assert all(part in text for part in ("mine", "weight", "dp_replicate", "optim", "dp_shard,dp_replicate"))


@pytest.mark.parametrize(("wrong", "meant"), [("zero4", "zero"), ("zeor3", "zero3"), ("fullshard", "full_shard")])
def test_an_unknown_plan_names_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"no plan '{wrong}'.*Did you mean '{meant}"):
        Plan.named(wrong)


@pytest.mark.parametrize("name", ["hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz"])
def test_a_two_axis_plan_on_one_axis_says_which_mesh_it_needs(name: str) -> None:
    with pytest.raises(BadInput, match=r"dp_replicate and dp_shard.*init_device_mesh"):
        Plan.named(name).resolve(ONE)


@pytest.mark.parametrize(
    "plan",
    [Plan.named("hybrid_shard").on(optim="cpu", name="mine"), Plan("S", "-", "S", "S"), Plan("-", "-", "-", "S,R")],
)
def test_the_row_decides_which_mesh_a_plan_needs(plan: Plan) -> None:
    assert plan.groups
    with pytest.raises(BadInput, match=r"dp_replicate and dp_shard.*splits over D"):
        plan.resolve(ONE)
    assert plan.resolve(("dp_replicate", "dp_shard")).places().keys() == plan.places().keys()


def test_the_name_does_not_decide_which_mesh_a_plan_needs() -> None:
    for plan in (Plan("D", "D", "D", "D", name="hybrid_shard"), Plan(*["dp_shard"] * 4, name="hpz")):
        assert not plan.groups
        assert plan.resolve(ONE).places() == Plan.named("zero3").resolve(ONE).places()


def test_an_absent_axis_is_named() -> None:
    with pytest.raises(BadInput, match="dp_replicate"):
        Plan("R", "R", "R", "R").resolve(ONE)
    with pytest.raises(BadInput, match="tensor"):
        Plan("tensor", "tensor", "tensor", "tensor").resolve(ONE)


@pytest.mark.parametrize(
    ("tier", "word"),
    [
        ("disk", "one of device, cpu, nvme"),
        ("cpuu", "does not exist. Did you mean 'cpu'"),
        ("cpu:0.7,cpu:0.1", "twice"),
        ("cpu:1.5", "from 0 to 1"),
        ("cpu:nan", "from 0 to 1"),
        ("cpu:", "from 0 to 1"),
        ("cpu:0.7,nvme:0.7", "more than all"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tier: str, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        Plan("D", "D", "D", f"D@{tier}").resolve(ONE)


@pytest.mark.parametrize(
    ("tier", "shares"),
    [
        ("device", {"device": 1.0}),
        ("cpu", {"cpu": 1.0}),
        ("cpu:0.75", {"device": 0.25, "cpu": 0.75}),
        ("cpu:0.75,device:0.25", {"device": 0.25, "cpu": 0.75}),
        ("nvme:0.5,cpu:0.25", {"device": 0.25, "cpu": 0.25, "nvme": 0.5}),
        ("cpu:0", {"device": 1.0}),
    ],
)
def test_shares_of_a_tier(tier: str, shares: dict[str, float]) -> None:
    assert Place(("D",), tier).shares == shares


@given(units=st.integers(1, 200), host=st.floats(0, 1, allow_nan=False), files=st.floats(0, 1, allow_nan=False))
def test_units_get_their_tiers_in_order_and_by_their_shares(units: int, host: float, files: float) -> None:
    host, files = round(host * (1 - files), 6), round(files, 6)
    place = Place(("D",), f"cpu:{host},nvme:{files}")
    tiers = [place.tier_of(index, units) for index in range(units)]
    assert tiers == sorted(tiers, key=["device", "cpu", "nvme"].index)
    for tier, share in place.shares.items():
        assert abs(tiers.count(tier) - share * units) <= 1.001


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_preset_with_an_offload_is_the_preset_on_other_tiers(offload: str) -> None:
    plan = Plan.named(f"Zero3@{offload}")
    assert plan.name == f"zero3@{offload}"
    assert {state: place.tier for state, place in plan.places().items() if place.offloaded} == OFFLOADS[offload]
    assert _axes(plan) == _axes(Plan.named("zero3"))


def test_a_share_of_nothing_is_no_offload() -> None:
    assert not Place.parse("D@cpu:0").offloaded
    assert not Place.parse("D@nvme:0,cpu:0.0").offloaded
    assert Place.parse("D@nvme:0,cpu:0.1").offloaded
    assert not any(place.offloaded for place in Plan.named("zero3@nvme:0").places().values())


def test_an_unknown_offload_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"'nvme-al'.*nvme-all"):
        Plan.named("zero3@nvme-al")


@pytest.mark.parametrize(
    ("plan", "tiers", "name"),
    [
        ("zero3@cpu", {"grad": "device", "optim": "device"}, "zero3"),
        ("zero3", {"grad": "cpu", "optim": "cpu"}, "zero3@cpu"),
        ("ddp@cpu", {"grad": "cpu:0.5", "optim": "cpu:0.5"}, "ddp@cpu:0.5"),
        ("zero3@cpu", {"weight": "cpu"}, "zero3@cpu-all"),
        ("zero3@cpu", {"optim": "nvme"}, "zero3@nvme"),
        ("zero3", {"weight": "cpu"}, "custom"),
        ("zero3@cpu:0.5", {"grad": "cpu"}, "custom"),
    ],
)
def test_a_plan_on_other_tiers_has_the_name_of_these(plan: str, tiers: dict[str, str], name: str) -> None:
    assert Plan.named(plan).on(**tiers).name == name
    assert Plan("S", "-", "S", "S", name="mine").on(**tiers).name == "mine"
