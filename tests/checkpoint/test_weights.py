"""Full weights of sharded models, and their folders for transformers, against the plain models that they were."""

from __future__ import annotations

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.checkpoint.exporters import huggingface, new_folder
from terrazzo.checkpoint.storage.local import LocalStore
from terrazzo.engine import whole_weights
from terrazzo.engine.buckets.resting.buffer import Buffer, Space
from tests.engine.toys import EVERY_PLAN, Net, assert_equal, full_parameters, on_ranks, sharded, train
from tests.helpers.cover import places

transformers = pytest.importorskip("transformers")

TIERS = ("zero2@cpu", "zero3@cpu", "zero3@cpu-all", "zero3@nvme-all", "zero3@nvme:0.5")


def subject() -> Net:
    """Tied, frozen, and with a buffer in the middle."""
    base = Net()
    base.head.weight = base.embed.weight
    base.blocks[1].up.weight.requires_grad_(False)
    base.blocks[1].register_buffer("count", torch.tensor([3, 4]))
    return base


def kept(plan: str, folder: Path, **options: Any) -> tuple[Net, list[dict[str, Tensor]], dict[str, Tensor]]:
    """The plain model, and of each rank `full_state_dict`, at first and after two steps; and the latter gathered."""
    base = subject()
    ranks = 4 if plan in EVERY_PLAN else 2
    if "nvme" in plan:
        options["offload"] = tz.Offload(path=folder, direct=False)

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = sharded(base, plan, ranks, **options)
        first = tz.full_state_dict(model)
        train(model, optimizer, 2, rank)
        return first, tz.full_state_dict(model, keep=rank == 1), full_parameters(model)

    (first, none, trained), (nothing, later, _), *_ = on_ranks(ranks, body)
    assert none == nothing == {}
    return base, [first, later], trained


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", [*EVERY_PLAN, *TIERS])
def test_it_is_the_plain_models_state_dict(plan: str, tmp_path: Path) -> None:
    base, (first, later), trained = kept(plan, tmp_path)
    assert list(first) == list(later) == list(base.state_dict())
    assert_equal(first, base.state_dict())
    assert first["head.weight"] is first["embed.weight"]
    assert_equal({name: later[name] for name in trained}, trained)
    Net.load_state_dict(subject(), first)


@pytest.mark.parametrize("plan", ["zero1", "zero3", "zero3@cpu"])
def test_trained_weights_are_the_masters(plan: str, tmp_path: Path) -> None:
    base, (first, later), trained = kept(plan, tmp_path, precision="bf16")
    for name, value in base.state_dict().items():
        frozen = name == "blocks.1.up.weight"
        assert torch.equal(first[name], value.bfloat16() if frozen else value), name
    assert later["head.bias"].dtype == torch.float32
    assert_equal({name: later[name].bfloat16() for name in trained}, trained)


def test_no_more_than_one_unit_is_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    empty = Space.empty

    def noted(space: Space, axes: tuple[str, ...], dtype: torch.dtype) -> Buffer:
        alive.append(sum(each() is not None for each in made))
        buffer = empty(space, axes, dtype)
        made.append(weakref.ref(buffer.data))
        return buffer

    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3", 1)
        monkeypatch.setattr(Space, "empty", noted)
        for _name, values in whole_weights(model):
            del values

    on_ranks(1, body)
    assert alive == [0, 0, 0, 0]


def test_a_parameter_that_is_unknown_is_named() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        with pytest.raises(tz.BadInput, match=r"no parameter 'blocks\.0\.up\.wieght', 'x'.*'blocks\.0\.up\.weight'"):
            list(whole_weights(model, ["head.bias", "blocks.0.up.wieght", "x"]))

    on_ranks(2, body)


def test_the_state_dict_of_a_part_is_refused_and_names_the_call() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        with pytest.raises(tz.Misuse, match=r"'blocks\.0\.up\.weight'.*tz\.full_state_dict\(model\)"):
            model.blocks[0].state_dict()
        assert isinstance(model.state_dict(keep_vars=True)["head.bias"], nn.Parameter)
        whole, _ = sharded(Net(), "zero2")
        assert_equal(whole.state_dict(), Net.state_dict(whole))
        with pytest.raises(tz.Misuse, match="not sharded"):
            tz.full_state_dict(Net())

    on_ranks(2, body)


# -- folders for transformers ----------------------------------------------------------------------------------


def llama(tied: bool = False) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def saved(base: nn.Module, plan: str, folder: Path, ranks: int = 2, **options: Any) -> None:
    settings = {"precision": options.pop("precision", "fp32")}
    if "nvme" in plan:
        settings["offload"] = tz.Offload(path=folder.parent, direct=False)

    def body(rank: int) -> None:
        model, _ = sharded(base, plan, ranks, **settings)
        tz.save_pretrained(model, folder, **options)

    on_ranks(ranks, body)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("zero0", {}),
        ("zero1", {"precision": "bf16"}),
        ("zero3", {"max_shard_bytes": 5000}),
        ("hpz", {}),
        ("zero3@cpu", {"precision": "bf16", "dtype": torch.bfloat16}),
        ("zero3@nvme-all", {}),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_folder(plan: str, options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    base, out = llama(tied), tmp_path / "out"
    saved(base, plan, out, 4 if plan == "hpz" else 2, **options)
    base.save_pretrained(tmp_path / "theirs")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    dtype = options.get("dtype", torch.float32)
    assert_equal(again.state_dict(), base.to(dtype).state_dict())
    assert len(list(out.glob("*.safetensors"))) == (1 if "max_shard_bytes" not in options else len(_index(out)))
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "theirs"))
    assert ours == theirs | {"dtype": str(dtype).removeprefix("torch.")}
    assert (out / "generation_config.json").read_bytes() == (tmp_path / "theirs/generation_config.json").read_bytes()


def _index(out: Path) -> set[str]:
    return set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values())


def refused_on_all(base: nn.Module, out: Path, kind: type[Exception], words: str, **options: Any) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(base, "zero3")
        with pytest.raises(kind, match=words):
            tz.save_pretrained(model, out, **options)
        assert not out.exists() or not list(out.iterdir())

    on_ranks(2, body)


def test_what_cannot_be_written_is_refused_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused_on_all(Net(), tmp_path / "a", tz.BadInput, r"config=\{\.\.\.\}")
    wrong: list[tuple[str, Any]] = [("dtype", "bf16"), ("dtype", torch.int8), ("max_shard_bytes", "5GB"),
                                    ("max_shard_bytes", 0), ("config", {"a": {1}}), ("config", ["a"])]  # fmt: skip
    for name, value in wrong:
        options: dict[str, Any] = {"config": {}, name: value}
        refused_on_all(Net(), tmp_path / "a", tz.BadInput, f"{name} (is|cannot be)", **options)
    (tmp_path / "b").mkdir()
    refused_on_all(Net(), tmp_path / "b", tz.BadInput, "exists already", config={})
    large = copy.deepcopy(Net())
    nn.init.constant_(large.head.bias, 1e6)
    refused_on_all(large, tmp_path / "c", tz.BadInput, "range of torch.float16", config={}, dtype=torch.float16)
    with monkeypatch.context() as patch:
        transposed = lambda _, state: {name: each.T for name, each in state.items() if each.dim() == 2}  # noqa: E731
        patch.setattr(transformers.core_model_loading, "revert_weight_conversion", transposed)
        refused_on_all(llama(), tmp_path / "d", tz.BadInput, "cut or joined.*is no run of")

    def fails(path: Path) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "new_file", fails)
    refused_on_all(llama(), tmp_path / "e", tz.SaveFailed, "No space left")
    assert {each.name for each in tmp_path.iterdir()} == {"b"} and new_folder.new_file is not fails


def test_arguments_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    given: dict[str, list[Any]] = {"max_shard_bytes": [100, 200], "config": [{"a": 1}, {"a": 2}]}

    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        for name, values in given.items():
            options: dict[str, Any] = {"config": {}, name: values[rank]}
            with pytest.raises(tz.RanksApart, match=f"{name} is .* on rank 0 and .* on rank 1"):
                tz.save_pretrained(model, tmp_path / "a", **options)

    on_ranks(2, body)


def test_what_a_killed_export_left_is_removed_by_the_next_and_a_live_one_is_not(tmp_path: Path) -> None:
    dead = tmp_path / ".a.partial-00ff"
    dead.mkdir()
    with new_folder.new_folder(tmp_path / "b", 1) as live:
        assert not dead.exists()
        assert LocalStore(tmp_path).unfinished() == [live.name]
        with new_folder.new_folder(tmp_path / "c", 1):
            assert live.is_dir()
    assert {each.name for each in tmp_path.iterdir()} == {"b", "c"}
