"""An average of the weights, as a loop with `tz.EMA` keeps it: its memory, and what its update takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terrazzo.errors import BadInput
from terrazzo.planner import Estimate, Request, build_setup, estimate
from terrazzo.planner.choice.emit import train_config
from terrazzo.planner.timing.rates import memory_rate


def with_average(strategy: str, **options: Any) -> tuple[Estimate, Estimate]:
    """A run, and the same with a `tz.EMA`."""
    asked = Request("llama3-8b", 8, gpu="h100", strategy=strategy, host_memory_bytes=2e12, **options)
    return estimate(build_setup(asked)), estimate(build_setup(replace(asked, ema=True)))


@pytest.mark.parametrize(
    ("strategy", "precision", "like", "times"),
    [
        ("zero0", "bf16", "master", 1),
        ("zero1", "bf16", "master", 1),
        ("zero3", "bf16", "weights", 1),  # which are the master weights
        ("zero3", "bf16-pure,moments=int8,rounding=remainder", "weights", 2),
    ],
)
def test_an_average_of_the_weights_is_as_large_as_what_fp32_masters_take(
    strategy: str, precision: str, like: str, times: int
) -> None:
    plain, averaged = with_average(strategy, precision=precision, disk_bandwidth=1e10)
    states = {term.name: term.value for term in averaged.memory.terms}
    assert states["average"] == times * states[like]
    assert averaged.memory.allocated_bytes == plain.memory.allocated_bytes + states["average"]
    assert plain.time is not None and averaged.time is not None
    moved = 3 * states["average"] / memory_rate(plain.setup.cluster.device)  # read twice, and written
    assert averaged.time.step_s - plain.time.step_s == pytest.approx(moved)


@pytest.mark.parametrize("strategy", ["zero3@cpu", "zero3@nvme"])
def test_an_average_lies_on_the_host_where_masters_are_off_the_device_and_hides_nothing(strategy: str) -> None:
    plain, averaged = with_average(strategy, disk_bandwidth=1e10)
    host = {term.name: term.value for term in averaged.memory.host}
    assert host["average"] == pytest.approx(4 * 8.03e9 / 8, rel=1e-3)
    assert "average" not in {term.name for term in (*averaged.memory.terms, *averaged.memory.disk)}
    assert plain.time is not None and averaged.time is not None
    both = [next(term for term in each.time.terms if term.formula == "time.host") for each in (plain, averaged)]  # type: ignore[union-attr]
    assert both[0].inputs["hidden_s"] > 0 == both[1].inputs["hidden_s"]
    read = {term.name: term.value for term in averaged.traffic.collectives}.get("copy master weights from disk", 0)
    assert read == (host["average"] if "nvme" in strategy else 0)


def test_an_average_is_of_what_is_trained_and_not_of_16_bits() -> None:
    _, adapters = with_average("zero3", lora=8)
    (average,) = (term.value for term in adapters.memory.terms if term.name == "average")
    assert average == pytest.approx(4 * adapters.setup.model.trainable_numel / 8, rel=0.1)
    with pytest.raises(BadInput, match="would stand still"):
        with_average("zero3", precision="bf16-pure")
    with pytest.raises(BadInput, match="keeps no average"):
        train_config(with_average("zero3")[1].setup, "llama3-8b")
    bare = estimate(build_setup(Request(1e9, 4, strategy="zero1", precision="bf16", ema=True)))
    assert {term.name: term.value for term in bare.memory.terms}["average"] == 1e9
