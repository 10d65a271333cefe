"""Adapters on sharded bases against plain PyTorch and peft in one process."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput
from terrazzo.integrations.peft import load_adapter, precision_of, prepare_adapters, save_adapter, save_merged
from tests.engine.four_bits import rounded
from tests.engine.toys import on_ranks
from tests.helpers.processes import Pool

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

ROOT = Path(__file__).parents[2]
STEPS = 4
TARGETS = ["q_proj", "down_proj"]


def on_two(pool: Pool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """On both ranks, with time for the imports of the first call."""
    return pool.run(function, *arguments, timeout_s=150.0)


def base_model(kind: str = "llama") -> nn.Module:
    """Of a few thousand parameters, the same every time."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":  # its linear layers hold their matrices the other way round
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False, **sizes)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, use_cache=False, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def adapted(base: nn.Module, **options: Any) -> Any:
    torch.manual_seed(4)
    settings = {"r": 4, "lora_alpha": 32, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(base, peft.LoraConfig(**settings))


def tokens() -> Tensor:
    return torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)


def train(model: Any, optimizer: Any, mine: slice, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens()[mine], labels=tokens()[mine]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def own_share() -> slice:
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


def sharded_run(plan: str, folder: Path, options: dict[str, Any], kind: str = "llama") -> tuple[list[float], list[int]]:
    """One rank: trains, saves both ways; losses, and bytes of weights, gradients and optimizer state."""
    model = adapted(base_model(kind), **options)
    model, optimizer = tz.shard(model, optimizer_of(model), plan=plan)
    losses = torch.tensor(train(model, optimizer, own_share()))
    dist.all_reduce(losses)
    save_adapter(model, folder / "adapter")
    if not options.get("modules_to_save"):
        save_merged(model, folder / "merged")
    bill = engine_of(model).bill
    return (losses / 2).tolist(), [bill.weight_bytes, bill.grad_bytes, bill.moments_bytes]


@pytest.mark.parametrize(
    ("plan", "options", "kind"),
    [
        pytest.param("zero0", {}, "llama", marks=pytest.mark.long),
        ("zero1", {"bias": "lora_only"}, "llama"),
        ("zero2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}, "gpt2"),
        pytest.param("zero3", {}, "llama", marks=pytest.mark.long),
        ("zero3", {"use_rslora": True, "modules_to_save": ["lm_head"]}, "llama"),
        pytest.param("zero3@cpu", {"target_modules": "all-linear"}, "llama", marks=pytest.mark.long),
    ],
)
def test_losses_adapters_and_merged_weights_are_those_of_one_process(
    two_processes: Pool, tmp_path: Path, plan: str, options: dict[str, Any], kind: str
) -> None:
    model = adapted(base_model(kind), **options)
    expected = train(model, optimizer_of(model), slice(0, 4))
    (losses, _), (again, _) = on_two(two_processes, sharded_run, plan, tmp_path, options, kind)
    assert losses == again == pytest.approx(expected, rel=2e-6)

    loaded = peft.PeftModel.from_pretrained(base_model(kind), tmp_path / "adapter")
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
    if options.get("modules_to_save"):
        return
    merged = type(base_model(kind)).from_pretrained(tmp_path / "merged").state_dict()
    for name, value in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(merged[name], value), name


def both_ways(folder: Path) -> bool:
    """One rank: an adapter saved under one plan is bitwise the same in peft and under another plan."""
    model, optimizer = (lambda m: tz.shard(m, optimizer_of(m), plan="zero3"))(adapted(base_model()))
    train(model, optimizer, own_share())
    with tz.gathered(model) as parameters:
        full = {name: value.detach().clone() for name, value in parameters.items()}
    save_adapter(model, folder / "adapter")
    alone = peft.PeftModel.from_pretrained(base_model(), folder / "adapter")
    other, _ = tz.shard(adapted(base_model()), None, plan="zero1")
    load_adapter(other, folder / "adapter")
    with tz.gathered(other) as parameters:
        same = [torch.equal(parameters[name], value) for name, value in full.items()]
    return all(same) and all(torch.equal(full[name], value) for name, value in alone.named_parameters())


def test_a_saved_adapter_is_bitwise_the_same_elsewhere(two_processes: Pool, tmp_path: Path) -> None:
    assert on_two(two_processes, both_ways, tmp_path) == [True, True]


def resumed(folder: Path) -> tuple[list[float], list[float]]:
    """One rank: losses of an uninterrupted run, and of one that goes on from a checkpoint after half of the steps."""
    model, optimizer = (lambda m: tz.shard(m, optimizer_of(m), plan="zero3"))(adapted(base_model()))
    whole = train(model, optimizer, own_share(), 2)
    tz.checkpoint.save(str(folder / "half"), model, optimizer, {})
    whole += train(model, optimizer, own_share(), 2)
    other, optimizer = (lambda m: tz.shard(m, optimizer_of(m), plan="zero3"))(
        adapted(base_model(), init_lora_weights=False)
    )
    tz.checkpoint.load(str(folder / "half"), other, optimizer)
    return whole[2:], train(other, optimizer, own_share(), 2)


def test_a_resumed_run_is_the_uninterrupted_one(two_processes: Pool, tmp_path: Path) -> None:
    for whole, again in on_two(two_processes, resumed, tmp_path):
        assert whole == again


def bills(plan: str) -> tuple[list[int], int, int]:
    """One rank: bytes of weights, gradients and optimizer state in bf16, measured ones of the states, and adapters."""
    model = adapted(base_model(), r=16)
    small = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    model, optimizer = tz.shard(model, optimizer_of(model), plan=plan, precision="bf16")
    train(model, optimizer, own_share(), 1)
    bill, (driver,) = engine_of(model).bill, engine_of(model).drivers
    states = [value for state in driver.optimizer.state.values() for value in state.values()]
    measured = sum(value.nbytes for value in states if isinstance(value, Tensor))
    return [bill.weight_bytes + bill.master_bytes, bill.grad_bytes, bill.moments_bytes], measured, small


def test_a_frozen_base_has_weights_only(two_processes: Pool) -> None:
    numel = sum(parameter.numel() for parameter in base_model().parameters())
    (bill, measured, small), _ = on_two(two_processes, bills, "zero3")
    weights, gradients, moments = bill
    padding = 1.25  # of tensors this small
    assert (2 * numel + 4 * small) / 2 <= weights <= (2 * numel + 4 * small) / 2 * padding  # adapters are kept in fp32
    assert 4 * small / 2 <= gradients <= 4 * small / 2 * padding
    assert moments == measured <= 8 * small / 2 * padding + 64


def on_meta(folder: Path) -> dict[str, tuple[bool, bool]]:
    """One rank: adapters of a base without memory; whether A and B are zero, and whether the base was drawn."""
    with torch.device("meta"):
        model = adapted(base_model())
    prepare_adapters(model)
    model, _ = tz.shard(model, None, plan="zero3")
    with tz.gathered(model) as parameters:
        return {name: (bool(value.any()), value.std().item() < 0.05) for name, value in parameters.items()}


def test_adapters_on_the_meta_device_begin_as_pefts_do(two_processes: Pool, tmp_path: Path) -> None:
    found, again = on_two(two_processes, on_meta, tmp_path)
    assert found == again
    for name, (drawn, narrow) in found.items():
        assert drawn != (".lora_B." in name), name
        if "_proj.base_layer" in name:
            assert narrow, name  # of the base's own distribution, of deviation 0.02
        if ".lora_A." in name:
            assert not narrow, name  # peft's is uniform up to 1 / sqrt(16)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")  # it is the bias that is tested
def test_each_adapter_on_the_meta_device_begins_as_its_own_config_says() -> None:
    with torch.device("meta"):
        model = adapted(base_model(), lora_bias=True)
        gaussian = peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights="gaussian")
        model.add_adapter("second", gaussian)
    prepare_adapters(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    for part in (layer.lora_A, layer.lora_B):
        for module in part.to_empty(device="cpu").values():
            for parameter in module.parameters():
                nn.init.ones_(parameter)
            torch.manual_seed(5)
            module._init_weights(module)
    assert not any(parameter.any() for parameter in layer.lora_B.parameters())
    assert layer.lora_B["default"].bias is not None
    for module, fill in zip(
        layer.lora_A.values(),
        (lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5), lambda weight: nn.init.normal_(weight, std=1 / 2)),
        strict=True,
    ):
        torch.manual_seed(5)
        assert torch.equal(module.weight, fill(torch.empty_like(module.weight)))
    model.peft_config["second"].init_lora_weights = False
    with pytest.raises(BadInput, match="adapter 'second' is another"):
        prepare_adapters(model)


def refusals(folder: Path) -> list[str]:
    """One rank: what each thing that cannot be done says."""
    said = []

    def refused(work: Any, *arguments: Any) -> None:
        with pytest.raises(BadInput) as caught:
            work(*arguments)
        said.append(str(caught.value))

    model, _ = tz.shard(adapted(base_model()), None, plan="zero3")
    save_adapter(model, folder / "adapter")
    refused(save_adapter, model, folder / "adapter")
    refused(save_adapter, model, folder / "other", "unknown")
    refused(load_adapter, model, folder / "nothing")
    refused(load_adapter, model, folder / ("nothing" if torch.distributed.get_rank() else "adapter"))
    wider, _ = tz.shard(adapted(base_model(), r=8), None, plan="zero3")
    refused(load_adapter, wider, folder / "adapter")
    scaled, _ = tz.shard(adapted(base_model(), lora_alpha=8), None, plan="zero3")
    refused(load_adapter, scaled, folder / "adapter")
    plain, _ = tz.shard(base_model(), None, plan="zero3")
    refused(save_adapter, plain, folder / "other")
    dora, _ = tz.shard(adapted(base_model(), use_dora=True), None, plan="zero3")
    refused(save_merged, dora, folder / "merged")
    return said


def test_what_cannot_be_done_is_refused_on_every_rank(two_processes: Pool, tmp_path: Path) -> None:
    first, second = on_two(two_processes, refusals, tmp_path)
    parts = [
        "exists already and is not replaced", "no adapter 'unknown'; it has ['default']",
        *["holds no adapter_model.safetensors"] * 2, "r is 4 there and 8 here", "lora_alpha is 32 there and 8 here",
        "LlamaForCausalLM has no adapters. Call get_peft_model", "merge_and_unload()",
    ]  # fmt: skip
    for said in (first, second):
        assert len(said) == len(parts)
        assert all(part in text for part, text in zip(parts, said, strict=True))


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_a_base_in_4_bits_is_merged_in_the_dtype_of_its_other_weights(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file

    base, precision = base_model(), replace(tz.Precision.named(name), frozen="nf4")
    start = adapted(copy.deepcopy(base), init_lora_weights=False)
    layer = start.get_base_model().model.layers[1].mlp.down_proj

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(start), None, "zero3", precision=precision)
        save_merged(model, tmp_path / "merged")

    on_ranks(2, body, timeout_s=60.0)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {precision.weight}
    wanted = rounded(layer.base_layer.weight.detach(), "nf4") + layer.get_delta_weight("default").detach()
    torch.testing.assert_close(merged["model.layers.1.mlp.down_proj.weight"], wanted.to(precision.weight))


def test_one_of_several_adapters_is_merged(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    start = adapted(base_model(), init_lora_weights=False)
    start.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj", "q_proj"], init_lora_weights=False))

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(start), None, "zero3")
        save_merged(model, tmp_path / "merged", "second")
        with pytest.raises(BadInput, match="no adapter 'third'"):
            save_merged(model, tmp_path / "other", "third")

    on_ranks(2, body, timeout_s=60.0)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in start.merge_and_unload(adapter_names=["second"]).state_dict().items():
        assert torch.equal(merged[name], value), name


def test_an_adapter_that_is_added_already_is_not_added_twice(tmp_path: Path) -> None:
    model = adapted(base_model(), init_lora_weights=False)
    model.merge_adapter()
    with pytest.raises(BadInput, match=r"q_proj has 'default' added.*unmerge_adapter\(\) before tz.shard"):
        prepare_adapters(model)

    def body(rank: int) -> None:
        sharded, _ = tz.shard(copy.deepcopy(model), None, "zero3")
        with pytest.raises(BadInput, match=r"unmerge_adapter"):
            save_merged(sharded, tmp_path / "merged")

    on_ranks(2, body, timeout_s=60.0)
    assert not (tmp_path / "merged").exists()
    model.unmerge_adapter()
    prepare_adapters(model)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_config_of_bitsandbytes_says_how_a_base_is_kept(as_mapping: bool) -> None:
    def read(**options: Any) -> tz.Precision:
        config = transformers.BitsAndBytesConfig(**options)
        return precision_of(config.to_dict() if as_mapping else config)

    usual = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    bf16 = tz.Precision.named("bf16")
    assert read(**usual) == replace(bf16, frozen="nf4")
    double = {**usual, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float16"}
    scaled = tz.Precision.named("fp16").loss_scaling
    assert scaled is not None
    assert read(**double) == replace(bf16, frozen="nf4-double", compute="fp16", loss_scaling=scaled)
    with pytest.raises(BadInput, match="set it to 'nf4'"):
        read(load_in_4bit=True)
    with pytest.raises(BadInput, match="does not have load_in_4bit"):
        read(load_in_8bit=True)
    with pytest.raises(BadInput, match="llm_int8_skip_modules names 'up_proj'"):
        read(**usual, llm_int8_skip_modules=["up_proj"])
    with pytest.raises(BadInput, match="bnb_4bit_compute_dtype is 'int8', expected one of fp32, bf16"):
        precision_of({**usual, "bnb_4bit_compute_dtype": "int8"})
    with pytest.raises(BadInput, match="precision_of was given None: pass a BitsAndBytesConfig"):
        precision_of(None)


def test_quantized_bases_and_prompts_are_refused() -> None:
    model = adapted(base_model())
    model.get_base_model().is_quantized = True
    with pytest.raises(BadInput, match=r"quantized already.*without a quantization_config"):
        prepare_adapters(model)
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(BadInput, match="add prompts"):
        prepare_adapters(peft.get_peft_model(base_model(), prompts))


def example(folder: Path) -> list[float]:
    """One rank of the example, in the process group that is there; the losses that it prints."""
    script = ROOT / "examples" / "integrations" / "peft_script.py"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), str(folder / "adapter")])
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(str(script), run_name="__main__")
    return [float(line.split()[-1]) for line in printed.getvalue().splitlines() if "loss" in line]


def test_the_example_trains_and_its_adapter_loads(two_processes: Pool, tmp_path: Path) -> None:
    losses, silent = on_two(two_processes, example, tmp_path)
    assert losses[-1] < losses[0]
    assert not silent
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.r, config.lora_alpha) == (8, 32)
