"""Held against Accelerate's own launcher and plugins: what they refuse, what they drop, what they make of a file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.accelerate.dialect import DIALECT
from terrazzo.dialects.formats.accelerate.keys import SECTIONS, TOP
from tests.helpers.examples import examples
from tests.helpers.launched import has_plugin, launched, plugin

DEEPSPEED, DYNAMO, FSDP, PARALLELISM = (
    SECTIONS[f"{name}_config"] for name in ("deepspeed", "dynamo", "fsdp", "parallelism")
)

pytest.importorskip("accelerate", reason="Accelerate's launcher is the oracle")

FUZZ = settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
BASE = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16"}


@pytest.fixture(autouse=True)
def _no_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refusals(document: dict[str, Any]) -> list[str]:
    reading = DIALECT.read(document)
    errors = [each.key for each in DIALECT.findings(reading, ReadingContext()) if each.level == "error"]
    return errors + [verdict.key for verdict in reading.verdicts if verdict.kind == "refused"]


# -- documents -----------------------------------------------------------------------------------------------------

_VALUES: dict[str, list[Any]] = {
    "fsdp_version": [1, 2, "2"],
    "fsdp_sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "hybrid_shard", 2, "3", None],
    "fsdp_reshard_after_forward": [True, False],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "no_wrap"],
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "A,B", None],
    "fsdp_min_num_params": [1000, 100_000_000],
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "backward_post", "NO_PREFETCH", None],
    "fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", None],
    "fsdp_ignored_modules": ["lm_head", None],
    "zero_stage": [0, 1, 2, 3],
    "offload_optimizer_device": ["none", "cpu", "nvme"],
    "offload_param_device": ["none", "cpu", "nvme"],
    "offload_optimizer_nvme_path": ["/nvme", "none"],
    "offload_param_nvme_path": ["/nvme"],
    "gradient_accumulation_steps": [1, 4],
    "gradient_clipping": [1.0, 0.5],
    "deepspeed_config_file": [None],
    "deepspeed_multinode_launcher": ["standard"],
    "dynamo_backend": ["INDUCTOR", "NO"],
    "dynamo_mode": ["default"],
}


def _value(name: str, default: Any) -> st.SearchStrategy[Any]:
    if name in _VALUES:
        return st.sampled_from(_VALUES[name])
    if isinstance(default, bool):
        return st.booleans()
    if name.endswith("_size"):
        return st.sampled_from([1, 2])
    return st.just(default if default is not None else "x")


@st.composite
def _section(draw: st.DrawFn, rows: dict[str, tuple[Any, str]], prefix: str = "") -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(rows)), unique=True, max_size=8))
    short = draw(st.booleans()) and prefix
    return {(name.removeprefix(prefix) if short else name): draw(_value(name, rows[name].default)) for name in names}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["FSDP", "FSDP", "DEEPSPEED", "MULTI_GPU"]))
    document: dict[str, Any] = {
        "distributed_type": kind,
        "num_processes": 8,
        "mixed_precision": draw(st.sampled_from(["no", "bf16", "fp16"])),
        "num_machines": 1,
    }
    if kind == "FSDP":
        document["fsdp_config"] = draw(_section(FSDP, "fsdp_"))
    if kind == "DEEPSPEED":
        document["deepspeed_config"] = draw(_section(DEEPSPEED))
    if draw(st.booleans()):
        document["parallelism_config"] = draw(_section(PARALLELISM))
    if draw(st.booleans()):
        document["dynamo_config"] = draw(_section(DYNAMO, "dynamo_"))
    return document


# -- tests ---------------------------------------------------------------------------------------------------------


@FUZZ
@given(document=documents())
def test_the_launcher_and_the_plugins_refuse_only_what_is_reported(
    document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        environment = launched(document, tmp_path_factory.mktemp("launch"))
        if has_plugin(document):
            plugin(environment)
    except Exception as error:
        found, message = refusals(document), f"{type(error).__name__}: {error}"
    else:
        found, message = ["nothing was refused"], ""
    assert found, f"Accelerate refuses it, the reader does not: {message}"


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_sections_drop_strangers_without_a_word(section: str, tmp_path: Path) -> None:
    document = {**BASE, section: {"no_such_key": 1}}
    verdict = next(each for each in DIALECT.read(document).verdicts if each.key.startswith(section))
    assert (verdict.kind, "drops it without a word" in verdict.why) == ("refused", True)
    assert launched(document, tmp_path).items() >= launched({**BASE, section: {}}, tmp_path).items()


def test_the_top_refuses_strangers(tmp_path: Path) -> None:
    document = {**BASE, "mixed_precison": "bf16"}
    with pytest.raises(ValueError, match="unknown keys"):
        launched(document, tmp_path)
    verdict = DIALECT.read(document).verdicts[-1]
    assert verdict.kind == "refused"
    assert "refuses the file. Did you mean 'mixed_precision'?" in verdict.why


def test_the_tables_have_every_key_of_the_launcher() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest: action.default for action in launch_command_parser()._actions}
    fields = set(ClusterConfig.__dataclass_fields__) - {*SECTIONS, "megatron_lm_config"}
    assert fields == set(TOP) - {"fp16", "dynamo_backend"}  # older spellings
    named = {name for name in flags if name.startswith(("fsdp_", "parallelism_config_", "fp8_", "dynamo_"))}
    named |= {name for name in flags if name.startswith(("deepspeed_", "zero", "offload_", "gradient_"))}
    known = {name for rows in SECTIONS.values() for name in rows}
    assert named <= known
    assert known - named == {"fsdp_ignored_modules", "mpirun_hostfile"}
    for name, default in flags.items():
        if name.startswith("fsdp_") and default is not None:
            assert str(FSDP[name].default).lower() == str(default).lower(), name
        if name.startswith("parallelism_config_"):
            assert PARALLELISM[name].default == default, name
        if name.startswith("fp8_"):
            stated = SECTIONS["fp8_config"][name].default
            assert str(stated).lower() == str(list(default) if isinstance(default, tuple) else default).lower(), name


@pytest.mark.parametrize("version", [1, 2])
def test_sections_at_their_defaults_are_as_without_them(version: int, tmp_path: Path) -> None:
    """What the launcher says to its ranks of FSDP and fp8, but for the switch and what has no default."""
    base = {**BASE, "mixed_precision": "fp8", "fsdp_config": {"fsdp_version": version}}
    for section, without in (("fsdp_config", {"fsdp_auto_wrap_policy", "fsdp_backward_prefetch"}), ("fp8_config", ())):
        rows = SECTIONS[section]
        stated = {name: row.default for name, row in rows.items() if row.default is not None and name not in without}
        stated |= {"fsdp_version": version} if section == "fsdp_config" else {}
        document = {**base, section: stated}
        assert DIALECT.read(document).description.plan == DIALECT.read(base).description.plan
        kinds = {verdict.kind for verdict in DIALECT.read(document).verdicts if verdict.key.startswith("fp8_config")}
        assert "lossy" not in kinds


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_version_1_shards_as_read(strategy: str, tmp_path: Path) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    document = {**BASE, "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": strategy}}
    made = plugin(launched(document, tmp_path))
    torchs = strategy if strategy != "HYBRID_SHARD_ZERO2" else "_HYBRID_SHARD_ZERO2"
    assert made.sharding_strategy is ShardingStrategy[torchs]
    rows = {"FULL_SHARD": "zero3", "NO_SHARD": "zero0"}
    assert DIALECT.read(document).description.row == rows.get(strategy, strategy.lower())


@pytest.mark.parametrize("reshard", [True, False])
def test_version_2_shards_as_read(reshard: bool, tmp_path: Path) -> None:
    document = {**BASE, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}}
    assert plugin(launched(document, tmp_path)).reshard_after_forward is reshard
    assert DIALECT.read(document).description.row == ("zero3" if reshard else "shard_grad_op")


@pytest.mark.parametrize("values", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "names", [("fsdp_offload_params", "offload_params"), ("offload_params", "fsdp_offload_params")]
)
def test_of_two_spellings_the_last_one_counts(
    names: tuple[str, str], values: tuple[bool, bool], tmp_path: Path
) -> None:
    document = {**BASE, "fsdp_config": {"fsdp_version": 2, **dict(zip(names, values, strict=True))}}
    offloads = launched(document, tmp_path)["FSDP_OFFLOAD_PARAMS"] == "true"
    reading = DIALECT.read(document)
    assert offloads == values[1] == (reading.description.value("offload.weight") == "cpu")
    first = {verdict.key: verdict for verdict in reading.verdicts}[f"fsdp_config.{names[0]}"]
    assert first.kind == ("renamed" if values[0] == values[1] else "refused")
    assert first.why.startswith(f"fsdp_config.{names[1]} says it too")


@pytest.mark.parametrize("size", [2, "2"])
def test_sizes_that_are_text_are_looked_at_as_numbers(size: Any) -> None:
    sizes = {"parallelism_config_dp_shard_size": 4, "parallelism_config_cp_size": 2, "parallelism_config_sp_size": size}
    assert "parallelism_config.parallelism_config_sp_size" in refusals({**BASE, "parallelism_config": sizes})


@pytest.mark.parametrize("word", ["SHARDED_STATE_DICT", "sharded_state_dict", 3, None])
def test_shards_are_reported_by_any_word_for_them(word: Any) -> None:
    document = {**BASE, "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": word}}
    found = DIALECT.findings(DIALECT.read(document), ReadingContext())
    assert "fsdp_config.fsdp_state_dict_type" in {finding.key for finding in found}


def test_a_deepspeed_file_that_deepspeed_refuses_is_an_error(tmp_path: Path) -> None:
    inner = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}
    switches = {"bf16": {"enabled": True, "check_grad_overflow": True}, "fp16": {"enabled": True}}
    document = {**BASE, "distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    del document["mixed_precision"]
    context = ReadingContext(folder=tmp_path)
    for halves, errors in ((("bf16",), 0), (("bf16", "fp16"), 1)):
        (tmp_path / "ds.json").write_text(json.dumps(inner | {half: switches[half] for half in halves}))
        found = list(DIALECT.findings(DIALECT.read(document, context), context))
        assert [finding.level for finding in found] == ["error"] * errors  # "auto" is filled in
