"""Megatron-LM's arguments: what they mean there, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terrazzo.config import config_from_dict
from terrazzo.dialects.core.description import Setting, build
from terrazzo.dialects.formats.megatron.keys import KEYS, REMOVED, canonical
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import convert
from terrazzo.dialects.verbs.emit import to_text
from terrazzo.dialects.verbs.understand import understand
from terrazzo.documents import write_arguments
from terrazzo.engine import LossScaling
from tests.dialects.peers import (
    assert_agrees_or_says,
    converted,
    described,
    findings_by_key,
    inventory,
    precision,
    verdicts,
)

DOCUMENTS: dict[str, dict[str, Any]] = {
    "stages": {"pipeline-model-parallel-size": 2, "num-layers": 32, "num-layers-per-virtual-pipeline-stage": 4},
    "launched": {"torchrun": {"nproc-per-node": 8, "nnodes": 2, "rdzv-id": "x"}, "bf16": True},
    "ulysses": {"context-parallel-size": 4, "cp-comm-type": "a2a"},
    "fsdp": {"use-megatron-fsdp": True, "num-distributed-optimizer-instances": 2, "bf16": True},
    "offload": {"optimizer-cpu-offload": True, "optimizer-offload-fraction": 0.5, "bf16": True},
    "wsd": {"lr-decay-style": "WSD", "lr-wsd-decay-iters": 10, "train-iters": 100, "lr": 1e-3, "min-lr": 1e-4},
    "sgd": {"optimizer": "sgd", "sgd-momentum": 0.5, "adam-beta1": 0.9},
    "muon": {"optimizer": "muon", "lr": 1e-3, "muon-momentum": 0.95, "muon-nesterov": True, "muon-num-ns-steps": 6},
    "others": {"moe-grouped-gemm": True, "data-path": ["0.5", "a"], "fp8-format": "hybrid", "no-rope-fusion": True},
}
GROUPS = "num-distributed-optimizer-instances"


@pytest.mark.parametrize("label", DOCUMENTS)
@pytest.mark.parametrize("world", [None, 16])
def test_the_writer_says_what_the_reader_reads(label: str, world: int | None) -> None:
    assert_agrees_or_says("megatron", DOCUMENTS[label], world=world)


def test_every_argument_is_known_with_its_default() -> None:
    """All that version 0.20's parser has, and those that it stops at; a name without `=` is a switch."""
    theirs = {
        name: (takes, default) for name, takes, default in (each.partition("=") for each in inventory("megatron"))
    }
    assert len(theirs) > 850
    for name, (takes, default) in theirs.items():
        if name in REMOVED:
            continue
        ours = KEYS[canonical(name)].default
        assert ours == (_plain(default) if takes else False), name
    assert {key for key in KEYS if not key.startswith("torchrun.")} <= set(theirs)


def _plain(default: str) -> Any:
    """A default by its words: a number, text, or None for none."""
    try:
        return float(default)
    except ValueError:
        return default or None


@pytest.mark.parametrize("key", ["micro-batch-size", "--micro-batch-size", "micro_batch_size"])
def test_an_argument_is_read_however_it_is_spelt(key: str) -> None:
    assert described("megatron", {key: 4}).value("batch.micro_batch") == 4


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_what_it_stops_at_is_explained(key: str) -> None:
    outcome = verdicts("megatron", {key: 2})[key]
    assert (outcome.kind, REMOVED[key] in outcome.why) == ("refused", True)


@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "--tensor-model-parallel-size"])
def test_a_key_has_its_verdict_as_the_document_spells_it_and_of_two_the_last_counts(key: str) -> None:
    """As argparse has it of an option that is given twice."""
    assert verdicts("megatron", {key: 4})[key].target == "mesh.tp"
    document = {"tensor-model-parallel-size": 2, key: 4}
    assert described("megatron", document).value("mesh.tp") == 4
    first = verdicts("megatron", document)["tensor-model-parallel-size"]
    assert (first.kind, first.why) == ("refused", f"{key} says it too, and wins")
    assert described("megatron", document).document == {"tensor-model-parallel-size": 4}


def test_comments_keep_their_place_whatever_the_spelling(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text("# a run\n--micro-batch-size: 2\n--lr: 1.0e-4\n# small\n--train-iters: 100  # steps\n")
    understood = understand(source, "megatron")
    conversion = convert(understood, dialect("terrazzo"))
    text = to_text(conversion.document, "yaml", understood.loaded, conversion.verdicts)
    lines = text.splitlines()
    assert lines[0] == "# a run"
    (place,) = [number for number, line in enumerate(lines) if line.strip() == "# small"]
    assert lines[place + 1].strip() == "steps: 100  # steps"


def test_what_it_does_not_know_is_refused_with_the_nearest() -> None:
    assert "'micro-batch-size'" in verdicts("megatron", {"micro-batch-sise": 2})["micro-batch-sise"].why


@pytest.mark.parametrize(
    ("arguments", "row", "replicas"),
    [
        ({}, "zero0", 1),
        ({"use-distributed-optimizer": True}, "zero1", 1),
        ({"use-torch-fsdp2": True}, "zero3", 1),
        ({"use-torch-fsdp2": True, "torch-fsdp2-no-reshard-after-forward": True}, "shard_grad_op", 1),
        ({"use-megatron-fsdp": True}, "zero3", 1),
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "no_shard"}, "zero0", 1),
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim"}, "zero1", 1),
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grads"}, "zero2", 1),
        ({"use-megatron-fsdp": True, "num-distributed-optimizer-instances": 2}, "hybrid_shard", 2),
        ({"use-megatron-fsdp": True, "num-distributed-optimizer-instances": 2, "outer-dp-sharding-strategy": "optim"},
         "hfsdp", 2),
        ({"use-distributed-optimizer": True, "num-distributed-optimizer-instances": 2}, None, 2),
    ],
)  # fmt: skip
def test_rows(arguments: dict[str, Any], row: str | None, replicas: int) -> None:
    description = described("megatron", {"bf16": True, **arguments})
    assert (description.row, description.value("mesh.dp_replicate")) == (row, replicas)
    if row is None:
        assert description.value("sharding.optim") == "S"
    conversion = converted("megatron", "terrazzo", {"bf16": True, **arguments}, world=8)
    config_from_dict(conversion.document)
    back = converted("terrazzo", "megatron", conversion.document, world=8)
    assert [back.after.value(f"sharding.{state}") for state in ("weight", "between", "grad", "optim")] == [
        description.value(f"sharding.{state}") for state in ("weight", "between", "grad", "optim")
    ]


# storage, compute, reduce, accumulate, master, saved
@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        ({}, ["fp32"] * 6),
        ({"bf16": True}, ["bf16", "bf16", "fp32", "fp32", "fp32", "bf16"]),
        ({"bf16": True, "grad-reduce-in-bf16": True}, ["bf16", "bf16", "bf16", "bf16", "fp32", "bf16"]),
        ({"fp16": True}, ["fp16", "fp16", "fp16", "fp16", "fp32", "fp16"]),
        (
            {"fp16": True, "accumulate-allreduce-grads-in-fp32": True},
            ["fp16", "fp16", "fp32", "fp32", "fp32", "fp16"],
        ),
        ({"bf16": True, "main-grads-dtype": "bf16"}, ["bf16", "bf16", "bf16", "bf16", "fp32", "bf16"]),
    ],
)
def test_precision_is_pinned(arguments: dict[str, Any], row: list[str]) -> None:
    assert precision("megatron", arguments) == row


def test_bf16_is_the_preset_of_that_name() -> None:
    """fp32 sums and masters beside bf16 weights, which is what `precision: bf16` is."""
    document = converted("megatron", "terrazzo", {"bf16": True}).document
    assert document["precision"] == {"name": "bf16"}


def test_the_loss_scale_of_fp16_is_said() -> None:
    description = described("megatron", {"fp16": True, "hysteresis": 1})
    assert description.value("precision.loss_scaling") == LossScaling(init=2.0**32, interval=1000, hysteresis=1)
    for key, value in (
        ("initial-loss-scale", 1000),
        ("loss-scale-window", 0),
        ("hysteresis", 0),
        ("min-loss-scale", 0),
    ):
        assert verdicts("megatron", {"fp16": True, key: value})[key].kind == "refused"
    fixed = described("megatron", {"fp16": True, "loss-scale": 1024})
    assert (fixed.value("precision.loss_scaling"), fixed.value("precision.static_loss_scale")) == (None, 1024)
    written = converted("terrazzo", "megatron", {"precision": "fp16"}).document
    assert {key: written[key] for key in ("initial-loss-scale", "loss-scale-window", "hysteresis")} == {
        "initial-loss-scale": 65536.0,
        "loss-scale-window": 2000,
        "hysteresis": 1,
    }


def test_axes_go_there_and_back() -> None:
    arguments = {
        "torchrun": {"nproc-per-node": 32},
        "tensor-model-parallel-size": 2,
        "pipeline-model-parallel-size": 2,
        "context-parallel-size": 2,
        "expert-model-parallel-size": 4,
        "sequence-parallel": True,
        "num-virtual-stages-per-pipeline-rank": 2,
        "use-distributed-optimizer": True,
        "micro-batch-size": 1,
        "global-batch-size": 64,
    }
    conversion = converted("megatron", "terrazzo", arguments)
    assert {verdict.kind for verdict in conversion.verdicts} == {"renamed"}
    assert conversion.document["plan"] == {"name": "zero1", "mesh": {"tp": 2, "ep": 4, "pp": 2, "cp": 2}}
    assert conversion.document["parallel"]["pipeline"]["chunks"] == 2
    assert conversion.after.value("batch.accumulation") == 16
    back = converted("terrazzo", "megatron", conversion.document).document
    assert {key: back.get(key) for key in arguments} == arguments


def test_stages_of_a_rank_follow_from_layers() -> None:
    arguments = {"pipeline-model-parallel-size": 4, "num-layers-per-virtual-pipeline-stage": 2}
    assert described("megatron", {**arguments, "num-layers": 32}).value("parallel.chunks") == 4
    assert described("megatron", arguments, layers=16).value("parallel.chunks") == 2
    outcome = converted("megatron", "terrazzo", arguments).verdicts[1]
    assert (outcome.kind, "--model" in outcome.why) == ("lossy", True)


@pytest.mark.parametrize("mode", ["a2a", "p2p", "allgather", "a2a+p2p"])
def test_ways_to_share_a_sequence(mode: str) -> None:
    arguments = {"context-parallel-size": 4, "cp-comm-type": mode}
    description = described("megatron", arguments)
    assert (description.value("mesh.sp"), description.value("mesh.cp")) == ((4, 1) if mode == "a2a" else (1, 4))
    kind = {"a2a": "renamed", "a2a+p2p": "lossy"}.get(mode, "defaulted")
    assert {each.key: each.kind for each in converted("megatron", "terrazzo", arguments).verdicts}[
        "cp-comm-type"
    ] == kind


def test_schedule_and_optimizer() -> None:
    arguments = {
        "lr": 1e-3, "min-lr": 1e-4, "lr-decay-style": "cosine", "lr-warmup-fraction": 0.1, "lr-decay-iters": 1000,
        "train-iters": 2000, "weight-decay": 0.1, "adam-beta2": 0.95, "clip-grad": 0.0, "seed": 7,
    }  # fmt: skip
    conversion = converted("megatron", "terrazzo", arguments)
    assert conversion.document["schedule"] == {"name": "cosine", "warmup_steps": 100, "final_fraction": 0.1}
    train = conversion.document["train"]
    assert {key: train[key] for key in ("steps", "clip", "seed")} == {"steps": 2000, "clip": None, "seed": 7}
    assert conversion.document["optimizer"]["options"]["betas"] == [0.9, 0.95]
    assert {each.key for each in conversion.verdicts if each.kind == "lossy"} == {
        *("lr-decay-iters", "lr-decay-style", "lr-warmup-fraction"),  # of the last two a step's rate is another's
    }
    back = converted("terrazzo", "megatron", conversion.document).document
    assert (back["min-lr"], back["lr-warmup-iters"], back["clip-grad"]) == (pytest.approx(1e-4), 100, 0.0)


def test_betas_that_nobody_gave_stay_what_they_are_under_either_default() -> None:
    there = converted("terrazzo", "megatron", {"optimizer": {"name": "Lion"}}).document
    assert {key: value for key, value in there.items() if "beta" in key} == {"lion-beta1": 0.9, "lion-beta2": 0.99}
    here = converted("megatron", "terrazzo", {"optimizer": "lion"}).document
    assert here["optimizer"]["options"]["betas"] == [0.95, 0.98]
    given = {"optimizer": "lion", "lion-beta1": 0.9, "adam-beta2": 0.95}
    kinds = {key: verdict.kind for key, verdict in verdicts("megatron", given).items()}
    assert kinds["lion-beta1"] == "applied"
    assert described("megatron", given).value("optimizer.betas") == (0.9, 0.98)
    (idle,) = converted("megatron", "terrazzo", {"lion-beta1": 0.9}).verdicts
    assert idle.kind == "defaulted" and "the optimizer is not lion" in idle.why


def test_lengths_in_sequences_are_steps_of_the_batch() -> None:
    arguments = {"train-samples": 6400, "lr-warmup-samples": 640, "global-batch-size": 64}
    description = described("megatron", arguments)
    assert (description.value("schedule.total_steps"), description.value("schedule.warmup_steps")) == (100, 10)
    assert verdicts("megatron", {"train-samples": 6400})["train-samples"].kind == "applied"
    assert converted("megatron", "terrazzo", {"train-samples": 6400}).verdicts[0].kind == "lossy"


def test_lengths_in_sequences_that_are_no_step_are_refused_and_parts_of_one_are_lost() -> None:
    wsd = {"lr-decay-style": "WSD", "train-iters": 100, "global-batch-size": 64, "lr-wsd-decay-samples": 2}
    assert described("megatron", wsd).value("schedule.decay_steps") is None
    assert verdicts("megatron", wsd)["lr-wsd-decay-samples"].kind == "refused"
    short, odd = ({"train-samples": samples, "global-batch-size": 64} for samples in (63, 6401))
    assert verdicts("megatron", short)["train-samples"].kind == "refused"
    assert described("megatron", odd).value("schedule.total_steps") == 100
    assert verdicts("megatron", odd)["train-samples"].kind == "lossy"


@pytest.mark.parametrize(("scale", "mode"), [("original", "shape_scaling"), ("match_rms_adamw", None)])
def test_matrices_are_scaled_as_they_were(scale: str, mode: str | None) -> None:
    document = {"optimizer": {"name": "Muon", "lr": 0.01, "muon": {"adjust_lr": scale, "lr": 0.02}}}
    written = converted("terrazzo", "megatron", document)
    assert written.document.get("muon-scale-mode") == mode
    assert converted("megatron", "terrazzo", written.document).document["optimizer"]["muon"]["adjust_lr"] == scale


def test_a_way_of_scaling_that_megatron_has_not_is_named() -> None:
    description = build(
        "other", {"optimizer.name": Setting("Muon"), "optimizer.options": Setting({"muon.adjust_lr": "x"})}
    )
    outcomes = {verdict.key: verdict for verdict in dialect("megatron").write(description).verdicts}
    assert outcomes["optimizer.options"].kind == "lossy" and "scaled by x" in outcomes["optimizer.options"].why


@pytest.mark.parametrize(
    ("arguments", "mode", "lossy"),
    [
        ({"recompute-activations": True}, "selective", False),
        ({"recompute-granularity": "selective"}, "selective", False),
        ({"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}, "full", False),
        ({"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 4}, "full", True),
        ({"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1}, "full", True),
    ],
)
def test_activations(arguments: dict[str, Any], mode: str, lossy: bool) -> None:
    conversion = converted("megatron", "terrazzo", arguments)
    assert conversion.document["train"]["activation_checkpointing"] == mode
    assert any(each.kind == "lossy" for each in conversion.verdicts) is lossy
    assert converted("terrazzo", "megatron", conversion.document).after.value("activation_checkpointing.mode") == mode


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("fp8-format", "hybrid", "refused", "Transformer Engine"),
        ("rampup-batch-size", [32, 32, 1000], "refused", "one size"),
        ("decoupled-lr", 1e-4, "refused", "one learning rate"),
        ("qk-clip", True, "refused", "the numbers are others"),
        ("perform-rl-step", True, "refused", "supervised"),
        ("num-experts", 8, "lossy", "model.experts.count"),
        ("hidden-size", 4096, "lossy", "model.dim"),
        ("expert-tensor-parallel-size", 1, "lossy", "plan.mesh.ep"),
        ("load", "out", "lossy", "starts from"),
        ("overlap-grad-reduce", True, "defaulted", ""),
        ("moe-grouped-gemm", True, "defaulted", ""),
        ("inference-max-requests", 4, "defaulted", ""),
    ],
)
def test_what_becomes_of_others(key: str, value: Any, kind: str, words: str) -> None:
    (outcomes,) = converted("megatron", "terrazzo", {key: value}).verdicts
    assert (outcomes.kind, words in outcomes.why) == (kind, True)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"bf16": True, "fp16": True}, "bf16"),
        ({"use-torch-fsdp2": True, "use-distributed-optimizer": True}, "use-torch-fsdp2"),
        ({"use-torch-fsdp2": True, "pipeline-model-parallel-size": 2}, "pipeline-model-parallel-size"),
        ({"overlap-param-gather": True, "use-distributed-optimizer": True}, "overlap-param-gather"),
        ({"num-virtual-stages-per-pipeline-rank": 2}, "num-virtual-stages-per-pipeline-rank"),
        ({"num-layers": 30, "pipeline-model-parallel-size": 4}, "num-layers"),
        ({**DOCUMENTS["stages"], "num-layers": 30}, "num-layers-per-virtual-pipeline-stage"),
        (
            {"num-layers": 30, "pipeline-model-parallel-size": 4, "account-for-loss-in-pipeline-split": False},
            "num-layers",
        ),
        ({"num-experts": 8, "tensor-model-parallel-size": 2}, "num-experts"),
        ({"seq-length": 1022, "context-parallel-size": 2}, "seq-length"),
        ({"use-megatron-fsdp": True}, "use-megatron-fsdp"),
        ({"save": "out"}, "save"),
        ({"recompute-granularity": "full"}, "recompute-granularity"),
        ({"train-iters": 1, "train-samples": 1}, "train-samples"),
        ({"optimizer-cpu-offload": True}, "optimizer-cpu-offload"),
        ({"lr-decay-style": "WSD", "train-iters": 10}, "lr-decay-style"),
        ({"lr-decay-style": "WSD", "train-samples": 10, "lr-wsd-decay-iters": 2}, "lr-decay-style"),
        ({"num-distributed-optimizer-instances": 2}, GROUPS),
        ({"num-distributed-optimizer-instances": 3, "use-distributed-optimizer": True}, GROUPS),
        ({"num-distributed-optimizer-instances": 2, "use-distributed-optimizer": True, "optimizer": "muon"}, GROUPS),
        ({"optimizer": "lion", "use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}, "use-megatron-fsdp"),
        ({"ckpt-format": "torch_dcp"}, "ckpt-format"),
        ({"ckpt-format": "torch", "use-torch-fsdp2": True}, "ckpt-format"),
        ({"use-torch-fsdp2": True}, "use-torch-fsdp2"),
    ],
)
def test_findings(arguments: dict[str, Any], key: str) -> None:
    assert findings_by_key("megatron", arguments, world=8)[key].level == "error"


@pytest.mark.parametrize("name", ["Muon", "Lion"])
def test_fsdp_is_not_written_beside_an_optimizer_that_it_is_not_run_with(name: str) -> None:
    for plan, runs in (("zero3", False), ("zero1", True)):
        document = {"plan": plan, "optimizer": {"name": name, "lr": 0.01}, "checkpoint": {"folder": "out"}}
        conversion = converted("terrazzo", "megatron", document, world=8)
        assert ("plan" not in {each.key for each in conversion.refused}) == (not conversion.faults) == runs


@pytest.mark.parametrize("off", [False, "false"])
def test_switches_that_are_off_go_with_all_others(off: Any) -> None:
    assert not findings_by_key("megatron", {"use-torch-fsdp2": off, "pipeline-model-parallel-size": 2})
    assert not findings_by_key("megatron", {"bf16": True, "fp16": off})


def test_what_it_cannot_do_is_refused_or_lost_by_name() -> None:
    document = {"plan": "zero3@nvme", "offload": {"path": "/x"}, "optimizer": {"name": "Adagrad"}}
    kinds = {each.key: each.kind for each in converted("terrazzo", "megatron", document, world=8).verdicts}
    assert kinds["optimizer.name"] == "refused"
    assert kinds["offload.path"] == "lossy"
    (verdict,) = converted("terrazzo", "megatron", {"plan": {"name": "hpz", "mesh": {"dp_replicate": 2}}}).verdicts[:1]
    assert verdict.kind == "lossy"


def test_a_script_is_read_and_one_is_written(tmp_path: Path) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(
        "ARGS=(--bf16 --lr 1e-4)\ntorchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --micro-batch-size 2\n"
    )
    understood = understand(file)
    assert understood.dialect.name == "megatron"
    assert understood.description.value("mesh.world") == 8
    conversion = converted("terrazzo", "megatron", {"plan": "zero1", "precision": "bf16", "launch": {"ranks": 4}})
    out = tmp_path / "run.sh"
    out.write_text(write_arguments(conversion.document, "pretrain_gpt.py"))
    again = understand(out).description
    assert (again.row, again.value("mesh.world"), again.value("precision.compute")) == ("zero1", 4, "bf16")


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"plan": {"weight": "D", "between": "-", "grad": "D", "optim": "D"}, "precision": "fp16"}, "plan.weight"),
        ({"plan": "zero0@cpu"}, "plan"),
    ],
)
def test_what_goes_into_no_script_is_not_written(document: dict[str, Any], key: str) -> None:
    """Combinations that it would stop at."""
    conversion = converted("terrazzo", "megatron", document, world=8)
    kinds = {each.key: each.kind for each in conversion.verdicts}
    assert kinds[key] in ("refused", "lossy")
    assert not {"use-torch-fsdp2", "optimizer-cpu-offload"} & set(conversion.document)


def test_its_own_fsdp_keeps_its_format_of_checkpoints() -> None:
    """Whatever the source's checkpoints are."""
    conversion = converted("deepspeed", "megatron", {"zero_optimization": {"stage": 3}, "train_batch_size": 8}, world=8)
    assert conversion.document["ckpt-format"] == "fsdp_dtensor"


def test_a_default_that_does_something_is_no_tuning() -> None:
    """Dropout is on by default there: said or not, a target that drops nothing gives other numbers."""
    arguments = {"num-layers": 2, "hidden-dropout": 0.1, "num-query-groups": 1}
    conversion = converted("megatron", "terrazzo", arguments)
    said = {each.key: (each.kind, each.tuning) for each in conversion.verdicts}
    assert said == dict.fromkeys(arguments, ("lossy", False))
    unsaid = {each.key: each.why for each in conversion.unsaid}
    assert all(f"{told} (in " in unsaid["num-layers"] for told in ("attention-dropout 0.1", "rotary-base 10000"))
    assert "hidden-dropout" not in str(unsaid)
    assert "moe-router-topk" not in str(unsaid)  # without experts it says nothing
    assert "attention-dropout" not in str(converted("megatron", "terrazzo", {"lr": 1e-3}).unsaid)


def test_a_lossy_key_of_several_settings_says_which_of_them() -> None:
    became = {each.key: each for each in converted("megatron", "terrazzo", {"bf16": True}).verdicts}
    assert became["bf16"].why.startswith("precision.saved: it is fp32 here")


@pytest.mark.parametrize(("told", "kind"), [({}, "lossy"), ({"muon-coefficient-type": "simple"}, "applied")])
def test_muons_coefficients_are_others_unless_simple(told: dict[str, Any], kind: str) -> None:
    arguments = {"optimizer": "muon", "lr": 1e-3, **told}
    became = {each.key: each for each in converted("megatron", "terrazzo", arguments).verdicts}
    assert became["optimizer"].kind == kind


KEPT_GATHERED = {"module": ["Block"], "reshard_after_forward": False}
"""Of Megatron-LM's ways to shard, torch's FSDP2 alone keeps weights gathered for backward."""


def test_gradients_under_torchs_fsdp2_have_the_dtype_of_products() -> None:
    """It gets a bf16 model and no policy: there is nothing that would make gradients wider."""
    document = KEPT_GATHERED | {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}}
    conversion = converted("fsdp2", "megatron", document)
    (lost,) = [each for each in conversion.unsaid if each.key == "precision.accumulate"]
    assert lost.why.endswith("in one dtype: bf16")
    assert "grad-reduce-in-bf16" not in conversion.document and conversion.after.value("precision.reduce") == "bf16"
    (policy,) = [each for each in conversion.verdicts if each.key == "mp_policy.reduce_dtype"]
    assert policy.kind != "lossy"


def test_a_tied_model_stays_tied_or_it_is_said() -> None:
    """Megatron-LM asserts untied embeddings beside torch's FSDP2."""
    untied = "untie-embeddings-and-output-weights"
    conversion = converted("fsdp2", "megatron", KEPT_GATHERED)
    assert conversion.document[untied] is True
    (note,) = [each for each in conversion.unsaid if each.target == untied]
    assert note.kind == "lossy" and "whose head is its embedding" in note.why
    known = converted("fsdp2", "megatron", KEPT_GATHERED, layers=2)
    assert known.document[untied] is True and not [each for each in known.unsaid if each.target == untied]
    tied = converted("fsdp2", "megatron", KEPT_GATHERED, layers=2, tied=True)
    (verdict,) = [each for each in tied.verdicts if each.key == "reshard_after_forward"]
    assert verdict.kind == "refused" and untied not in tied.document
