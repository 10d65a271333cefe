"""What a configuration means to the planner, which runs it refuses before they start, and how a run ends."""

from __future__ import annotations

import functools
import html
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import terrazzo as tz
from terrazzo.config import config_from_dict, load_config
from terrazzo.engine import PRECISIONS
from terrazzo.engine.optim.stock.elementwise import ELEMENTWISE
from terrazzo.engine.optim.stock.probe import OptimizerProbe
from terrazzo.errors import BadInput
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.model.modules import shape_of_module
from terrazzo.planner.timing.attention import attention_flops
from terrazzo.planner.timing.compute import flops_per_token
from terrazzo.telemetry import available_host_bytes, resident_bytes
from terrazzo.train.model.causal_lm import num_flops_per_token
from terrazzo.train.model.decoder import Decoder
from terrazzo.train.model.prepare import decoder_config, prepare_model
from terrazzo.train.planning import as_setup as planning
from terrazzo.train.planning import run_estimate as promise
from terrazzo.train.planning.as_setup import executed_share, run_flops_per_token, setup_of
from terrazzo.train.planning.run_estimate import estimate_run, traced_memory
from terrazzo.train.preflight import device_memory as fit
from terrazzo.train.preflight.device_memory import check_plan
from terrazzo.train.report import log_window, summary
from terrazzo.train.report.summary import Pace, summary_lines, utilisation
from terrazzo.train.start_trainer import start_training
from tests.helpers import programs

GIB = 2**30
ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {"model": {"dim": 64, "layers": 3, "heads": 4, "vocab_size": 128}, "launch": {"device": "cpu"}}
HOST = Cluster(Device("host", kind="cpu", memory_bytes=GIB))


def config(**sections: Any) -> Any:
    merged = {**BASE, **sections, "model": {**BASE["model"], **sections.get("model", {})}}
    return config_from_dict({**merged, "launch": {**BASE["launch"], **sections.get("launch", {})}})


# -- setup_of ----------------------------------------------------------------------------------------------------------


def test_every_section_reaches_the_planner() -> None:
    found = setup_of(
        config(
            plan={"name": "hybrid_shard", "mesh": {"dp_replicate": 2}, "prefetch": 3},
            precision={"name": "bf16", "moments": "bf16"},
            batch={"global_batch": 32, "micro_batch": 2, "sequence_length": 64},
            optimizer={"name": "Adam", "options": {"amsgrad": True}},
            train={"activation_checkpointing": "every_3", "compile": True},
        ),
        4,
        HOST,
    )
    assert found.mesh == Mesh(dp_replicate=2, dp_shard=2)
    assert (found.plan.name, found.prefetch, found.compile) == ("hybrid_shard", 3, True)
    assert (found.sequence, found.micro_batch, found.micro_batches, found.global_batch) == (64, 2, 4, 32)
    assert (found.checkpointing, found.every) == ("full", 3)
    assert found.precision == replace(PRECISIONS["bf16"], moments=torch.bfloat16)
    assert found.matmul == "bf16"
    assert (found.optimizer.moments, found.optimizer.fixed_bytes) == (3, 4)
    assert found.cluster == Cluster(replace(HOST.device, memory_bytes=GIB // 4, per_node=4), 4)


@pytest.mark.parametrize(("precision", "matmul"), [("fp32", "fp32"), ("bf16-pure", "bf16"), ("fp16", "fp16")])
def test_the_matrix_format_is_what_is_computed_in(precision: str, matmul: str) -> None:
    assert setup_of(config(precision=precision), 1, HOST).matmul == matmul


@pytest.mark.parametrize(
    "model", [{}, {"tie_embeddings": False, "kv_heads": 2}, {"layers": 1}, {"ffn_dim": 80, "dropout": 0.1}]
)
def test_the_decoders_shape_is_that_of_its_modules(model: dict[str, Any]) -> None:
    settings = config(model=model)
    shape = setup_of(settings, 1, HOST).model
    built = prepare_model(settings)
    assert shape.numel == sum(parameter.numel() for parameter in built.parameters())
    assert shape.matmul_numel == decoder_config(settings).matmul_numel
    assert (shape.layers, shape.computes) == (model.get("layers", 3), True)
    assert len(shape.units) == 2  # the root, and the blocks, also where there is one
    measured = shape_of_module(built)
    for ours, theirs in zip(shape.units, measured.units, strict=True):
        assert ours.count == theirs.count
        assert {(t.name, t.shape) for t in ours.tensors} == {(t.name, t.shape) for t in theirs.tensors}


def test_windows_reach_the_planner_and_count_as_the_model_counts_them() -> None:
    attention = {"window": 64, "stride": 16, "full_every": 2}
    settings = config(model={"layers": 4, "attention": attention}, batch={"sequence_length": 256})
    setup = setup_of(settings, 1, HOST)
    blocks = [(unit.count, unit.block.window, unit.block.stride) for unit in setup.model.repeated if unit.block]
    assert blocks == [(2, 64, 16), (2, None, None)]
    assert flops_per_token(setup.model, setup.sequence) == num_flops_per_token(prepare_model(settings), 256)
    longer = {"sequence_length": 8192, "micro_batch": 1}
    flops = []
    for model in ({"attention": {"window": 64}}, {}):
        setup = setup_of(config(model=model, batch=longer), 1, HOST)
        flops.append(attention_flops(setup, setup.model.repeated[0].block))
    assert flops[0] == pytest.approx(flops[1] * 2 * 64 / 8192, rel=0.01)


FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "mistral": ({"sliding_window": 64}, 4 * 2 * 32 * 64),
    "gemma3_text": ({"sliding_window": 64, "head_dim": 16, "layer_types": None}, 4 * 64 * (5 * 64 + 512)),
    "deepseek_v3": (
        {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
        | {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        2 * 2 * 4 * (24 + 12) * 512,
    ),
    "gpt2": ({"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}, 4 * 2 * 32 * 512),
}
"""What a config has beside the usual keys, and forward FLOPs of its attention, a token, by hand."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_runs_flops_are_those_of_its_models_products(kind: str, tmp_path: Path) -> None:
    """Beside the model that transformers builds: 6 for each element of a matrix that a token meets, and attention."""
    keys, attention = FAMILIES[kind]
    layers = 6 if kind == "gemma3_text" else 2
    usual = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    values = {"model_type": kind, **usual, "num_key_value_heads": 4, "vocab_size": 128, **keys}
    (tmp_path / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 512}))
    batch = {"global_batch": 1, "micro_batch": 1, "sequence_length": 512}
    given = config_from_dict({"model": {"kind": "huggingface", "path": str(tmp_path)}, "batch": batch})
    model = prepare_model(given)
    met = 0.0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_matrix = weight is not None and weight.dim() == 2 and "Embedding" not in type(module).__name__
        met += weight.numel() if is_matrix else 0
        for stack in ("gate_up_proj", "down_proj"):
            if isinstance(each := getattr(module, stack, None), torch.nn.Parameter):
                met += each.numel() * model.config.num_experts_per_tok / each.shape[0]
    assert run_flops_per_token(given, model) == round(6 * met + 3 * attention)


def test_a_traced_windowed_model_is_all_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step holds is that of the run's own tiles, with documents too."""
    attention = {"window": 16, "full_every": 2}
    for data in ({}, {"attention": "document"}):
        deep = config(model={"layers": 3, "attention": attention}, batch={"sequence_length": 64}, data=data)
        found = estimate_run(deep, 2, HOST).memory
        assert {term.formula for term in found.terms} == {"memory.traced"}


def test_units_of_the_users_own_are_not_traced() -> None:
    """A trace needs the units that it is put on; formulas go by those that the engine would find."""
    same, other = (config(plan={"name": "zero3", "units": units}) for units in (["Block"], ["FeedForward"]))
    setup = setup_of(other, 1, HOST)
    assert setup == setup_of(same, 1, HOST)
    assert traced_memory(same, setup) is not None
    assert traced_memory(other, setup) is None
    assert estimate_run(other, 1, HOST).memory.allocated_bytes == memory_of(setup).allocated_bytes


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((kind.__name__, {}) for kind in ELEMENTWISE),
    *((name, {"amsgrad": True}) for name in ("Adam", "AdamW")),
    ("SGD", {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Lion", {}),
    ("AdEMAMix", {"warmup_steps": 10}),
]


@pytest.mark.parametrize(("name", "options"), sorted(OPTIONS, key=str), ids=str)
def test_what_each_optimizer_keeps_is_known(name: str, options: dict[str, Any]) -> None:
    """The table against a step of the class itself."""
    found = setup_of(config(optimizer={"name": name, "options": options}), 1, HOST).optimizer
    kind = getattr(torch.optim, name, None) or getattr(tz.optim, name)
    probe = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1, **options)
    specs = OptimizerProbe(probe, probe.param_groups[0], torch.device("cpu")).template().values()
    assert found.moments == sum(spec.per_element for spec in specs)
    assert found.fixed_bytes == sum(spec.fixed_bytes for spec in specs)
    assert found.decays == ("weight_decay" in probe.defaults)


def test_what_muon_keeps_of_matrices_and_of_the_rest_is_known() -> None:
    found = setup_of(config(optimizer={"name": "Muon"}), 1, HOST).optimizer
    probe = tz.optim.Muon([nn.Parameter(torch.zeros(2, 2))], [nn.Parameter(torch.zeros(2))])
    kept = [OptimizerProbe(probe, group, torch.device("cpu")).template().values() for group in probe.param_groups]
    assert found.matrices is not None
    assert [found.matrices.moments, found.moments] == [sum(spec.per_element for spec in each) for each in kept]
    assert [0, found.fixed_bytes] == [sum(spec.fixed_bytes for spec in each) for each in kept]


def test_an_optimizer_that_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(BadInput, match="LBFGS cannot run on flat shards"):
        setup_of(config(optimizer={"name": "LBFGS"}), 1, HOST)


def test_a_hugging_face_folder_is_read_and_not_built(tmp_path: Path) -> None:
    values = {
        "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = setup_of(config_from_dict({"model": {"kind": "huggingface", "path": str(tmp_path)}}), 1, HOST).model
    assert (shape.layers, shape.vocab) == (2, 61)


def test_a_run_on_cpus_is_one_on_a_host_of_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Cluster(Device("device", memory_bytes=80 * GIB), 8, host_memory_bytes=512 * GIB)
    monkeypatch.setattr(planning, "this_machine", lambda: gpus)
    found = setup_of(config(), 2).cluster
    assert (found.device.kind, found.device.memory_bytes, found.count) == ("cpu", 256 * GIB, 2)


def test_measured_mfu_is_of_the_peak_that_the_promise_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the format that the run computes in, not of bf16 whatever it does."""
    peaks = {"bf16": 8e14, "fp32": 5e13}
    monkeypatch.setattr(
        log_window, "this_machine", lambda: Cluster(Device("device", memory_bytes=80 * GIB, peak_flops=peaks))
    )
    for precision, peak in (("fp32", 5e13), ("bf16", 8e14), ("fp16", None)):
        assert log_window.peak_flops(config(precision=precision)) == peak


@pytest.mark.parametrize(("mode", "wrapped"), [("none", 0), ("full", 1), ("every_2", 2)])
def test_what_is_computed_again_is_what_torch_counts(mode: str, wrapped: int) -> None:
    """Beside the same model without: HFU is so many times MFU."""
    sections = {"model": {"layers": 4}, "train": {"activation_checkpointing": mode}}
    model = Decoder(decoder_config(config(**sections, batch={"sequence_length": 64})))
    tokens = torch.zeros(2, 64, dtype=torch.int64)

    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
        return counter.get_total_flops()

    alone = counted()
    for block in model.blocks[::wrapped] if wrapped else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    given = config(**sections, batch={"global_batch": 2, "micro_batch": 2, "sequence_length": 64})
    share = executed_share(given, 1, model.num_flops_per_token(64))
    assert share == pytest.approx(counted() / alone, rel=0.02)
    assert utilisation(5e12, share, 1e13) == {"mfu": 0.5, "hfu": pytest.approx(0.5 * counted() / alone, rel=0.02)}
    assert executed_share(given, 1, 0) is None
    assert utilisation(5e12, share, None) == {"mfu": None, "hfu": None}


def test_ranks_on_cpus_share_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its part of the memory, and all of them are one host."""
    host = Cluster(Device("host", kind="cpu", memory_bytes=12 * GIB, per_node=1))
    monkeypatch.setattr(planning, "this_machine", lambda: host)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert estimate_run(config(), 4).memory.capacity_bytes == 3 * GIB
    assert estimate_run(config(), 4, host).memory.capacity_bytes == 3 * GIB
    assert setup_of(config(), 4).cluster.nodes == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert estimate_run(config(), 4).memory.capacity_bytes == 6 * GIB
    assert setup_of(config(), 4).cluster.nodes == 2


# -- refusals ----------------------------------------------------------------------------------------------------------


def free(monkeypatch: pytest.MonkeyPatch, count_bytes: float | None) -> None:
    monkeypatch.setattr(fit, "available_host_bytes", lambda: None if count_bytes is None else int(count_bytes))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_states_that_cannot_fit_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 16 * GIB)
    large = config(model={"dim": 4096, "layers": 32, "heads": 32}, plan="zero1", precision="fp32")
    with pytest.raises(BadInput) as refused:
        check_plan(large, 2)
    said = str(refused.value)
    parts = ("needs about", "8.00 GiB (8.59 GB)", "Largest: ", "weights 2", "plan=zero3", "launch.ignore_planner=true")
    for part in parts:
        assert part in said, part


def test_where_residuals_are_largest_error_feedback_is_what_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan splits it, and no disk holds it."""
    free(monkeypatch, 16 * GIB)
    codes = {"name": "bf16", "quantized_reduce": "int4", "error_feedback": True}
    large = config(
        model={"dim": 4096, "layers": 32, "heads": 32}, batch={"global_batch": 16}, plan="zero2", precision=codes
    )
    with pytest.raises(BadInput, match=r"Largest: residuals .*Use precision\.error_feedback=false") as refused:
        check_plan(large, 16)
    assert not any(edit in str(refused.value) for edit in ("nvme", "plan=zero3"))


def test_activations_are_refused_only_beyond_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = config(batch={"global_batch": 64, "micro_batch": 32, "sequence_length": 512})
    needed = memory_of(setup_of(wide, 2)).allocated_bytes
    free(monkeypatch, 2 * needed / 1.2)
    assert any("it may not fit" in note for note in check_plan(wide, 2))
    free(monkeypatch, 2 * needed / 1.5)
    with pytest.raises(BadInput, match=r"train\.activation_checkpointing=full or batch\.micro_batch=16"):
        check_plan(wide, 2)


def test_more_is_left_to_doubt_than_estimates_were_wrong_by() -> None:
    """On published runs, as the accuracy table has it."""
    table = json.loads((ROOT / "benchmarks/planner/results/accuracy.json").read_text())
    assert 1 + table["memory"]["all"]["p90"] < fit.DOUBT


def test_a_model_of_one_block_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one block is a unit, and the first of two, which are not there both, is recomputed."""
    free(monkeypatch, 8 * GIB)
    one = config(model={"layers": 1}, plan="zero3", train={"activation_checkpointing": "every_2"})
    check_plan(one, 2)
    assert setup_of(one, 2).checkpointed_share == 1


def test_what_refuses_a_run_does_not_import_a_compiler_and_closed_forms_no_framework() -> None:
    """torch._dynamo takes a second, which the ranks have to wait for and the launcher has not."""
    program = (
        "import sys\nfrom terrazzo.planner.model.loading import model_shape\n"
        "model_shape('llama3-8b'), model_shape(7e9)\n"
        "assert 'transformers' not in sys.modules\n"
        "from terrazzo.train.preflight import check\n"
        "from terrazzo.config import load_config\n"
        "for overrides in ([], ['model.layers=1']):\n"
        f"    check(load_config({str(ROOT / 'examples/quickstart.yaml')!r}, overrides), 2)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)


def test_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config()
    states = memory_of(setup_of(small, 8)).allocated_bytes
    free(monkeypatch, 4 * states)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_plan(small, 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(BadInput, match="share of this machine's free memory"):
        check_plan(small, 8)


def test_what_is_not_known_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, None)
    check_plan(config(model={"dim": 4096, "layers": 32, "heads": 32}), 2)
    free(monkeypatch, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "hidden_size": 32}))
    strange = config_from_dict({"model": {"kind": "huggingface", "path": str(tmp_path)}, "launch": {"device": "cpu"}})
    assert "not one that the planner knows" in check_plan(strange, 2)[0]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    check_plan(strange, 2)
    with pytest.raises(BadInput):
        check_plan(config(), 2)
    notes = check_plan(config(launch={"ignore_planner": True}), 2)
    assert notes[-1].startswith("plan: started all the same: This run needs about")


def test_the_gate_stands_before_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 that nothing scales: found by the planner's rules, whatever the memory."""
    free(monkeypatch, 64 * GIB)
    unscaled = {"name": "fp32", "compute": "fp16", "weight": "fp16"}
    with pytest.raises(BadInput, match="nothing scales the loss"):
        check_plan(config(precision=unscaled), 2)
    check_plan(config(precision=unscaled, launch={"ignore_planner": True}), 2)
    assert any("master weights" in note for note in check_plan(config(precision="bf16-pure"), 2))


def test_the_command_refuses_before_any_process_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text " * 1000)
    path = tmp_path / "config.yaml"
    raw = {**BASE, "data": {"source": str(tmp_path / "text.txt")}, "launch": {"ranks": 2, "device": "cpu"}}
    path.write_text(json.dumps({**raw, "log": {"folder": str(tmp_path / "run")}}))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("terrazzo.train.start_trainer.launch_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    words = ["model.dim=16384", "model.layers=64", "model.heads=64"]
    with pytest.raises(BadInput, match="This run needs about"):
        start_training(load_config(path, words), path, words)
    assert not (tmp_path / "run").exists()


def test_a_run_that_finds_no_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration that was planned for other machines may leave the device open."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("terrazzo.train.start_trainer.launch_ranks", lambda *_, **__: 0)
    path, large = tmp_path / "config.yaml", ["model.dim=16384", "model.layers=64", "model.heads=64"]
    path.write_text(json.dumps({"launch": {"ranks": 2}, "log": {"folder": str(tmp_path / "run")}}))
    with pytest.raises(BadInput, match="free memory, where torch sees no CUDA device, is "):
        start_training(load_config(path, large), path, large)
    assert start_training(load_config(path, []), path, []) == 0
    assert start_training(load_config(path, ["launch.device=cpu"]), path, ["launch.device=cpu"]) == 0
    lines = ["starting 2 CPU ranks (torch sees no CUDA device) ...", "starting 2 CPU ranks ..."]
    assert capsys.readouterr().out.splitlines() == lines


def test_what_the_machine_has_left_is_known_here() -> None:
    available, resident = available_host_bytes(), resident_bytes()
    assert available is not None
    assert resident is not None
    assert available > 0
    assert 10 * 2**20 < resident < 64 * GIB


@pytest.mark.parametrize("group", ["", "user.slice/job.scope"])
@pytest.mark.parametrize(
    ("line", "top", "names", "cache"),
    [
        ("0::", "", ("max", "current"), "inactive_file"),
        ("9:cpu,memory:", "cpu,memory", ("limit_in_bytes", "usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_the_limit_of_the_processs_own_control_group_counts(
    tmp_path: Path, line: str, top: str, names: tuple[str, str], cache: str, group: str
) -> None:
    """What it allows, less what is in use, but for pages of files that it would give back."""
    root, process = tmp_path / "sys", tmp_path / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(f"3:cpuset:/elsewhere\n{line}/{group}/below\n")
    assert available_host_bytes(root) is None
    (process.parent / "meminfo").write_text("MemAvailable:  1000 kB\nSwapFree: 24 kB\n")
    assert available_host_bytes(root) == 1024 << 10
    folder = root / "fs/cgroup" / top / group
    folder.mkdir(parents=True)
    for name, content in zip((*names, "stat"), ("900", "600", f"active_file 7\n{cache} 100\n"), strict=True):
        (folder / f"memory.{name}").write_text(content)
    assert available_host_bytes(root) == 400
    (folder / f"memory.{names[0]}").write_text("max")
    assert available_host_bytes(root) == 1024 << 10


# -- promises ----------------------------------------------------------------------------------------------------------


def test_memory_on_a_cpu_comes_from_the_models_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep models are traced by three layers: the same as tracing all of them."""
    for mode in ("none", "full"):
        deep = config(model={"layers": 5}, train={"activation_checkpointing": mode})
        found = estimate_run(deep, 2, HOST).memory
        assert {term.formula for term in found.terms} == {"memory.traced"}
        monkeypatch.setattr(promise, "TRACED_LAYERS", 5)
        promise._trace_of_pass.cache_clear()
        assert estimate_run(deep, 2, HOST).memory == found
        monkeypatch.undo()


def test_equal_passes_are_traced_once_and_none_where_states_alone_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """`terrazzo plan CONFIG` tries a dozen changes of a run that does not fit; a deep model is traced for seconds."""
    promise._trace_of_pass.cache_clear()
    traced, trace_of = [], promise._trace_of
    monkeypatch.setattr(promise, "_trace_of", lambda *of: [traced.append(of), trace_of(*of)][1])
    changes = ({}, {"precision": "bf16"}, {"precision": {"name": "bf16", "moments": "int8"}}, {"plan": "zero1"})
    asked = [config(**change, model={"layers": 5}) for change in changes]
    found = {estimate_run(each, ranks, HOST).memory.allocated_bytes for each in asked for ranks in (2, 4)}
    assert (len(traced), len(found)) == (2, 8), "in fp32 and in bf16"
    tiny = Cluster(replace(HOST.device, memory_bytes=1000), 2)
    other = config(batch={"micro_batch": 1})
    assert estimate_run(other, 2, tiny, one_of_many=True).memory.fits is False
    assert len(traced) == 2


def test_planning_draws_nothing_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that plans goes on as one that does not."""
    free(monkeypatch, 16 * GIB)
    before = torch.get_rng_state()
    dropped = config(model={"dropout": 0.5})
    check_plan(dropped, 2)
    estimate_run(dropped, 2, HOST)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpus_memory_comes_from_formulas() -> None:
    found = estimate_run(config(), 2, Cluster(Device("device", memory_bytes=GIB), 2)).memory
    assert "memory.traced" not in {term.formula for term in found.terms}
    assert found.capacity_bytes == GIB


# -- the summary -------------------------------------------------------------------------------------------------------


def test_the_first_log_step_counts_only_while_it_is_alone() -> None:
    pace = Pace()
    pace.add(2, 200, 10.0)
    assert (pace.steps, pace.tokens, pace.seconds) == (2, 200, 10.0)
    pace.add(4, 400, 1.0)
    pace.add(4, 400, 3.0)
    assert (pace.steps, pace.tokens, pace.seconds) == (8, 800, 4.0)


@pytest.mark.long  # what is promised and measured of a run: test_pipeline, test_offload, test_replicas_apart
@pytest.mark.processes
def test_a_run_ends_with_what_was_promised_of_it(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(1500)))
    path = tmp_path / "config.yaml"
    raw = {**BASE, "model": {"dim": 32, "layers": 2, "heads": 2}, "data": {"source": str(tmp_path / "text.txt")}}
    raw |= {"batch": {"global_batch": 4, "micro_batch": 4, "sequence_length": 32}, "train": {"steps": 4}}
    path.write_text(json.dumps({**raw, "log": {"folder": str(tmp_path / "run"), "every": 1, "tensorboard": False}}))
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment = {**kept, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = programs.run("-m", "terrazzo", "train", str(path), env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert said["kind"] == "summary"
    for state in ("state_bytes", "transient_bytes", "traffic_bytes"):
        assert said[f"{state}_promised"] == said[f"{state}_measured"], state
    promised = estimate_run(config_from_dict(raw), 1).memory.allocated_bytes
    assert said["peak_memory_bytes_promised"] == promised
    assert said["peak_memory_bytes_measured"] > promised  # tensors are a part of what is resident
    assert said["step_s_promised"] is None
    assert said["step_s_measured"] > 0
    assert said["tokens_per_s_measured"] > 0
    assert "plan: zero3 splits states over data ranks, but there is only one" in done.stdout
    assert summary.bytes_line(said) in done.stdout
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    for line in summary_lines(said):
        assert line in page


@pytest.mark.parametrize(
    "error", [BadInput("no such shape"), ZeroDivisionError(), MemoryError(), KeyError("x")], ids=repr
)
def test_a_promise_that_cannot_be_made_ends_no_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(summary, "estimate_run", fails)
    session: Any = SimpleNamespace(config=config(), ranks=SimpleNamespace(world_size=1))
    estimate, why = summary._promise(session)
    assert estimate is None
    assert why.startswith("no promise: ")
    assert len(why) > len("no promise: ")


SUMMARY: dict[str, Any] = {
    "state_bytes_promised": 3 * 2**20,
    "state_bytes_measured": 3 * 2**20,
    "transient_bytes_promised": 2**20,
    "transient_bytes_measured": 2**20,
    "host_bytes_promised": 0,
    "host_bytes_measured": 0,
    "disk_bytes_promised": 0,
    "disk_bytes_measured": 0,
    "offload": {"read_bytes": 0, "written_bytes": 0, "read_s": 0.0, "write_s": 0.0, "stepped_numel": 0, "step_s": 0.0},
    "traffic_bytes_promised": {"all_gather": 2**20},
    "traffic_bytes_measured": {"all_gather": 2**19},
    "round_steps": 1,
    "routed_bytes_if_even": 0,
    "routed_bytes_measured": 0,
    "peak_memory_bytes_promised": 2**24,
    "peak_memory_bytes_measured": 2**25,
    "base_memory_bytes": 2**28,
    "step_s_promised": 0.5,
    "tokens_per_s_promised": 2000.0,
    "mfu_promised": None,
    "calibrated": True,
    "step_s_measured": 0.25,
    "tokens_per_s_measured": 4000.0,
    "mfu_measured": 0.4,
    "learnt_share": 1.0,
    "no_promise": "",
}


def test_bytes_that_are_as_promised_are_said_once() -> None:
    sent = {"traffic_bytes_measured": SUMMARY["traffic_bytes_promised"]}
    assert summary.bytes_line({**SUMMARY, **sent}) == "states 3.00, transient 1.00, sent per step 1.00 MiB, as promised"
    there = {"disk_bytes_promised": 2**22, "disk_bytes_measured": 2**23}
    line = summary.bytes_line({**SUMMARY, **there})
    assert line.endswith("files 8.00 MiB (promised 4.00 MiB), sent per step 0.50 MiB (promised 1.00 MiB)")


def test_bytes_of_groups_that_train_by_themselves_are_an_average_and_those_of_a_meeting() -> None:
    sent = {f"traffic_bytes_{which}": {"all_reduce": 2**20} for which in ("promised", "measured")}
    sent |= {f"round_traffic_bytes_{which}": {"all_reduce": 5 * 2**20} for which in ("promised", "measured")}
    said = {**SUMMARY, **sent, "round_steps": 20}
    line = "states 3.00, transient 1.00, sent per step on average 0.25, sent where groups meet 1.00 MiB, as promised"
    assert summary.bytes_line(said) == line
    lines = [line for line in summary_lines(said) if line.startswith("all-reduce")]
    assert lines == [
        "all-reduce per step on average: promised 0.25 MiB, measured 0.25 MiB",
        "all-reduce where groups meet: promised 1.00 MiB, measured 1.00 MiB",
    ]
    more = {"round_traffic_bytes_measured": {"all_reduce": 10 * 2**20}}
    assert "on average 0.50 MiB (promised 0.25 MiB), sent where" in summary.bytes_line({**said, **more})


def test_what_is_sent_is_counted_over_rounds_that_have_ended() -> None:
    sent = summary.SentBytes()
    for step, count in enumerate([8, 1, 2, 1], 1):
        sent.add({"all_reduce": count}, ends_round=step % 3 == 0)
    assert (sent.step, sent.round) == ({"all_reduce": 1}, {"all_reduce": 11})


def test_a_summary_reads_promised_then_measured() -> None:
    promised = "0.5 s per step, 2,000 tok/s, MFU n/a (calibrated)"
    assert summary_lines(SUMMARY) == [
        "states: promised 3.00 MiB, measured 3.00 MiB",
        "transient peak: promised 1.00 MiB, measured 1.00 MiB",
        "all-gather per step: promised 1.00 MiB, measured 0.50 MiB",
        (
            "peak memory: promised 16.00 MiB, measured 32.00 MiB beyond the 256.00 MiB of the program itself; the "
            "promise counts tensors, what is measured also what libraries and malloc keep"
        ),
        f"pace: promised {promised}, measured 0.25 s per step, 4,000 tok/s, MFU 40.0%",
    ]
    usage = {
        "read_bytes": 3e9,
        "written_bytes": 2e9,
        "read_s": 2.0,
        "write_s": 0.0,
        "stepped_numel": 5e8,
        "step_s": 1.0,
    }
    routed = {"routed_bytes_if_even": 2**20, "routed_bytes_measured": 2**21}
    assert summary_lines({**SUMMARY, **routed})[3] == (
        "to experts of other ranks and back per step: 1.00 MiB if all were as busy, measured 2.00 MiB"
    )
    there = {"host_bytes_promised": 2**20, "host_bytes_measured": 2**21, "disk_bytes_promised": 2**22}
    assert summary_lines({**SUMMARY, **there, "disk_bytes_measured": 2**22, "offload": usage})[2:6] == [
        "host memory: promised 1.00 MiB, measured 2.00 MiB",
        "swap files, of this rank: promised 4.00 MiB, measured 4.00 MiB",
        "disk, of this rank: read 3.00 GB at 1.50 GB/s, wrote 2.00 GB at n/a GB/s",
        "optimizer step on the CPU: 0.50 G parameters/s",
    ]
    sent = {
        "traffic_bytes_promised": {"all_gather": 2**20, "tp all_gather": None},
        "traffic_bytes_measured": {"all_gather": 2**20, "tp all_gather": 2**21},
    }
    assert "tp all-gather per step: promised n/a, measured 2.00 MiB" in summary_lines({**SUMMARY, **sent})
    assert summary.bytes_line({**SUMMARY, **sent}).endswith("sent per step 1.00 MiB, as promised")
    unknown = {**SUMMARY, "step_s_promised": None, "calibrated": False, "no_promise": "no peak is known"}
    assert summary_lines(unknown)[-1].startswith("pace: promised n/a (no peak is known), measured 0.25 s")
    assert "promised n/a, measured" in summary_lines({**unknown, "peak_memory_bytes_promised": None})[-2]
