"""Presets, the free choice of six dtypes, and the settings of loss scaling."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import yaml

from terrazzo.config import config_from_dict
from terrazzo.dialects.core.dialect import NO_CONTEXT
from terrazzo.dialects.formats.terrazzo.read import read
from terrazzo.engine.plan.precision import PRECISIONS, LossScaling, Precision
from terrazzo.errors import BadInput
from terrazzo.planner.setup.choice_names import precision as planned
from terrazzo.words import PRECISION_SPELLINGS

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [  #           weight compute reduce accumulate master moments
        ("fp32", (F32, F32, F32, F32, F32, F32)),
        ("bf16", (B16, B16, F32, F32, F32, F32)),
        ("bf16-pure", (B16, B16, B16, B16, B16, B16)),
        ("fp16", (F16, F16, F32, F32, F32, F32)),
    ],
)
def test_presets(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    p = Precision.named(name)
    assert (p.weight, p.compute, p.reduce, p.accumulate, p.master, p.moments) == dtypes
    assert (p.loss_scaling is not None) == (name == "fp16")


def test_there_are_no_other_presets() -> None:
    assert set(PRECISIONS) == {"fp32", "bf16", "bf16-pure", "fp16"}


@pytest.mark.parametrize("field", ["weight", "compute", "reduce", "accumulate", "master", "moments"])
@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", B16), ("bfloat16", B16), ("fp16", F16), ("fp32", F32), ("fp64", torch.float64), (B16, B16)],
)
def test_every_dtype_is_chosen_by_name_or_value(field: str, given: Any, dtype: torch.dtype) -> None:
    precision = Precision(**{field: given})
    assert getattr(precision, field) == dtype
    unset = {"loss_scaling", "rounding", "frozen", "gather", "quantized_reduce", "error_feedback"}
    others = {f.name for f in dataclasses.fields(precision)} - {field, *unset}
    assert {getattr(precision, other) for other in others} == {F32}


def test_every_dtype_is_printed() -> None:
    assert str(Precision.named("bf16")) == (
        "weight bfloat16, compute bfloat16, reduce float32, accumulate float32, master float32, moments float32"
    )
    assert "loss scale from 65536" in str(Precision.named("fp16"))


def test_no_dtype_can_be_left_to_a_default_of_none() -> None:
    with pytest.raises(BadInput, match="reduce is None"):
        Precision(reduce=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf61", torch.int32, torch.complex64, 16])
def test_a_wrong_dtype_names_the_field_and_the_choices(dtype: Any) -> None:
    with pytest.raises(BadInput, match=r"compute is .*fp32, bf16, fp16, fp64"):
        Precision(compute=dtype)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"no precision 'bf16-pur'.*Did you mean 'bf16-pure'"):
        Precision.named("bf16-pur")


SPELLINGS = {
    "fp32": ["fp32", "float32", torch.float32, "torch.float32", "FP32", "32", "32-true"],
    "bf16": ["bf16", "bfloat16", torch.bfloat16, "BFloat16", "bf16-mixed", "bf16_mixed", "amp_bf16"],
    "bf16-pure": ["bf16-pure", "bf16_pure", "bf16-true"],
    "fp16": ["fp16", "float16", torch.float16, "half", "fp16-mixed", "16-mixed", "amp_fp16"],
}


@pytest.mark.parametrize("preset", PRECISIONS)
def test_every_usual_spelling_is_taken_everywhere(preset: str) -> None:
    """By `tz.shard` and the integrations (`Precision.named`), configurations, the planner and Terrazzo's dialect."""
    for spelling in SPELLINGS[preset]:
        assert Precision.named(spelling) is PRECISIONS[preset]
        assert config_from_dict({"precision": str(spelling)}).precision.name == preset
        assert planned(str(spelling)) == planned(preset)
    meant = read({"precision": preset}, NO_CONTEXT).description["precision.master"].value
    for spelling in PRECISION_SPELLINGS[preset]:
        assert read({"precision": spelling}, NO_CONTEXT).description["precision.master"].value == meant


@pytest.mark.parametrize(
    ("word", "why"), [(16, "say 'bf16' or 'fp16'"), ("mixed", "either of two"), ("16-true", "say 'fp16'"),
                      (torch.float64, 'tz.Precision(*["fp64"] * 6)'), ("double", "float64"), ("tf32", "say 'fp32'")],
)  # fmt: skip
def test_what_may_mean_several_is_refused_by_name(word: Any, why: str) -> None:
    for ask in (Precision.named, lambda word: config_from_dict({"precision": word}), lambda word: planned(str(word))):
        with pytest.raises(BadInput, match=re.escape(str(word))) as caught:
            ask(str(word) if isinstance(word, torch.dtype) else word)
        assert why in str(caught.value)
        if "in a configuration by precision: " in str(caught.value):
            states = yaml.safe_load(str(caught.value).partition("by precision: ")[2].partition(", in Python")[0])
            given = config_from_dict({"precision": states}).precision
            assert [getattr(given, state) for state in states] == ["fp64"] * 6


def test_dtypes_of_states_have_all_their_names() -> None:
    given = config_from_dict({"precision": {"name": "float32", "reduce": "bfloat16", "moments": "torch.float16"}})
    assert (given.precision.reduce, given.precision.moments) == ("bf16", "fp16")
    assert Precision(reduce="torch.bfloat16").reduce is torch.bfloat16  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "factor", [{"init": 1000.0}, {"growth": 3.0}, {"backoff": 0.3}, {"init": 0.0}, {"init": -2.0}, {"minimum": 3.0}]
)
def test_loss_scaling_factors_are_powers_of_two(factor: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="powers of two"):
        LossScaling(**factor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting",
    [
        {"growth": 0.5},
        {"growth": True},
        {"growth": "2"},
        {"backoff": 2.0},
        {"interval": 0},
        {"interval": True},
        {"interval": 2.0},
        {"hysteresis": 0},
        {"minimum": 0.0},
        {"init": 1.0, "minimum": 2.0},
    ],
)
def test_loss_scaling_settings_that_cannot_work(setting: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="cannot work"):
        LossScaling(**setting)


def test_loss_scaling_is_settings_or_none() -> None:
    with pytest.raises(BadInput, match=r"loss_scaling is True.*tz\.LossScaling\(\)"):
        Precision("fp16", "fp16", loss_scaling=True)  # type: ignore[arg-type]
