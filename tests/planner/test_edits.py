"""What does not fit: the true blocker is named, and the edits that are listed were planned and fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from terrazzo.planner import Request, build_setup, estimate
from terrazzo.planner.api import ask
from terrazzo.planner.choice.edits import times_text
from terrazzo.planner.choice.request_changes import narrower_names
from terrazzo.planner.report.estimates import Edit

H100 = Request("llama3-8b", 8, gpu="h100", strategy="zero3", sequence=8192)


def changed(request: Request, options: str) -> Request:
    """The request with options of the command line, which are read here apart from the code that wrote them."""
    words = options.split()
    fields = {"--ac": "checkpointing", "--micro-batch": "micro_batch", "--gpus": "gpus", "--loss": "loss"}
    fields |= {"--precision": "precision", "--tp": "tp", "--cp": "cp"}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag == "--offload":
            assert request.plan is not None
            request = replace(request, strategy=f"{request.plan.name.partition('@')[0]}@{value}")
        else:
            request = replace(request, **{fields[flag]: int(value) if value.isdigit() else value})
    return request


CASES = {
    "activations": replace(H100, micro_batch=2),
    "too large batch": replace(H100, micro_batch=16, checkpointing="full"),
    "states": replace(H100, model="llama3-70b", checkpointing="full"),
    "activations and logits": replace(H100, sequence=100000),
    "one card": replace(H100, gpus=1, gpu="rtx4090", sequence=2048),
    "a layer": replace(H100, model="llama3-405b", gpus=512, sequence=4096),
    "host memory": replace(H100, model="llama3-70b", strategy="zero3@cpu", host_memory_bytes=600e9, sequence=2048),
}


@pytest.mark.parametrize("name", CASES)
def test_every_edit_that_is_listed_fits_and_costs_what_it_says(name: str) -> None:
    found = ask(CASES[name]).best
    assert found.memory.fits is False
    assert 1 <= len(found.edits) <= 4
    for edit in found.edits:
        if "without" in edit.options:
            continue
        again = estimate(build_setup(changed(CASES[name], edit.options)))
        assert again.memory.fits
        assert again.memory.rooms == edit.estimate.memory.rooms
        _check_cost(edit, found.time and found.time.tokens_per_s_per_gpu)


def _check_cost(edit: Edit, before: float | None) -> None:
    after = edit.estimate.time
    if before and after and abs(after.tokens_per_s_per_gpu / before - 1) > 0.01:
        assert f"{after.tokens_per_s_per_gpu / before - 1:+.0%}" in edit.cost
    if "--gpus" in edit.options:
        assert "times the GPUs" in edit.cost
    if "--offload cpu" in edit.options:
        assert "GiB of host memory on each host" in edit.cost


@pytest.mark.parametrize("name", CASES)
def test_what_surely_fits_comes_first_then_the_fastest_and_more_gpus_last(name: str) -> None:
    edits = ask(CASES[name]).best.edits
    more = ["--gpus" in edit.options for edit in edits]
    assert more == sorted(more)
    keys = [
        (not edit.estimate.memory.fits_surely, -edit.estimate.time.tokens_per_s_per_gpu)
        for edit in edits
        if edit.estimate.time and not {"--gpus", "--precision"} & {*edit.options.split()}
    ]
    assert keys == sorted(keys)


def test_a_smaller_micro_batch_and_offload_are_among_the_edits() -> None:
    kinds = {edit.options.split()[0] for case in CASES.values() for edit in ask(case).best.edits}
    assert {"--ac", "--micro-batch", "--gpus", "--offload"} <= kinds
    assert ask(CASES["a layer"]).best.edits[0].options == "--ac full --tp 2"  # at hand as whole layers are 27 GiB


def test_a_batch_that_fits_only_at_once_is_offered_so() -> None:
    """Two micro-batches or more add up whole gradients, 30 GiB of 8 B parameters in fp32."""
    asked = replace(H100, gpus=16, gpu="a100-sxm4-40gb", strategy="zero1", sequence=1024, global_batch=64)
    options = [edit.options for edit in ask(replace(asked, checkpointing="full")).best.edits]
    assert "--micro-batch 4" in options


def test_more_gpus_with_layers_in_parts_are_offered_where_more_alone_do_not_surely_fit() -> None:
    asked = Request("llama3-405b", 8, gpu="h100", sequence=2048)
    more = [edit for edit in ask(asked).best.edits if "--gpus" in edit.options]
    assert [edit.estimate.memory.fits_surely for edit in more] == [False, True]
    options, found = more[1].options, more[1].estimate.setup
    assert options == f"--parallel --gpus {found.cluster.count}" and found.mesh.tp > 1
    sizing = ask(replace(asked, gpus=None), fewest=True).sizing
    assert sizing is not None and sizing.gpus is None and sizing.parallel is not None
    assert f"With --parallel {sizing.parallel} is the first that runs." in str(sizing)
    assert ask(replace(asked, gpus=sizing.parallel, parallel=True)).best.memory.fits_surely


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("activations", "in the way: activations, "),
        ("states", "which has 79.1 GiB: 32.9 GiB weights, 31.1 GiB gradients, 65.7 GiB optimizer moments"),
        ("host memory", "in the way: optimizer moments of its 8 ranks, 525.7 GiB on each host's memory, which has"),
    ],
)
def test_the_blocker_is_the_place_that_lacks_and_what_fills_it(case: str, said: str) -> None:
    found = ask(CASES[case]).best
    text = str(found)
    assert said in text, text.splitlines()[:4]
    assert text.splitlines()[1].startswith("in the way: ")


def test_on_a_cpu_offloaded_states_fill_the_same_memory() -> None:
    """8.03 B parameters: 4 bytes of weights and of gradients, 8 of moments; and what comes from the host."""
    asked = Request("llama3-8b", 1, gpu="cpu", strategy="zero3@cpu", sequence=128, memory_bytes=32e9, precision="fp32")
    line = str(ask(asked).best).splitlines()[1]
    assert line.startswith("in the way: model states alone, ")
    assert "which has 29.8 GiB: " in line
    assert "59.8 GiB optimizer moments" in line
    assert "activations" not in line


def test_a_search_that_finds_nothing_says_what_a_wider_one_finds() -> None:
    found = ask(Request("llama3-70b", 8, gpu="h100", sequence=4096, host_memory_bytes=2e12)).best
    assert found.memory.fits is False
    options = [edit.options for edit in found.edits]
    assert options[0] == "--offload any"
    assert options[-1] == "--gpus 32"
    assert all(edit.estimate.memory.fits for edit in found.edits)


def test_a_loss_without_all_logits_is_offered_to_a_search_as_to_a_plan() -> None:
    """16,384 tokens of 128,256 logits of 12 bytes each are 23.5 GiB beside 18.4 of states of 1.24 B parameters."""
    asked = Request("llama3.2-1b", 1, gpu="a100-40gb", sequence=16384, parallel=True)
    edit = next(edit for edit in ask(asked).best.edits if edit.options == "--loss chunked")
    assert edit.estimate.memory.fits and edit.estimate.setup.loss == "chunked"
    assert ask(replace(asked, loss="chunked")).best.memory.fits


def test_what_fits_has_neither_blocker_nor_edits() -> None:
    found = ask(replace(H100, checkpointing="full")).best
    assert not found.edits
    assert "in the way" not in str(found)


def test_states_in_fewer_bits_are_offered_where_they_are_the_faster_way() -> None:
    """8.03 B parameters: 16 bytes each exceed 80 GB, and 2 + 2 + 2 with 2 of moments and their scales do not."""
    one = Request("llama3-8b", 1, gpu="h100", strategy="zero0", checkpointing="full", micro_batch=1)
    by_options = {edit.options: edit for edit in ask(one).best.edits}
    rounded = by_options["--precision bf16-pure,moments=int8,rounding=remainder"]
    assert rounded.estimate.memory.fits_surely and "moments in int8, gradients in bf16" in rounded.cost
    states = sum(term.value for term in rounded.estimate.memory.terms if term.name in ("weights", "master", "moments"))
    assert states == pytest.approx(8.03e9 * (2 + 2 + 2 * (1 + 4 / 256)), rel=0.01)
    eight = Request("llama3-8b", 8, gpu="h100", strategy="zero3", micro_batch=8)
    assert not any("--precision" in edit.options for edit in ask(eight).best.edits)


@pytest.mark.parametrize(
    ("own", "narrower"),
    [
        ("bf16", ["bf16,moments=int8", "bf16-pure,moments=int8,rounding=remainder"]),
        ("bf16,moments=int8", ["bf16-pure,moments=int8,rounding=remainder"]),
        ("bf16-pure", ["bf16-pure,moments=int8", "bf16-pure,moments=int8,rounding=remainder"]),
        ("bf16,moments=fp8", ["bf16-pure,moments=fp8,rounding=remainder"]),
        ("fp8", ["fp8,moments=int8", "fp8,reduce=bf16,accumulate=bf16,master=bf16,moments=int8,rounding=remainder"]),
        (
            "bf16,gather=int8",
            ["bf16,moments=int8,gather=int8", "bf16-pure,moments=int8,rounding=remainder,gather=int8"],
        ),
        ("bf16-pure,moments=int8,rounding=remainder", []),
        ("fp16", ["fp16,moments=int8"]),
        ("fp32", []),
    ],
)
def test_states_in_fewer_bits_are_offered_of_every_precision_that_computes_in_16(own: str, narrower: list[str]) -> None:
    setup = build_setup(Request("llama3-8b", 8, gpu="h100", strategy="zero3", precision=own))
    names = narrower_names(setup)
    assert list(names) == narrower
    for name in names:
        assert build_setup(Request("llama3-8b", 8, gpu="h100", strategy="zero3", precision=name)).matmul == setup.matmul


def test_long_sequences_are_offered_in_parts_beside_layers() -> None:
    """1 M tokens: 131,072 on each of eight ranks along cp."""
    asked = Request("llama3.1-8b", 64, gpu="h100-sxm", strategy="zero3", sequence=2**20)
    edits = {edit.options: edit for edit in ask(asked).best.edits}
    (options,) = (options for options in edits if "--cp" in options and "--gpus" not in options)
    assert edits[options].estimate.memory.fits_surely
    again = estimate(build_setup(changed(asked, options))).memory
    assert again.fits_surely and again.rooms == edits[options].estimate.memory.rooms
    kept = ask(replace(asked, cp=1, tp=1)).best
    assert not any("--cp" in edit.options or "--tp" in edit.options for edit in kept.edits)
    if not kept.edits:
        assert "--parallel" in kept.notes[0]


def test_parts_are_said_as_people_say_them() -> None:
    said = [times_text(factor, "the GPUs") for factor in (4, 1.5, 0.5, 0.125, 0.3)]
    assert said == [
        "4 times the GPUs",
        "1.5 times the GPUs",
        "half the GPUs",
        "an eighth of the GPUs",
        "0.3 of the GPUs",
    ]
