"""Every rule fires on its combination and not on the nearest one that is sound."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from terrazzo.engine import Plan, Precision
from terrazzo.engine.plan.place import OFFLOADS
from terrazzo.errors import BadInput
from terrazzo.planner.assemble import estimate
from terrazzo.planner.gate.facts import Facts
from terrazzo.planner.gate.gate import ALL_RULES, findings, runnable
from terrazzo.planner.gate.rule import as_text
from terrazzo.planner.machine.mesh import RankGroup
from terrazzo.planner.model.shapes import ModelShape, TensorShape, UnitShape
from terrazzo.planner.report.answer import Answer
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.framework import FRAMEWORKS, Framework
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

FP16_UNSCALED = Precision(weight="fp16", compute="fp16")  # type: ignore[arg-type]
ONE_UNIT = ModelShape("flat", (UnitShape("", (TensorShape("weight", (4096, 4096)),)),), vocab=100)
MOE, TIED, ODD_VOCAB = "qwen3-30b-a3b", "gemma-2b", "gpt2-1.5b"

OURS = {
    "dim": 64,
    "max_sequence_length": 8192,
    "layers": 4,
    "heads": 4,
    "kv_heads": 4,
    "vocab_size": 512,
    "ffn_dim": 128,
    "tie_embeddings": False,
}

NARROW = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 128,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    # rule: (framework and options that it is about, the sound neighbour's)
    "fp8 without the hardware": ("terrazzo", {"precision": "fp8", "gpu": "a100"}, "terrazzo", {"precision": "fp8"}),
    "mxfp8 without the hardware": (
        "fsdp2", {"precision": "mxfp8", "gpu": "h100"}, "fsdp2", {"precision": "mxfp8", "gpu": "b200"},
    ),
    "scales of 32 elements": (
        "terrazzo", {"precision": "mxfp8", "gpu": "b200"}, "terrazzo", {"precision": "fp8-rowwise", "gpu": "b200"},
    ),
    "tensor-parallel exchanges beside products": (
        "terrazzo", {"tp": 2, "tensor_overlap": "async"}, "fsdp2", {"tp": 2, "tensor_overlap": "async"},
    ),
    "bf16 without the hardware": (
        "terrazzo", {"gpu": "v100", "precision": "bf16"}, "terrazzo", {"gpu": "v100"},
    ),
    "fp16 without loss scaling": ("terrazzo", {"dtypes": FP16_UNSCALED}, "terrazzo", {"precision": "fp16"}),
    "flash attention before Ampere": ("terrazzo", {"gpu": "t4"}, "terrazzo", {"gpu": "a100"}),
    "16-bit master weights": ("terrazzo", {"precision": "bf16-pure"}, "terrazzo", {"precision": "bf16"}),
    "nothing to shard": ("terrazzo", {"gpus": 1}, "terrazzo", {"gpus": 1, "strategy": "zero0"}),
    "nothing to shard on a CPU": ("terrazzo", {"gpus": 1, "gpu": "cpu"}, "terrazzo", {"gpus": 2, "gpu": "cpu"}),
    "whole model in one unit": ("fsdp2", {"model": ONE_UNIT}, "fsdp2", {"model": ONE_UNIT, "strategy": "zero2"}),
    "model in one unit": ("terrazzo", {"model": ONE_UNIT}, "terrazzo", {"model": ONE_UNIT, "strategy": "zero2"}),
    "weights gathered without overlap": ("terrazzo", {"prefetch": 0}, "terrazzo", {"prefetch": 0, "strategy": "zero1"}),
    "split weights in a pipeline": ("terrazzo", {"pp": 2}, "terrazzo", {"pp": 2, "strategy": "zero1"}),
    "zero-bubble schedule elsewhere": (
        "megatron", {"pp": 2, "pipeline": "zero_bubble"}, "megatron", {"pp": 2, "pipeline": "1f1b"},
    ),
    "whole gradients kept under split gradients": (
        "terrazzo",
        {"strategy": "zero2", "accumulate_locally": True, "micro_batches": 4},
        "terrazzo",
        {"strategy": "zero2", "micro_batches": 4},
    ),
    "tensor parallelism across hosts": (
        "terrazzo",
        {"model": "llama3-405b", "tp": 8, "gpu": "h100", "per_node": 4, "domain": 4, "gpus": 64},
        "terrazzo",
        {"model": "llama3-405b", "tp": 8, "gpus": 64},
    ),
    "shard group across hosts": (
        "terrazzo",
        {"gpus": 64, "strategy": "hybrid_shard", "dp_replicate": 4},
        "terrazzo",
        {"gpus": 64, "strategy": "hybrid_shard", "dp_replicate": 8},
    ),
    "groups across the edge of a host": (
        "terrazzo",
        {"gpus": 24, "strategy": "hybrid_shard", "dp_replicate": 4},
        "terrazzo",
        {"gpus": 24, "strategy": "hybrid_shard", "dp_replicate": 6},
    ),
    "host that is not full": ("terrazzo", {"gpus": 12}, "terrazzo", {"gpus": 16}),
    "states on consumer disks": ("deepspeed", {"strategy": "zero3@nvme"}, "deepspeed", {"strategy": "zero3@cpu"}),
    "fewer micro-batches than stages": (
        "megatron", {"pp": 4, "micro_batches": 3}, "megatron", {"pp": 4, "micro_batches": 4},
    ),
    "uneven pipeline stages": (
        "megatron", {"pp": 4, "virtual_stages": 3, "micro_batches": 4}, "terrazzo", {"pp": 4, "virtual_stages": 3},
    ),
    "tied embeddings in a pipeline": ("megatron", {"pp": 2, "model": TIED}, "megatron", {"model": TIED}),
    "vocabulary does not divide": ("megatron", {"model": ODD_VOCAB, "tp": 5, "gpus": 5}, "megatron", {"tp": 4}),
    "beyond the trained positions": ("terrazzo", {"sequence": 16384}, "terrazzo", {"sequence": 8192}),
    "clipping with the optimizer in backward": (
        "terrazzo optimizer_in_backward clip", {}, "terrazzo optimizer_in_backward", {},
    ),
    "accumulation with the optimizer in backward": (
        "fsdp2 optimizer_in_backward", {"micro_batches": 2}, "fsdp2 optimizer_in_backward", {"micro_batches": 1},
    ),
    "loss scaling with the optimizer in backward": (
        "fsdp2 optimizer_in_backward", {"precision": "fp16"}, "fsdp2 optimizer_in_backward", {"precision": "bf16"},
    ),
    "share without a unit": (
        "terrazzo", {"strategy": "zero3@cpu:0.01"}, "terrazzo", {"strategy": "zero3@cpu:0.02"},
    ),
    "gradients away from their optimizer": (
        "terrazzo", {"strategy": Plan("D", "D", "D@cpu", "D")}, "terrazzo", {"strategy": "zero3@cpu"},
    ),
    # what the engine does not run yet
    "fused kernel for attention that keeps its scores": (
        "terrazzo", {"model": "gemma2-2b", "attention": "flash"}, "terrazzo", {"model": "gemma2-2b"},
    ),
    "empty rows": ("terrazzo", {"global_batch": 40}, "terrazzo", {"global_batch": 48}),
    "batch that does not divide": ("deepspeed", {"global_batch": 8}, "deepspeed", {"global_batch": 16}),
    "stages without a micro-batch": (
        "terrazzo", {"pp": 4, "micro_batches": 3}, "terrazzo", {"pp": 4, "micro_batches": 4},
    ),
    "stage that trains nothing": (
        "terrazzo", {"pp": 2, "freeze": "model.embed*,model.layers.?.*,model.layers.1?.*"},
        "terrazzo", {"pp": 2, "freeze": "model.embed*,model.layers.?.*"},
    ),
    "pipeline parallelism": ("terrazzo", {"pp": 2}, "megatron", {"pp": 2}),
    "stages of a model without a line": (
        "terrazzo", {"model": "falcon-7b", "pp": 2}, "terrazzo", {"pp": 2, "model": OURS},
    ),
    "experts of tokens that ranks along tp share": (
        "terrazzo", {"model": MOE, "ep": 2, "tp": 2, "sequence_parallel": False},
        "terrazzo", {"model": MOE, "ep": 2, "tp": 2},
    ),
    "no plan of tensor parallelism": (
        "terrazzo", {"model": ODD_VOCAB, "tp": 5, "gpus": 5, "sequence": 1000}, "terrazzo", {"tp": 4},
    ),
    "attention that ranks cannot share": ("terrazzo", {"model": "falcon-7b", "cp": 2}, "terrazzo", {"cp": 2}),
    "experts beside fp8": (
        "terrazzo", {"model": MOE, "precision": "fp8"}, "terrazzo", {"model": MOE},
    ),
    "optimizer that sees whole matrices": ("terrazzo", {"optimizer": "adafactor"}, "terrazzo", {"optimizer": "muon"}),
    "optimizer that torch does not have": ("terrazzo", {"optimizer": "adamw-4bit"}, "terrazzo", {"optimizer": "lion"}),
    "loss without all logits, in fp16": (
        "terrazzo", {"loss": "chunked", "precision": "fp16"}, "terrazzo", {"loss": "chunked"},
    ),
    "loss without all logits, of logits that are changed": (
        "terrazzo", {"loss": "chunked", "model": "gemma2-9b"}, "terrazzo", {"loss": "chunked", "model": TIED},
    ),
    "tensors frozen by name": ("terrazzo", {"freeze": "*.embed_tokens.*"}, "fsdp2", {"freeze": "*.embed_tokens.*"}),
    "average of the weights": ("terrazzo", {"ema": True}, "terrazzo", {}),
    "micro-batches that only add up": (
        "terrazzo",
        {"strategy": "zero2", "accumulate_locally": True, "micro_batches": 4},
        "terrazzo",
        {"strategy": "zero1", "accumulate_locally": True, "micro_batches": 4},
    ),
    "adapters on the built-in decoder": (
        "terrazzo", {"model": OURS | {"model_type": "terrazzo"}, "lora": 8}, "terrazzo", {"model": NARROW, "lora": 8},
    ),
    "no matrix for 4 bits": ("terrazzo", {"model": "gpt2", "qlora": True}, "terrazzo", {"qlora": True}),
    "blocks of 4 bits that ranks along tp cut": (
        "terrazzo", {"model": NARROW, "qlora": True, "tp": 2}, "terrazzo", {"model": NARROW, "qlora": True},
    ),
    "4 bits that fp8 would round again": (
        "terrazzo", {"qlora": True, "precision": "fp8"}, "terrazzo", {"lora": 8, "precision": "fp8"},
    ),
    "experts beside 4 bits": ("terrazzo", {"model": "mixtral-8x7b", "qlora": True}, "terrazzo", {"qlora": True}),
    "fused loss": ("terrazzo", {"loss": "fused"}, "megatron", {"loss": "fused"}),
    "kernel that no configuration names": (
        "terrazzo", {"attention": "flash3"}, "terrazzo", {"attention": "flash"},
    ),
    "compiled stages": ("terrazzo", {"pp": 2, "compile": True}, "megatron", {"pp": 2, "compile": True}),
    "compiled attention that exchanges": ("terrazzo", {"cp": 2, "compile": True}, "terrazzo", {"cp": 2}),
    "attention that keeps its scores": ("terrazzo", {"attention": "math"}, "megatron", {"attention": "math"}),
    # DeepSpeed
    "AutoTP with ZeRO-3": ("deepspeed@0.19.3", {"tp": 2}, "deepspeed@0.19.4", {"tp": 2}),
    "young AutoTP with ZeRO-3": ("deepspeed", {"tp": 2}, "deepspeed", {"tp": 2, "strategy": "zero2"}),
    "AutoTP in a pipeline": (
        "deepspeed", {"tp": 2, "pp": 2, "strategy": "zero1"}, "deepspeed", {"tp": 2, "strategy": "zero1"},
    ),
    "PipelineModule with ZeRO-2 or 3": (
        "deepspeed", {"pp": 2, "strategy": "zero2"}, "deepspeed", {"pp": 2, "strategy": "zero1"},
    ),
    "weights offloaded below ZeRO-3": (
        "deepspeed", {"strategy": "zero2@cpu-all"}, "deepspeed", {"strategy": "zero2@cpu"},
    ),
    "NVMe below ZeRO-3": ("deepspeed", {"strategy": "zero2@nvme"}, "deepspeed", {"strategy": "zero3@nvme"}),
    "offload at stage 0": ("deepspeed", {"strategy": "zero0@cpu"}, "deepspeed", {"strategy": "zero1@cpu"}),
    "offload in shares": (
        "deepspeed", {"strategy": "zero2@cpu:0.5"}, "deepspeed", {"strategy": "zero3@cpu:0.5"},
    ),
    "offload with another optimizer": (
        "deepspeed",
        {"strategy": "zero2@cpu", "optimizer": "rmsprop"},
        "deepspeed",
        {"strategy": "zero2@cpu", "optimizer": "lion"},
    ),
    "expert layers with ZeRO-3": ("deepspeed expert_layers", {"model": MOE}, "deepspeed", {"model": MOE}),
    "expert parallelism with hpZ": (
        "deepspeed", {"model": MOE, "ep": 2, "strategy": "hpz"}, "deepspeed", {"model": MOE, "ep": 2},
    ),
    "shard groups without MiCS": (
        "deepspeed@0.19.7", {"strategy": "hybrid_shard"}, "deepspeed@0.19.6", {"strategy": "hybrid_shard"},
    ),
    "ring attention": ("deepspeed", {"cp": 2}, "deepspeed", {"cp": 2, "context": "ulysses"}),
    "every micro-batch all-reduced": (
        "deepspeed",
        {"strategy": "zero2", "micro_batches": 4},
        "deepspeed",
        {"strategy": "zero1", "micro_batches": 4},
    ),
    "accumulation in 16 bits": (
        "deepspeed", {"micro_batches": 4}, "deepspeed", {"micro_batches": 4, "precision": "bf16-pure"},
    ),
    "fp32 accumulation at stage 0": (
        "deepspeed", {"strategy": "zero0"}, "deepspeed", {"strategy": "zero0", "precision": "zero"},
    ),
    "Muon in BF16_Optimizer": (
        "deepspeed",
        {"optimizer": "muon", "strategy": "zero1"},
        "deepspeed",
        {"optimizer": "muon", "strategy": "zero2"},
    ),
    "AutoEP with AutoTP and ZeRO-3": (
        "deepspeed",
        {"model": MOE, "ep": 2, "tp": 2},
        "deepspeed",
        {"model": MOE, "ep": 2, "tp": 2, "strategy": "zero2"},
    ),
    "whole matrices in DeepSpeed's flat shards": (
        "deepspeed", {"optimizer": "adafactor"}, "deepspeed", {"optimizer": "adafactor", "strategy": "zero0"},
    ),
    "DeepSpeed's fp8": ("deepspeed", {"precision": "fp8"}, "deepspeed", {"precision": "bf16"}),
    "compiled ZeRO-3": ("deepspeed", {"compile": True}, "deepspeed", {"compile": True, "strategy": "zero2"}),
    # FSDP
    "FSDP on NVMe": ("fsdp2", {"strategy": "zero3@nvme-all"}, "fsdp2", {"strategy": "zero3@cpu-all"}),
    "part of the states offloaded": ("fsdp2", {"strategy": "zero3@cpu"}, "fsdp1", {"strategy": "zero3@cpu-all"}),
    "clipping offloaded gradients": (
        "fsdp2 clip", {"strategy": "zero3@cpu-all"}, "fsdp2", {"strategy": "zero3@cpu-all"},
    ),
    "ZeRO-1 or 2 under FSDP2": ("fsdp2", {"strategy": "zero2"}, "fsdp2", {"strategy": "shard_grad_op"}),
    "optimizer sharded over replicas": ("fsdp1", {"strategy": "hfsdp"}, "fsdp1", {"strategy": "hybrid_shard"}),
    "tied weights in two units": ("fsdp2", {"model": TIED}, "fsdp2", {"model": "llama3-8b"}),
    "tied weights trained apart": ("fsdp2@2.12", {"model": TIED}, "fsdp2@2.13", {"model": TIED}),
    "fp8 gathered in bf16": ("fsdp2", {"precision": "fp8"}, "megatron", {"precision": "fp8", "strategy": "zero1"}),
    "quantised moments of DTensors": ("fsdp2", {"optimizer": "adamw-8bit"}, "fsdp2", {"optimizer": "adamw"}),
    # others
    "Megatron beyond ZeRO-1": ("megatron", {"strategy": "zero2"}, "megatron", {"strategy": "zero1"}),
    "Megatron on NVMe": ("megatron", {"strategy": "zero1@nvme"}, "megatron", {"strategy": "zero1@cpu"}),
    "torchao's offload on several ranks": (
        "torchao", {"strategy": "zero1@cpu"}, "torchao", {"strategy": "zero1@cpu", "gpus": 1},
    ),
    "torchao's offload with clipping": (
        "torchao clip", {"strategy": "zero1@cpu", "gpus": 1}, "torchao", {"strategy": "zero1@cpu", "gpus": 1},
    ),
    "torchao's offloaded gradients with accumulation": (
        "torchao",
        {"strategy": "zero1@cpu", "gpus": 1, "micro_batches": 2},
        "torchao",
        {"strategy": "zero1@cpu", "gpus": 1, "micro_batches": 1},
    ),
}  # fmt: skip


def setup_of(options: dict[str, Any]) -> Setup:
    options = {"model": "llama3-8b", "gpu": "h100", "gpus": 16} | options
    dtypes, domain = options.pop("dtypes", None), options.pop("domain", None)
    setup = build_setup(Request(**options))
    if dtypes is not None:
        setup = replace(setup, precision=dtypes)
    if domain is not None:
        device = replace(setup.cluster.device, scaleup_domain=domain)
        setup = replace(setup, cluster=replace(setup.cluster, device=device))
    return setup


def framework_of(text: str) -> Framework:
    name, *flags = text.split()
    return replace(Framework.parse(name), clip="clip" in flags, **{flag: True for flag in flags if flag != "clip"})


def rules_found(text: str, options: dict[str, Any]) -> set[str]:
    return {finding.rule for finding in findings(replace(setup_of(options), framework=framework_of(text)))}


ACROSS = "groups across the edge of a host"


@pytest.mark.parametrize(
    ("options", "advice", "change"),
    [
        (
            {"strategy": "hybrid_shard", "dp_replicate": 4},
            "Use dp_replicate 6, for groups of 4, or 6 GPUs of each host (--per-node).",
            {"dp_replicate": 6},
        ),
        ({"tp": 6}, "Use tp 4, or 6 GPUs of each host (--per-node).", {"tp": 4}),
        ({"tp": 6, "per_node": 9}, "Use 6 GPUs of each host (--per-node).", {"per_node": 6}),  # 32 heads
        ({"gpus": 144, "gpu": "gb200", "tp": 16}, "Use tp 8.", {"tp": 8}),
        ({"cp": 3, "tp": 2}, "Use cp 2, or 6 GPUs of each host (--per-node).", {"cp": 2}),
        ({"pp": 4, "dp_replicate": 3}, "Use 6 GPUs of each host (--per-node).", {"per_node": 6}),
        (
            {"gpus": 128, "gpu": "gb200", "tp": 8, "dp_replicate": 4},
            "Use sizes whose product along dp_shard and the axes inside divides 72.",
            {"dp_replicate": 16},
        ),
    ],
    ids=str,
)
def test_groups_across_hosts_are_told_sizes_that_lie_on_one(
    options: dict[str, Any], advice: str, change: dict[str, Any]
) -> None:
    options = {"gpus": 24} | options
    (found,) = (each for each in findings(setup_of(options)) if each.rule == ACROSS)
    assert found.alternative == advice
    assert ACROSS not in rules_found("terrazzo", options | change)


@pytest.mark.parametrize(
    ("options", "advice", "change"),
    [
        ({"gpus": 12}, "Use 8 or 16 GPUs (--gpus), or 6 GPUs of each host (--per-node).", {"per_node": 6}),
        ({"gpus": 13}, "Use 8 or 16 GPUs (--gpus).", {"gpus": 16}),
        # A rack's fast links join hosts, so that other hosts would fill no rack.
        ({"gpus": 100, "gpu": "gb200"}, "Use 72 or 144 GPUs (--gpus).", {"gpus": 144}),
    ],
    ids=str,
)
def test_a_host_or_a_rack_that_is_not_full_is_told_numbers_that_fill_them(
    options: dict[str, Any], advice: str, change: dict[str, Any]
) -> None:
    rule = "host that is not full"
    (found,) = (each for each in findings(setup_of(options)) if each.rule == rule)
    assert found.alternative == advice
    assert ("in racks of 72" if "gpu" in options else "in hosts of 8") in found.reason
    assert rule not in rules_found("terrazzo", options | change)


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in ALL_RULES]
    assert len(names) == len(set(names))
    assert set(names) == set(CASES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_on_its_combination_and_not_on_its_neighbour(rule: str) -> None:
    framework, options, sound_framework, sound_options = CASES[rule]
    assert rule in rules_found(framework, options)
    assert rule not in rules_found(sound_framework, sound_options)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_a_finding_is_whole_sentences_with_a_source(rule: Any) -> None:
    framework, options, _, _ = CASES[rule.name]
    setup = replace(setup_of(options), framework=framework_of(framework))
    finding = next(found for found in findings(setup) if found.rule == rule.name)
    assert finding.source
    assert set(rule.scope) <= set(FRAMEWORKS)
    for text in (finding.reason, finding.alternative):
        assert text.endswith(".")
        assert "{" not in text and "None" not in text


@pytest.mark.parametrize(
    ("rule", "framework", "plan", "options"),
    [
        ("expert parallelism with hpZ", "deepspeed", "hpz@cpu", {"model": MOE, "ep": 2}),
        ("shard groups without MiCS", "deepspeed", Plan("S", "S", "S", "S"), {"dp_replicate": 2}),
        ("every micro-batch all-reduced", "deepspeed", Plan("-", "-", "D", "D", "mine"), {"micro_batches": 2}),
        ("optimizer sharded over replicas", "fsdp2", Plan("S", "S", "S", "dp_shard,R"), {"dp_replicate": 2}),
    ],
    ids=str,
)
def test_a_rule_knows_a_plan_by_its_places(rule: str, framework: str, plan: Any, options: dict[str, Any]) -> None:
    assert rule in rules_found(framework, {"strategy": plan, **options})


def test_every_rule_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/known-combinations.md").read_text(encoding="utf-8")

    class Fact(str):
        """A fact, or a part of one, as its name in italics."""

        def __getattr__(self, part: str) -> Fact:
            assert hasattr(RankGroup, part)
            return Fact(f"*{self[1:-1]}.{part}*")

    class Names:
        def __getattr__(self, name: str) -> Fact:
            assert name in vars(Facts(setup_of({}))) or hasattr(Facts, name)
            return Fact(f"*{name}*")

    def shown(sentence: str) -> str:
        return as_text(sentence, cast(Facts, Names()))

    rows = [
        f"| {rule.name} | {rule.severity} | {shown(rule.reason)} | {shown(rule.alternative)} | {rule.source} |"
        for rule in ALL_RULES
    ]
    assert sorted(rows) == sorted(
        line for line in page.splitlines() if re.match(r"\| [^|]+ \| (refuse|planned|warn)", line)
    )


def test_the_whole_model_as_one_unit_can_be_said_of_any_model() -> None:
    assert "whole model in one unit" in rules_found("fsdp1 whole_model_unit", {})
    assert "whole model in one unit" not in rules_found("fsdp1", {})


@pytest.mark.parametrize("deep", [9, 2], ids=["most", "half"])
def test_most_of_a_model_in_one_unit_is_said(deep: int) -> None:
    matrix = TensorShape("weight", (1024, 1024))
    stages = (UnitShape("0", (matrix,) * deep), UnitShape("1", (matrix,) * 2))
    found = rules_found("terrazzo", {"model": ModelShape("stages", (UnitShape("", ()), *stages), vocab=100)})
    assert ("model in one unit" in found) == (deep > 2)


def test_numbers_stand_in_the_reasons() -> None:
    found = findings(setup_of({"pp": 4, "micro_batches": 3, "strategy": "zero1", "framework": "megatron"}))
    text = next(str(finding) for finding in found if finding.rule == "fewer micro-batches than stages")
    assert text.startswith("3 micro-batches cannot keep 4 pipeline stages busy: the bubble is 100% of the work.")


def test_stages_are_counted_and_not_ranks_where_layers_do_not_divide() -> None:
    """32 layers over 4 ranks of 3 stages each; over 4 alone they would."""
    asked = {"pp": 4, "virtual_stages": 3, "micro_batches": 4, "strategy": "zero1", "framework": "megatron"}
    (text,) = (str(each) for each in findings(setup_of(asked)) if each.rule == "uneven pipeline stages")
    assert text.startswith("32 layers do not divide evenly over 12 stages")


@pytest.mark.parametrize(
    ("options", "written", "steps"),
    [
        ({}, "0.84", "714"),  # 12 bytes for each of 70e9 parameters, on one host
        ({"gpus": 16}, "0.42", "1,429"),  # on two
        ({"optimizer": "sgd"}, "0.28", "2,143"),  # the master weights alone
        ({"strategy": "zero3@nvme-all"}, "0.98", "612"),  # and the weights
    ],
)
def test_a_70b_model_wears_a_consumer_disk_out_in_about_700_steps(
    options: dict[str, Any], written: str, steps: str
) -> None:
    setup = setup_of({"model": 70e9, "gpus": 8, "strategy": "zero3@nvme", **options})
    text = next(str(finding) for finding in findings(setup) if finding.rule == "states on consumer disks")
    assert f"writes {written} TB to the disks of each host" in text
    assert f"would last {steps} steps" in text


def test_a_share_is_a_part_of_the_states_too() -> None:
    """FSDP's offload is all or nothing, also where every state has the same share."""
    assert "part of the states offloaded" in rules_found("fsdp2", {"strategy": "zero3@cpu-all:0.5"})
    assert "NVMe below ZeRO-3" in rules_found("deepspeed", {"strategy": "zero2@nvme:0.5"})


def test_what_is_updated_in_backward_may_accumulate_here() -> None:
    """Terrazzo updates a unit when its last micro-batch has been reduced."""
    rule = "accumulation with the optimizer in backward"
    assert rule not in rules_found("terrazzo optimizer_in_backward", {"micro_batches": 2})


def test_a_model_of_one_block_is_warned_of_and_not_refused() -> None:
    """It trains: its one unit is gathered at once. FSDP wrapped so is a mistake that its docs warn of."""
    setup = setup_of({"model": ONE_UNIT})
    assert runnable(setup)
    assert "refuse" in {finding.severity for finding in findings(replace(setup, framework=Framework("fsdp2")))}


def test_refusals_come_before_warnings() -> None:
    found = findings(setup_of({"precision": "fp8", "gpu": "a100", "model": "falcon-7b", "cp": 2, "prefetch": 0}))
    assert [finding.severity for finding in found] == ["refuse", "planned", "warn"]


def test_what_the_engine_runs_is_runnable_and_what_it_only_plans_is_not() -> None:
    assert runnable(setup_of({}))
    assert runnable(setup_of({"prefetch": 0}))  # a warning
    assert runnable(setup_of({"tp": 2}))
    assert not runnable(setup_of({"pp": 2}))
    assert all(runnable(setup_of({"strategy": f"zero3@{offload}"})) for offload in OFFLOADS)


def test_a_healthy_setup_has_no_findings() -> None:
    assert findings(setup_of({"gpus": 64, "model": "llama3-70b"})) == ()


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp2", "megatron"])
def test_what_each_peer_is_made_for_passes(framework: str) -> None:
    strategy = "zero1" if framework == "megatron" else "zero3"
    found = findings(setup_of({"strategy": strategy, "framework": framework}))
    assert [finding.rule for finding in found if finding.severity != "warn"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("deepspead", "Did you mean 'deepspeed'"), ("fsdp2@new", "not numbers and dots"), ("fsdp2@", "not numbers")],
)
def test_an_unknown_framework_or_version_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Framework.parse(text)


def test_a_16_bit_dtype_is_what_makes_16_bit_masters() -> None:
    setup = setup_of({})
    half = replace(setup, precision=replace(setup.precision, master=torch.float16))
    assert "16-bit master weights" in {finding.rule for finding in findings(half)}


def test_16_bit_masters_that_are_rounded_stochastically_lose_no_updates() -> None:
    setup = setup_of({"precision": "bf16-pure"})
    precision = replace(setup.precision, moments="int8")
    for rounding, warned in (("nearest", True), ("stochastic", False), ("remainder", False)):
        rounded = replace(setup, precision=replace(precision, rounding=rounding))
        assert ("16-bit master weights" in {finding.rule for finding in findings(rounded)}) is warned


def test_a_finding_is_no_warning_too_in_the_json() -> None:
    found = estimate(setup_of({"pp": 2, "strategy": "zero1", "global_batch": 64, "model": OURS}))
    report = Answer(found, estimate).report()
    assert [each.rule for each in report.findings] == ["pipeline parallelism"]
    assert not set(report.warnings) & set(map(str, found.findings))
    assert str(found).count("Pipelines have run on CPUs alone") == 1


def test_no_module_hides_behind_a_function_of_its_name() -> None:
    """`import terrazzo.planner.x as m` gives what the package calls x."""
    package = importlib.import_module("terrazzo.planner")
    below = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not below & set(package.__all__)
