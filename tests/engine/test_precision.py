"""Presets, the free choice of six dtypes, and the settings of loss scaling."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from terrazzo.engine.precision import PRECISIONS, LossScaling, Precision
from terrazzo.errors import BadInput

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
    others = {f.name for f in dataclasses.fields(precision)} - {field, "loss_scaling"}
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
    with pytest.raises(BadInput, match=r"no precision 'bf16_pure'.*Did you mean 'bf16-pure'"):
        Precision.named("bf16_pure")


@pytest.mark.parametrize(
    "factor", [{"init": 1000.0}, {"growth": 3.0}, {"backoff": 0.3}, {"init": 0.0}, {"init": -2.0}, {"minimum": 3.0}]
)
def test_loss_scaling_factors_are_powers_of_two(factor: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="powers of two"):
        LossScaling(**factor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting", [{"growth": 0.5}, {"backoff": 2.0}, {"interval": 0}, {"hysteresis": 0}, {"minimum": 0.0}]
)
def test_loss_scaling_settings_that_cannot_work(setting: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="cannot work"):
        LossScaling(**setting)
