"""FSDPStrategy's arguments as LightningCLI takes them, against Lightning's own parser and signatures."""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any

import pytest

from terrazzo.dialects.formats.lightning.keys import FSDP, FSDP_BY_NAME, SHARED
from tests.dialects.peers import converted, described, findings_by_key, verdicts

CLASS = "lightning.pytorch.strategies.FSDPStrategy"
LAYER = "torch.nn.TransformerEncoderLayer"


def document(init_args: dict[str, Any] | None = None, **dict_kwargs: Any) -> dict[str, Any]:
    given = {"init_args": init_args, "dict_kwargs": dict_kwargs}
    return {"trainer": {"strategy": {"class_path": CLASS, **{key: value for key, value in given.items() if value}}}}


def stops(trainer: dict[str, Any]) -> bool:
    """Whether LightningCLI's parser stops at arguments of the Trainer."""
    pytest.importorskip("jsonargparse", reason="LightningCLI is Lightning with jsonargparse")
    from lightning.pytorch import Trainer
    from lightning.pytorch.cli import LightningArgumentParser

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_lightning_class_args(Trainer, "trainer")
        try:
            parser.parse_object({"trainer": trainer})
        except Exception:
            return True
    return False


TAKEN: dict[str, dict[str, Any]] = {
    "dtypes": document({"mixed_precision": {"param_dtype": "torch.bfloat16"}}),
    "classes": document({"auto_wrap_policy": [LAYER], "activation_checkpointing_policy": [LAYER]}),
    "two axes": document({"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2, 4]}),
    "others": document({}, forward_prefetch=True, sync_module_states=True, limit_all_gathers=True),
}
STOPPED = {
    "mixed_precision.param_dtype": document({"mixed_precision": {"param_dtype": "bfloat16"}}),
    "auto_wrap_policy": document({"auto_wrap_policy": ["TransformerEncoderLayer"]}),
    "activation_checkpointing_policy": document({"activation_checkpointing_policy": ["TransformerEncoderLayer"]}),
    "device_mesh": document({"device_mesh": [8]}),
    "forward_prefetch": document({"forward_prefetch": True}),
}


@pytest.mark.parametrize("label", TAKEN)
def test_what_lightning_cli_takes_has_no_findings(label: str) -> None:
    found = findings_by_key("lightning", TAKEN[label]).values()
    assert not [each for each in found if "LightningCLI" in each.text]
    assert not [each for each in verdicts("lightning", TAKEN[label]).values() if each.kind == "refused"]
    assert not stops(TAKEN[label]["trainer"])


@pytest.mark.parametrize("argument", STOPPED)
def test_what_lightning_cli_stops_at_is_found(argument: str) -> None:
    where = f"strategy.init_args.{argument}"
    found = findings_by_key("lightning", STOPPED[argument])[f"trainer.{where}"]
    assert "LightningCLI" in found.text
    assert where not in findings_by_key("lightning", STOPPED[argument]["trainer"])  # as the Trainer's own arguments
    assert stops(STOPPED[argument]["trainer"])


def test_arguments_of_fsdp_stand_in_dict_kwargs() -> None:
    """They mean the same there as among `init_args`, under the document's own keys."""
    told = document({"sharding_strategy": "SHARD_GRAD_OP"}, forward_prefetch=True, sync_module_states=True)
    description = described("lightning", told)
    assert description["prefetch.forward"].keys == ("trainer.strategy.dict_kwargs.forward_prefetch",)
    assert (description.value("prefetch.forward"), description.value("loading.broadcast")) == (1, True)
    wrong = verdicts("lightning", document({}, forward_prefetsh=True))["trainer.strategy.dict_kwargs.forward_prefetsh"]
    assert wrong.kind == "refused" and "'forward_prefetch'" in wrong.why
    text = findings_by_key("lightning", document({}, backward_prefetch="BACKWARD_POST"))
    assert "as text" in text["trainer.strategy.dict_kwargs.backward_prefetch"].text


SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "policy": ("fsdp2", {"module": [LAYER], "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}),
    "mesh": ("fsdp1", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2, 4], "auto_wrap_policy": [LAYER]}),
    "one axis": ("fsdp1", {"device_mesh": [8], "forward_prefetch": True, "sync_module_states": True}),
    "no prefetch": ("fsdp1", {"backward_prefetch": None}),
    "size": ("fsdp1", {"auto_wrap_policy": {"min_num_params": 1000}}),
    "ignored": ("fsdp1", {"ignored_states": ["norm"], "sharding_strategy": "SHARD_GRAD_OP"}),
}
LOST = {"size": "units.min_numel", "ignored": "units.ignored"}


@pytest.mark.parametrize("label", SOURCES)
def test_lightning_cli_takes_what_is_written(label: str) -> None:
    source, given = SOURCES[label]
    conversion = converted(source, "lightning", given, world=8)
    assert not conversion.faults and not stops(conversion.document["trainer"])
    strategy = conversion.document["trainer"]["strategy"]
    arguments = {} if strategy == "fsdp" else strategy.get("init_args", {})
    assert set(arguments) <= {*FSDP_BY_NAME, *FSDP, *SHARED}
    assert len(arguments.get("device_mesh", (2, 4))) == 2
    for path in (*arguments.get("mixed_precision", {}).values(), *arguments.get("auto_wrap_policy", ())):
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name)
    lost = conversion.before[LOST[label]].keys if label in LOST else ()
    told = [each.why for each in conversion.verdicts if each.key in lost]
    assert len(told) == len(lost) and all("in code" in why for why in told)


def test_classes_without_their_modules_are_told() -> None:
    document = {"auto_wrap_policy": ["LlamaDecoderLayer"]}
    (verdict,) = converted("fsdp1", "lightning", document, world=8).verdicts
    assert verdict.kind == "lossy" and "write the module of LlamaDecoderLayer in front" in verdict.why
    (verdict,) = converted("fsdp1", "lightning", {"auto_wrap_policy": [LAYER]}, world=8).verdicts
    assert verdict.kind == "renamed"


def test_the_arguments_that_are_named_are_fsdp_strategys() -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    named = list(inspect.signature(strategies.FSDPStrategy).parameters)
    assert set(named) - {"kwargs"} - set(SHARED) == {*FSDP, *FSDP_BY_NAME}


@pytest.mark.parametrize(("strategy", "export", "kind"), [("zero0", "hf", "lossy"), ("zero0", "terrazzo", "applied")])
def test_a_folder_of_hugging_face_is_no_file_of_lightnings(strategy: str, export: str, kind: str) -> None:
    source = {"plan": strategy, "checkpoint": {"save_format": export}}
    conversion = converted("terrazzo", "lightning", source)
    (verdict,) = [each for each in conversion.verdicts if each.key == "checkpoint.save_format"]
    assert verdict.kind == kind and (kind == "applied" or "save_pretrained" in verdict.why)
    back = converted("lightning", "terrazzo", {"trainer": {"strategy": "ddp", "max_steps": 3}})
    assert back.document["checkpoint"]["save_format"] == "hf"  # which has all that the file has
