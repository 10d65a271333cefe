"""Impossible input is refused, with the numbers and the edit that fixes it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from terrazzo.config.sections.precision import PrecisionConfig
from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.planner.api import plan
from terrazzo.planner.assemble import estimate
from terrazzo.planner.figures import TimeFigures
from terrazzo.planner.machine.devices import Cluster
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.words import precision_name
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.choice_names import PRECISION_KEYS, PRECISION_PRESETS, precision, strategy
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.step import time_of
from terrazzo.planner.traffic.volumes import traffic_of
from terrazzo.words import DTYPE_FIELDS


def setup_of(model: Any = "llama3-8b", gpus: int | str | None = 16, **options: Any) -> Setup:
    setup = build_setup(Request(model, gpus, **{"gpu": "h100", **options}))
    check(setup)
    return setup


def test_a_plain_request_passes_and_its_defaults_are_the_documented_ones() -> None:
    setup = setup_of()
    assert (setup.plan, setup.mesh) == (Plan.named("zero3"), Mesh(dp_shard=16))
    assert (setup.sequence, setup.micro_batch, setup.micro_batches) == (4096, 1, 1)
    assert (setup.matmul, setup.optimizer.name, setup.checkpointing) == ("bf16", "adamw", "none")
    assert setup_of("gpt2-1.5b").sequence == 1024
    assert setup_of(7e9).sequence == 0
    assert setup_of(pp=2, tp=2).micro_batches == 16


def test_axes_multiply_to_the_number_of_gpus() -> None:
    setup = setup_of(gpus=128, tp=4, pp=2, cp=2)
    assert setup.mesh == Mesh(pp=2, dp_shard=8, cp=2, tp=4)
    assert setup.mesh.world_size == 8 * 4 * 2 * 2 == 128


@pytest.mark.parametrize(
    ("gpus", "options", "mesh"),
    [
        (64, {"strategy": "hybrid_shard"}, Mesh(dp_replicate=8, dp_shard=8)),
        (64, {"strategy": "hybrid_shard", "tp": 2}, Mesh(dp_replicate=8, dp_shard=4, tp=2)),
        (64, {"strategy": "hybrid_shard", "dp_replicate": 2}, Mesh(dp_replicate=2, dp_shard=32)),
        (12, {"strategy": "hpz"}, Mesh(dp_replicate=3, dp_shard=4)),
        (8, {"strategy": "hfsdp", "per_node": 4}, Mesh(dp_replicate=2, dp_shard=4)),
        (144, {"strategy": "hybrid_shard", "gpu": "gb200"}, Mesh(dp_replicate=2, dp_shard=72)),
        (128, {"strategy": "hybrid_shard", "gpu": "gb200", "tp": 4}, Mesh(dp_replicate=16, dp_shard=2, tp=4)),
        (36, {"strategy": "hybrid_shard", "gpu": "gb200", "dp_replicate": 9}, Mesh(dp_replicate=9, dp_shard=4)),
        (None, {"tp": 8, "pp": 2}, Mesh(pp=2, tp=8)),
    ],
)
def test_a_shard_group_is_a_host_unless_said_otherwise(gpus: int | None, options: dict[str, Any], mesh: Mesh) -> None:
    assert setup_of(gpus=gpus, **options).mesh == mesh


@pytest.mark.parametrize(
    ("gpu", "options", "domain"),
    [("h100", {}, 8), ("h100", {"per_node": 1}, 1), ("h100", {"per_node": 16}, 8), ("gb200", {"per_node": 2}, 72),
     ("h100", {"per_node": 1, "scaleup_bandwidth": 1e11}, 1), ("l4", {"per_node": 4, "scaleup_bandwidth": 1e11}, 4)],
)  # fmt: skip
def test_links_within_a_host_join_no_others(gpu: str, options: dict[str, Any], domain: int) -> None:
    assert setup_of(gpu=gpu, **options).cluster.device.scaleup_domain == domain


def test_ranks_across_hosts_have_no_fast_links() -> None:
    asked = Request("llama3-8b", 8, gpu="h100-sxm", sequence=4096, strategy="zero3", tp=2)
    hosts = [estimate(build_setup(replace(asked, per_node=each))) for each in (8, 1)]
    assert [[link.value for link in each.traffic.links] for each in hosts] == [["scaleup"], ["internode"]]
    assert ["tensor parallelism across hosts" in {each.rule for each in host.findings} for host in hosts] == [
        False,
        True,
    ]


IMPOSSIBLE = [
    # numbers
    ({"gpus": 0}, "gpus is 0; give a number above 0"),
    ({"gpus": -8}, "gpus is -8"),
    ({"gpus": 2.5}, "gpus is 2.5; give a whole number"),
    ({"gpus": "eight"}, "give a number such as 64, or a range such as 8..1024"),
    ({"gpus": "64..8"}, "a range that ends before it begins; write 8..64"),
    ({"gpus": "1..100000000000"}, "at most 1,000,000 can be planned for"),
    ({"sequence": "4096"}, "sequence is '4096'; give a finite number"),
    ({"tp": True}, "tp is True; give a finite number"),
    ({"sequence": 0}, "sequence is 0"),
    ({"sequence": -1}, "sequence is -1"),
    ({"micro_batch": 0}, "micro_batch is 0"),
    ({"global_batch": math.nan}, "global_batch is nan; give a finite number"),
    ({"micro_batches": -2}, "micro_batches is -2"),
    ({"tp": 0}, "tp is 0"),
    ({"prefetch": -1}, "prefetch is -1; give 0 or more"),
    ({"memory_bytes": math.inf}, "memory_bytes is inf"),
    ({"memory_bytes": 0}, "memory_bytes is 0"),
    ({"price_per_hour": -1.0}, "price_per_hour is -1.0; give 0 or more"),
    ({"host_memory_bytes": -5}, "host_memory_bytes is -5"),
    ({"model": -7e9}, "params is -7000000000.0"),
    ({"model": 0}, "params is 0"),
    ({"model": math.nan}, "params is nan"),
    ({"gpus": "9" * 5000}, "give a number such as 64, or a range such as 8..1024"),
    ({"gpus": 10**400}, "gpus is a number of 1329 bits"),
    ({"gpus": ""}, "gpus is empty"),
    ({"gpus": [8]}, "gpus is [8]; give a finite number"),
    ({"gpus": None, "tp": 10**9}, "at most 1,000,000 can be planned for"),
    ({"sequence": 10**400}, "sequence is a number of 1329 bits; give one of at most 1e+18"),
    ({"memory_bytes": 1e300}, "memory_bytes is 1e+300; give one of at most 1e+18"),
    ({"memory_bytes": 1e-9}, "memory_bytes is 1e-09; give 1 or more"),
    ({"prefetch": None}, "prefetch is None; give a finite number"),
    # other kinds
    ({"compile": "no"}, "compile is 'no'; give True or False"),
    ({"sequence_parallel": "no"}, "sequence_parallel is 'no'; give True or False"),
    ({"accumulate_locally": 1}, "accumulate_locally is 1; give True or False"),
    ({"freeze": 5}, "freeze is 5; give a glob, or a list of globs"),
    ({"freeze": ""}, "freeze is ''; give a glob"),
    ({"freeze": []}, "freeze is []; give a glob"),
    ({"freeze": [5]}, "freeze is [5]; give a glob, or a list of globs"),
    ({"precision": 3}, "precision is 3; give a name"),
    ({"gpu": 7}, "gpu is 7; give a name or a Device"),
    ({"strategy": 3}, "strategy is 3; give a name or a Plan"),
    ({"checkpointing": 5}, "checkpointing is 5; give a name"),
    ({"attention": 7}, "attention is 7; it is one of flash, cudnn, flash3, triton, math"),
    ({"rank_by": ["gpus"]}, "rank_by is ['gpus']; it is one of"),
    ({"model": None}, "model is of type NoneType"),
    ({"model": ["gpt2"]}, "model is of type list"),
    # names
    ({"strategy": ""}, "strategy is empty; give a name, or leave it out"),
    ({"gpu": " "}, "gpu is empty"),
    ({"gpu": "", "memory_bytes": 8e10}, "gpu is empty"),
    ({"checkpointing": ""}, "checkpointing is empty"),
    ({"precision": ""}, "precision is empty"),
    ({"optimizer": ""}, "optimizer is empty"),
    ({"precision": "bfloat61"}, "bfloat16 = bf16"),
    ({"checkpointing": f"every_{'9' * 5000}"}, "every_N for one block in N"),
    ({"strategy": "zero4"}, "There is no strategy 'zero4'. Did you mean 'zero3'?"),
    ({"strategy": "zero3@gpu"}, "There is no offload 'gpu' in plan 'zero3@gpu'"),
    ({"strategy": "zero3@nvm"}, "Did you mean 'nvme'?"),
    ({"precision": "bf61"}, "There is no precision 'bf61'. Did you mean 'bf16'?"),
    ({"optimizer": "momentun"}, "There is no optimizer 'momentun'. Did you mean 'momentum'?"),
    ({"checkpointing": "selectiv"}, "Did you mean 'selective'?"),
    ({"checkpointing": "every_0"}, "every_N for one block in N"),
    ({"checkpointing": "every_99"}, "every_99 recomputes one block in 99, and llama3-8b has 32 layers. Use an N of at"),
    ({"strategy": "zero3@cpu:0"}, "strategy 'zero3@cpu:0' offloads nothing: its share of the units is 0. Use zero3"),
    ({"strategy": "zero3@nvme:0.0"}, "offloads nothing"),
    (
        {"attention": "flesh"},
        "attention is 'flesh'; it is one of flash, cudnn, flash3, triton, math. Did you mean 'flash'?",
    ),
    ({"loss": "half"}, "loss is 'half'"),
    ({"pipeline": "zigzag"}, "pipeline is 'zigzag'"),
    ({"rank_by": "gpu"}, "rank_by is 'gpu'; it is one of throughput, gpus, cost. Did you mean 'gpus'?"),
    ({"gpu": "h1000"}, "There is no GPU 'h1000'"),
    ({"model": "lama3-8b"}, "Did you mean 'llama3-8b'?"),
    # ranks
    ({"gpus": 12, "tp": 8}, "12 GPUs are not a multiple of tp 8 × pp 1 × cp 1 = 8: 12 / 8 = 1.5 data ranks. Use 16"),
    ({"gpus": 16, "tp": 3}, "not a multiple of tp 3"),
    (
        {"gpus": 24, "tp": 3},
        "heads 32 of llama3-8b do not divide by tp 3: 32 / 3 = 10.67. Use a tp that divides 32, suc",
    ),
    ({"model": "qwen2.5-7b", "gpus": 7, "tp": 7}, "kv_heads 4 of qwen2.5-7b do not divide by tp 7"),
    ({"gpus": 64, "pp": 64}, "has 32 layers, and 3 parts in front of and behind them, too few for pp 64 stages"),
    ({"gpus": 16, "dp_replicate": 3}, "16 data ranks cannot form 3 equal groups"),
    ({"gpus": 8, "strategy": "hybrid_shard"}, "8 data ranks form one (dp_replicate)"),
    ({"ep": 2}, "llama3-8b has none. Leave ep out"),
    ({"model": "qwen3-30b-a3b", "ep": 3, "gpus": 24}, "128 experts of qwen3-30b-a3b do not divide by ep 3"),
    ({"model": "qwen3-30b-a3b", "ep": 32, "gpus": 16}, "dp_shard 16 × cp 1 × tp 1 = 16. Use an ep that divides 16"),
    (
        {"model": "qwen3-30b-a3b", "ep": 16, "gpus": 16, "strategy": "hybrid_shard", "dp_replicate": 2},
        "does not divide theirs: dp_shard 8 × cp 1 × tp 1 = 8. Use an ep that divides 8",
    ),
    ({"pp": 2, "virtual_stages": 32}, "pp 2 × virtual_stages 32 = 64 chunks"),
    ({"virtual_stages": 2}, "but pp is 1"),
    ({"pp": 4, "virtual_stages": 2, "micro_batches": 3}, "3 micro-batches are too few"),
    # sequences and batches
    ({"model": "gpt2-1.5b", "sequence": 2048}, "longer than the 1024 positions that gpt2-1.5b has vectors for"),
    (
        {"sequence": 4096, "cp": 8, "tp": 8, "gpus": 64, "context": "ulysses"},
        "heads 32 of llama3-8b do not divide by cp 8 × tp 8 = 64, and context mode ulysses gives each of these ranks",
    ),
    ({"model": "mistral-7b", "cp": 2, "context": "ring"}, "sliding window of 4096 tokens, and context mode ring"),
    ({"cp": 2, "context": "rings"}, "context is 'rings'; it is one of gather, ulysses, ring. Did you mean"),
    ({"sequence": 4004, "cp": 2, "tp": 8, "gpus": 16}, "2002, which do not divide by tp 8: between matrices each has"),
    ({"sequence": 4098, "cp": 2}, "does not divide into 2 × cp 2 = 4 equal parts"),
    ({"global_batch": 32, "micro_batches": 2}, "Give one of them"),
    ({"strategy": Plan("-", "-", "D", "-")}, "must be a prefix"),
    ({"strategy": Plan("-", "-", "-", "D@tape")}, "names the tier 'tape'"),
]


def test_groups_of_one_rank_are_as_without_groups() -> None:
    """As in a run, which takes any number of groups above one."""
    alone = setup_of(gpus=4, strategy="hybrid_shard", dp_replicate=4)
    check(alone)
    plain = setup_of(gpus=4, strategy="zero0", dp_replicate=4)
    assert memory_of(alone).terms == memory_of(plain).terms
    assert traffic_of(alone).total_bytes == traffic_of(plain).total_bytes


def test_numbers_may_be_those_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    asked = Request("llama3-8b", numpy.int64(8), sequence=numpy.int32(128), memory_bytes=numpy.float32(2**36))
    assert asked == Request("llama3-8b", 8, sequence=128, memory_bytes=2**36)
    assert type(asked.gpus) is type(asked.sequence) is int


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_impossible_input_is_refused_with_the_arithmetic(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        setup_of(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 24, "tp": 8},
        {"gpus": 32, "pp": 32},
        {"strategy": "hybrid_shard"},
        {"model": "gemma-2b", "tp": 4},  # one key-value head, on every rank
        {"gpus": 16, "tp": 16},  # eight, likewise
        {"model": "qwen3-30b-a3b", "ep": 16},
        {"pp": 4, "virtual_stages": 2, "micro_batches": 8},
        {"model": "gpt2-1.5b", "sequence": 1024},
        {"sequence": 131072},  # rotary positions are no table
        {"sequence": 4100, "cp": 2},
        {"global_batch": 48},
        {"strategy": Plan("-", "-", "D", "D")},
        {"checkpointing": "every_2"},
    ],
    ids=str,
)
def test_the_neighbours_of_what_is_refused_pass(options: dict[str, Any]) -> None:
    setup_of(**options)


@pytest.mark.parametrize(
    "name", ["pp", "tp", "dp_replicate", "prefetch", "per_node", "micro_batch", "gpus", "sequence"]
)
def test_a_whole_number_may_be_written_as_a_float(name: str) -> None:
    value = 8 if name in ("gpus", "per_node") else 2
    options: dict[str, Any] = {"gpus": 16, "strategy": "zero3"}
    exact, floating = (plan("llama3-8b", **{**options, name: kind(value)}) for kind in (int, float))
    assert exact == floating


def test_the_number_of_gpus_may_be_text() -> None:
    assert isinstance(plan("llama3-8b", "8", strategy="zero3"), Estimate)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("bfloat16", "bf16"),
        ("float32", "fp32"),
        ("float16", "fp16"),
        ("amp_bf16", "bf16"),
        ("AMP-FP16", "fp16"),
        ("BF16_pure", "bf16-pure"),
    ],
)
def test_precisions_are_known_by_other_spellings(spelling: str, name: str) -> None:
    assert precision(spelling) == PRECISION_PRESETS[name]


def test_a_number_of_gpus_that_was_not_given_is_noted() -> None:
    def notes(**options: Any) -> str:
        return " ".join(plan("llama3-8b", strategy="zero3", gpu="h100", sequence=512, **options).notes)

    assert "No number of GPUs was given: 1 is assumed" in notes()
    assert "No number of GPUs was given: 4 is assumed" in notes(tp=4)
    assert "No number of GPUs" not in notes(gpus=8)


def test_what_given_figures_leave_open_is_noted() -> None:
    mine = {"gpu": "mine", "memory_bytes": 80e9, "memory_bandwidth": 2e12}

    def notes(**options: Any) -> str:
        return " ".join(plan("llama3-8b", 1, strategy="zero0", sequence=512, **options).notes)

    power, format = "no limit of it is applied", "counts in every format"
    assert power in notes(**mine, peak_flops=3e14) and power not in notes(**mine, peak_flops=3e14, watts=400)
    assert power not in notes(**mine) + notes(gpu="h100")
    assert format in notes(gpu="h100", peak_flops=3e14, precision="fp8")
    assert format not in notes(gpu="h100", peak_flops=3e14) + notes(gpu="h100", precision="fp8")


def test_a_setup_built_by_hand_is_checked_too() -> None:
    setup = setup_of()
    with pytest.raises(BadInput, match="= 16 ranks, but there are 8 GPUs"):
        estimate(replace(setup, cluster=Cluster(setup.cluster.device, 8)))
    with pytest.raises(BadInput, match="micro_batch is 0"):
        estimate(replace(setup, micro_batch=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention", "flesh"), ("loss", "half"), ("pipeline", "zigzag"), ("context", "rings"), ("balance", "left"),
        ("checkpointing", "foo"), ("tensor_overlap", "all"), ("recipe", "column"), ("matmul", "bf61"),
        ("optimizer_kernel", "slow"), ("empty_rows", -5), ("empty_rows", 8),
    ],
)  # fmt: skip
def test_every_named_field_of_a_setup_built_by_hand_is_looked_at(field: str, value: Any) -> None:
    setup = setup_of(gpus=8)
    check(setup)
    with pytest.raises(BadInput, match=rf"{field} is '?{value}"):
        check(replace(setup, **{field: value}))


def test_of_fp64_nothing_is_said_of_time_where_the_table_has_no_peak() -> None:
    asked = Request(
        "llama3-8b", 8, gpu="h100-sxm", precision=",".join(["fp32", *(f"{name}=fp64" for name in DTYPE_FIELDS)])
    )
    assert "no peak of H100-SXM5-80GB in fp64" in str(time_of(build_setup(asked)))
    assert isinstance(time_of(build_setup(replace(asked, peak_flops=67e12))), TimeFigures)


def test_sequences_that_are_not_balanced_are_cut_once_for_each_rank() -> None:
    made = setup_of(sequence=4096, cp=2)
    check(replace(made, sequence=4098, balance="none"))
    with pytest.raises(BadInput, match=r"4099 tokens does not divide into cp 2 equal parts\. Use 4098 tokens"):
        check(replace(made, sequence=4099, balance="none"))


def test_an_unknown_option_of_plan_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"no option 'sequense'\. Did you mean 'sequence'"):
        plan("llama3-8b", 8, sequense=2)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("zero3", "D D D D"),
        ("FSDP", "D D D D"),
        ("hsdp", "S S S S"),
        ("zero2@cpu", "- - D@cpu D@cpu"),
        ("full-shard@cpu-all", "D@cpu D D@cpu D@cpu"),
        ("zero3@nvme", "D D D@cpu D@nvme"),
        ("fsdp@cpu:0.7", "D D D@cpu:0.7 D@cpu:0.7"),
        ("zero3@nvme_all", "D@nvme D D@cpu D@nvme"),
    ],
)
def test_a_strategy_is_a_plan_and_where_its_states_are_kept(name: str, places: str) -> None:
    assert " ".join(str(place) for place in strategy(name).places().values()) == places


def test_memory_makes_an_unknown_device_usable_but_not_a_misspelt_one() -> None:
    setup = setup_of(gpu="my accelerator", memory_bytes=64e9)
    assert (setup.cluster.device.name, setup.cluster.device.memory_bytes) == ("my accelerator", 64_000_000_000)
    with pytest.raises(BadInput, match="Did you mean"):
        setup_of(gpu="H100-SXM5-80GBs", memory_bytes=64e9)
    with pytest.raises(BadInput, match=r"no GPU 'my accelerator', .* the memory is missing: .* first \(--memory-gb\)"):
        setup_of(gpu="my accelerator", peak_flops=3e14)


def test_where_gradients_end_and_what_is_not_counted_of_frozen_weights_is_said() -> None:
    def notes(**options: Any) -> str:
        return " ".join(estimate(setup_of(gpus=8, **options)).notes)

    assert "in the first 32 of 32 blocks" in notes(freeze="model.*")
    assert "in the first 2 of 32 blocks" in notes(freeze="model.embed_tokens.*,model.layers.[01].*")
    assert "Nothing is trained" not in notes(freeze="lm_head*") + notes(lora=16) + notes(freeze="model.layers.*")
    assert "as if all were trained" in notes(lora=16, tp=2)
    assert "all behind the first 2 blocks were trained" in notes(freeze="model.embed*,model.layers.[01].*", tp=2)
    assert "along tp and cp" not in notes(lora=16) + notes(tp=2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bf16,moments=int8", "bf16,moments=int8"),
        ("bf16, gather=int8,quantized_reduce=int4", "bf16,gather=int8,quantized_reduce=int4"),
        ("bf16,error_feedback=true,quantized_reduce=int4", "bf16,quantized_reduce=int4,error_feedback=true"),
        ("bf16,error_feedback=false", "bf16"),
        ("bf16-pure,moments=int8,rounding=stochastic", "bf16-pure,moments=int8,rounding=stochastic"),
        ("bf16,weight=fp32,master=fp32", "fsdp2"),
        ("fp32,reduce=bfloat16", "fp32,reduce=bf16"),
        ("fp16,moments=bf16", "fp16,moments=bf16"),
        ("bf16,linears=fp8-tensorwise", "fp8"),
        ("fp8-rowwise,linears=compute", "bf16"),
        ("mxfp8,gather=int8", "mxfp8,gather=int8"),
        ("mxfp8,linears=fp8-rowwise", "fp8-rowwise"),
        ("fp8,linears=fp8-rowwise,gather=fp8", "fp8-rowwise,gather=fp8"),
        ("bf16,gather=compute,frozen=none", "bf16"),
    ],
)
def test_a_precision_has_the_keys_of_a_configuration_and_is_called_so(name: str, text: str) -> None:
    setup = setup_of(precision=name)
    assert precision_name(setup) == text
    again = setup_of(precision=text)
    assert (again.precision, again.matmul, again.recipe) == (setup.precision, setup.matmul, setup.recipe)


def test_every_key_of_a_configurations_precision_can_be_asked_for() -> None:
    assert {*PRECISION_KEYS, "name", "skip"} == set(PrecisionConfig.model_fields)  # skip is of layers by their names


def test_what_the_optimizer_or_qlora_decides_is_not_silently_another_than_what_was_named() -> None:
    for moments in ("fp8", "fp32"):
        with pytest.raises(BadInput, match="adamw-8bit keeps its moments in int8"):
            setup_of(optimizer="adamw-8bit", precision=f"bf16,moments={moments}")
    with pytest.raises(BadInput, match="frozen=none"):
        setup_of(qlora=True, precision="bf16,frozen=none")
    assert precision_name(setup_of(optimizer="adamw-8bit", precision="bf16,moments=int8")) == "bf16,moments=int8"


def test_keys_alone_are_of_the_default_and_an_optimizers_form_is_named_by_its_key() -> None:
    assert precision_name(setup_of(precision="gather=int8")) == "bf16,gather=int8"
    assert precision_name(setup_of(precision="gather=int8", gpu="v100")) == "fp16,gather=int8"
    assert precision_name(setup_of(optimizer="adamw-8bit")) == "bf16,moments=int8"
    assert precision_name(setup_of(qlora=True)) == "bf16,frozen=nf4"
    double = setup_of(qlora=True, precision="frozen=nf4-double")
    assert double.precision.frozen == "nf4-double"
    assert memory_of(double).upper_bytes < memory_of(setup_of(qlora=True)).upper_bytes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bf16,gathr=int8", "Did you mean 'gather'"),
        ("bf16,gather=int9", "gather is 'int9'"),
        ("bf16,gather", "no value for gather"),
        ("bf16,gather=int8,gather=fp8", "gather twice"),
        ("bf16,linears=fp8", "linears is 'fp8'; it must be one of compute, fp8-tensorwise"),
        ("bf61,gather=int8", "Did you mean 'bf16'"),
    ],
)
def test_a_wrong_key_of_a_precision_is_named(name: str, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        setup_of(precision=name)


def test_formats_of_matrices_mean_nothing_to_a_number_of_parameters() -> None:
    with pytest.raises(BadInput, match="of matrices, which a number of parameters has not"):
        setup_of(7e9, precision="bf16,gather=int8")


@pytest.mark.parametrize("local", [True, False])
def test_what_micro_batches_do_before_the_last_is_refused_of_one(local: bool) -> None:
    with pytest.raises(BadInput, match=f"accumulate_locally={local}: that is of micro-batches before the last"):
        plan("llama3-8b", 8, strategy="zero3", accumulate_locally=local)
    assert plan("llama3-8b", 8, strategy="zero3", accumulate_locally=local, micro_batches=2).setup.micro_batches == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"strategy": "zero1"}, "zero1 does not split gradients"), ({"strategy": "zero2", "pp": 2}, "pp is 2")],
)
def test_micro_batches_that_are_added_up_anyway_cannot_be_reduced_each(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build_setup(Request("llama3-8b", 8, accumulate_locally=False, **options))
    assert not build_setup(Request("llama3-8b", 8, strategy="zero2", accumulate_locally=False)).sums_locally


@pytest.mark.parametrize(
    ("name", "says"),
    [("nvfp4", "products in 4 bits"), ("nf4", "qlora, or bf16,frozen=nf4"), ("fp8-blockwise", "fp8-rowwise")],
)
def test_formats_that_no_precision_is_are_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        build_setup(Request("gpt2", 1, precision=name))


@pytest.mark.parametrize("name", ["AdamW8bit", "adamw_8bit", "adamw8bit"])
def test_an_optimizer_is_known_however_it_is_spelled(name: str) -> None:
    assert build_setup(Request("gpt2", 1, optimizer=name)).optimizer.name == "adamw-8bit"


def test_torchaos_names_of_fp8_are_known() -> None:
    named = [build_setup(Request("gpt2", 1, precision=name)) for name in ("float8", "float8-rowwise")]
    assert [(each.matmul, each.recipe) for each in named] == [("fp8", "tensorwise"), ("fp8", "rowwise")]
