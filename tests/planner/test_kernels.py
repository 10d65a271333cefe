"""What a device or a model lets run: formats of products, and attention whose scores have a soft cap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from terrazzo.errors import BadInput
from terrazzo.planner import Request, build_setup, estimate, search
from terrazzo.planner.api import ask
from terrazzo.planner.machine.devices import Device, device

BEFORE_AMPERE = ["V100", "V100-SXM2-16GB", "T4"]


@pytest.mark.parametrize("gpu", BEFORE_AMPERE)
def test_before_ampere_fp16_is_chosen_and_said(gpu: str) -> None:
    found = ask(Request("llama3.2-1b", 8, gpu=gpu, strategy="zero3", sequence=512)).best
    assert found.setup.precision.compute == torch.float16
    assert found.setup.matmul == "fp16"
    assert found.setup.precision.loss_scaling is not None
    assert any("no bf16" in note and "fp16" in note and "fp32" in note for note in found.notes)
    assert not any("bf16" in str(finding) for finding in found.findings)
    assert "fp16 (--precision)" in str(found)


def test_bf16_that_is_asked_for_there_is_warned_of_with_the_edit() -> None:
    found = ask(Request("llama3.2-1b", 8, gpu="V100", strategy="zero3", sequence=512, precision="bf16")).best
    (finding,) = [each for each in found.findings if "bf16" in str(each)]
    assert "Use precision fp16" in str(finding)


def test_a_search_there_plans_fp16_too() -> None:
    found = search(Request("llama3.2-1b", 8, gpu="V100", sequence=512))
    assert {each.setup.matmul for each in found.ranked} == {"fp16"}


@pytest.mark.parametrize("gpu", ["A100", "H100", "MI300X", "RTX4090"])
def test_from_ampere_on_bf16_is_chosen(gpu: str) -> None:
    assert build_setup(Request("llama3.2-1b", 8, gpu=gpu)).matmul == "bf16"


def test_a_capability_decides_for_a_device_that_nobody_knows() -> None:
    assert Device("RTX 2080", capability=7.5).lacks("bf16")
    assert not Device("RTX 6090", capability=12.0).lacks("bf16")
    assert not Device("Zorg").lacks("bf16")
    assert device("V100").capability == 7.0


def test_a_given_peak_makes_no_bf16_units() -> None:
    assert build_setup(Request("llama3.2-1b", 8, gpu="V100", peak_flops=1e14)).matmul == "fp16"


# -- soft caps ---------------------------------------------------------------------------------------------------------

GEMMA = Request("gemma2-9b", 8, gpu="h100", strategy="zero3", sequence=4096)


def test_capped_scores_are_kept_unless_a_kernel_with_a_cap_is_named() -> None:
    eager = ask(GEMMA).best
    assert eager.setup.attention == "math"
    assert any("eagerly" in note and "all scores" in note for note in eager.notes)
    flash = estimate(build_setup(replace(GEMMA, attention="flash")))
    scores = 42 * 16 * 4096**2 * 8  # layers x heads x scores x (tanh and softmax in 16 bits, softmax in fp32)
    grown = eager.memory.allocated_bytes - flash.memory.allocated_bytes
    assert grown == pytest.approx(scores, rel=0.05)
    assert eager.time is not None
    assert flash.time is not None
    assert eager.time.step_s > 1.1 * flash.time.step_s


def test_what_a_run_does_is_not_refused_and_the_other_is() -> None:
    """A run in transformers computes them eagerly."""
    assert not [each for each in ask(GEMMA).best.findings if each.severity != "warn"]
    named = ask(Request("gemma2-9b", 8, strategy="zero3", attention="flash")).best
    assert any("eagerly" in str(each) for each in named.findings if each.severity == "planned")


@pytest.mark.parametrize("kernel", ["cudnn", "triton"])
def test_kernels_without_a_cap_are_refused(kernel: str) -> None:
    with pytest.raises(BadInput, match=r"has no soft cap.*flash or flash3"):
        build_setup(Request("gemma2-9b", 8, gpu="h100", attention=kernel))  # type: ignore[arg-type]


@pytest.mark.parametrize(("preset", "capped"), [("gemma2-2b", True), ("gemma-2b", False), ("gemma3-1b", False)])
def test_which_models_cap_their_scores(preset: str, capped: bool) -> None:
    assert build_setup(Request(preset, 8)).model.soft_caps is capped


def test_a_cap_that_is_switched_off_counts_as_none() -> None:
    from terrazzo.planner.model.presets import PRESETS

    values = {**PRESETS["gemma2-2b"], "attn_logit_softcapping": None, "final_logit_softcapping": None}
    setup = build_setup(Request(values, 8))
    assert not setup.model.soft_caps
    assert not setup.model.capped
    with pytest.raises(BadInput, match="attn_logit_softcapping is 'x'"):
        build_setup(Request({**values, "attn_logit_softcapping": "x"}, 8))
