"""Held against DeepSpeed's own loader: what it takes, what it makes of it, and that written files mean the same."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.keys import ANY, BOOLEAN, NAME_LIST
from terrazzo.dialects.formats.deepspeed.dialect import DIALECT
from terrazzo.dialects.formats.deepspeed.keys import ALIASES, STRICT, TABLE
from tests.dialects.peers import assert_agrees_or_says
from tests.helpers.examples import examples

pytest.importorskip("deepspeed", reason="DeepSpeed's loader is the oracle: make .venv/.bench")

FUZZ = settings(max_examples=examples(100), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """DeepSpeed logs a line for every configuration."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def loaded(document: dict[str, Any]) -> Any:
    """What DeepSpeed makes of a document, on one rank."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(copy.deepcopy(document))


def effective(document: dict[str, Any]) -> dict[str, Any]:
    """Every setting of DeepSpeed's, as plain values."""
    fields = vars(loaded(document))
    return {name: plain(value) for name, value in fields.items() if name != "_param_dict"}


def plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude=_OLD_FIELDS)
    return {name: plain(inner) for name, inner in vars(value).items()} if hasattr(value, "__dict__") else value


_OLD_FIELDS = {
    "cpu_offload",  # what this and the next two say has gone to the new fields
    "cpu_offload_param",
    "stage3_gather_fp16_weights_on_model_save",
    "cpu_offload_use_pin_memory",  # nothing reads it
}


def refusals(document: dict[str, Any]) -> list[str]:
    """What the reader refuses or reports as an error."""
    reading = DIALECT.read(document)
    findings = DIALECT.findings(reading, ReadingContext(world=1))
    return [verdict.key for verdict in reading.verdicts if verdict.kind == "refused"] + [
        finding.key for finding in findings if finding.level == "error"
    ]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        place = document
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return document


# -- documents -----------------------------------------------------------------------------------------------------

_WORDS = {
    "communication_data_type": ["fp32", "fp16", "bf16", "BF16", None],
    "seq_parallel_communication_data_type": ["fp32", "bf16"],
    "gradient_allreduce_op": ["mean", "sum"],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.offload_param.device": ["none", "cpu", "nvme"],
    "zero_optimization.offload_optimizer.device": ["none", "cpu", "nvme"],
    "zero_optimization.offload_optimizer.ratio": [0.3, 1.0],
    "zero_optimization.zero_hpz_partition_size": [1, 1, 8],
    "zero_optimization.cpu_offload": [True, False],
    "zero_optimization.cpu_offload_param": [True, False],
    "zero_optimization.zenflow.select_strategy": ["auto", "step"],
    "data_types.grad_accum_dtype": ["fp32", "bf16", "float16", None],
    "data_types.param_dtype": [None],
    "data_types.buffer_dtype": ["fp32", "torch.bfloat16", None],
    "data_types.keep_in_fp32_modules": ["auto", ["norm"]],
    "torch_autocast.dtype": ["bfloat16", "fp16"],
    "torch_autocast.lower_precision_safe_modules": [[], ["torch.nn.Linear"]],
    "optimizer.type": ["Adam", "AdamW", "adamw", "Lion", "SGD", "Muon"],
    "optimizer.params.betas": [[0.9, 0.95]],
    "scheduler.type": ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"],
    "pipeline.stages": ["auto", 1],
    "compile.passes": [["z3"], None],
    "checkpoint.tag_validation": ["Warn", "fail"],
    "checkpoint.writer.type": ["FAST", "mock"],
    "checkpoint.writer.data_parallel": [None, "socket"],
    "tensor_parallel.vocab_parallel_ce_backend": ["torch", "liger"],
    "expert_parallel.load_balance_coeff": [None],
    "steps_per_print": [10, None],
}
_AVOID = ("aio.use_gds", "zero_optimization.legacy_stage1", "tensor_parallel.dtype", "zero_optimization.zenflow")


def _values(key: str) -> st.SearchStrategy[Any]:
    row = TABLE[key]
    if key in _WORDS:
        return st.sampled_from(_WORDS[key])
    if row.type is BOOLEAN:
        return st.sampled_from([True, False, True])
    if row.type.expected.startswith("a whole number"):
        return st.sampled_from([1, 2, 7, row.default if isinstance(row.default, int) else 3])
    if row.type.expected.startswith("a number"):
        return st.sampled_from([0.25, row.default if row.default is not None else 0.5])
    if row.type is NAME_LIST:
        return st.just(["a.B"])
    return st.just(row.default if row.default is not None or row.type is ANY else "x")


_KEYS = sorted(
    key
    for key in TABLE
    if not key.endswith(".*") and not key.startswith(("scheduler.params", "data_efficiency", *_AVOID))
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Any known keys with values that may or may not go together."""
    keys = draw(st.lists(st.sampled_from(_KEYS), unique=True, max_size=25))
    flat = {key: draw(_values(key)) for key in keys}
    if draw(st.booleans()):
        flat = {"zero_optimization.stage": 3, **flat}
    for size in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        flat.pop(size, None)
    sizes = draw(
        st.sampled_from([(8, 4, 2), (8, 4, None), (8, None, 2), (None, 4, 2), (8, None, None), (None, 4, None)])
    )
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    flat |= {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    if any(key.startswith("optimizer.") for key in flat):
        flat.setdefault("optimizer.type", "AdamW")
    kind = flat.get("scheduler.type")
    if kind is not None:
        flat |= _schedule(kind)
    for old, today in draw(st.lists(st.sampled_from(sorted(ALIASES.items())), max_size=3)):
        if today in flat and not old.startswith("bfloat16"):
            flat[old] = flat.pop(today)
    for section in ("offload_param", "offload_optimizer"):
        if flat.get(f"zero_optimization.{section}.device") == "nvme":
            flat[f"zero_optimization.{section}.nvme_path"] = f"/nvme/{section}"
    return nested(flat)


def _schedule(kind: str) -> dict[str, Any]:
    if kind == "OneCycle":
        return {"scheduler.params.cycle_min_lr": 0.0, "scheduler.params.cycle_max_lr": 1e-3}
    arguments = {"scheduler.params.warmup_num_steps": 10, "scheduler.params.warmup_type": "linear"}
    return arguments | ({} if kind == "WarmupLR" else {"scheduler.params.total_num_steps": 100})


# Sections that take anything, and those that the loader keeps as they stand, with defaults or without.
_OPEN = ("optimizer.params", "scheduler.params", "weight_quantization.quantized_initialization")
_OPEN += ("weight_quantization.post_init_quant", "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics")
_UNTOLD = ("optimizer.params", "scheduler.params", "autotuning.model_info")
_CLOSED = [
    section
    for section in sorted({key.rpartition(".")[0] for key in TABLE} - {"", *_OPEN})
    if not section.startswith("data_efficiency.data_routing.random_ltd")
]
_WITH_DEFAULTS = [
    key
    for key, row in TABLE.items()
    if not key.endswith(".*") and row.default is not None and key.rpartition(".")[0] not in _UNTOLD
    if key != "tensor_parallel.dtype"  # JSON has no value that is taken there
]


# -- tests ---------------------------------------------------------------------------------------------------------


@FUZZ
@given(documents())
def test_the_loader_refuses_only_what_is_reported(document: dict[str, Any]) -> None:
    try:
        loaded(document)
    except Exception as error:
        found, message = refusals(document), str(error)
    else:
        found, message = ["nothing was refused"], ""
    assert found, f"DeepSpeed refuses it, the reader does not: {message}"


def test_sections_refuse_or_ignore_strangers_as_the_reader_says() -> None:
    for section in _CLOSED:
        assert_a_stranger_fares_as_the_reader_says(section)


def assert_a_stranger_fares_as_the_reader_says(section: str) -> None:
    document = nested({f"{section}.no_such_key": 1, "train_micro_batch_size_per_gpu": 1})
    if section.startswith("zero_optimization"):
        document["zero_optimization"]["stage"] = 3
    verdict = next(each for each in DIALECT.read(document).verdicts if each.key.endswith("no_such_key"))
    assert verdict.kind == "refused"
    try:
        loaded(document)
    except Exception:
        assert section in STRICT, section
        assert "refuses the file" in verdict.why
    else:
        assert section not in STRICT, section
        assert "ignores it without a word" in verdict.why


def test_the_table_has_the_loader_s_defaults() -> None:
    """Writing a key's default changes nothing."""
    size: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    plain_by_section: dict[str, dict[str, Any]] = {}
    for key in _WITH_DEFAULTS:
        section = key.rpartition(".")[0]
        if section not in plain_by_section:
            plain_by_section[section] = effective((nested({section: {}}) if section else {}) | size)
        assert effective(nested({key: TABLE[key].default}) | size) == plain_by_section[section], key


def test_the_table_knows_every_field_of_the_loader() -> None:
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = {
        "compile": CompileConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    known = set(DIALECT.keys)
    for section, model in models.items():
        for name, field in model.model_fields.items():
            key = f"{section}.{field.alias or name}"
            assert key in known or any(each.startswith(f"{key}.") for each in known), key


@pytest.mark.parametrize("stage", range(4))
def test_shipped_templates_are_read_and_written(stage: int) -> None:
    import deepspeed

    folder = Path(deepspeed.__file__).parent / "autotuning" / "config_templates"
    template = json.loads((folder / f"template_zero{stage}.json").read_text()) | {"train_micro_batch_size_per_gpu": 1}
    reading = DIALECT.read(template)
    assert {verdict.kind for verdict in reading.verdicts} == {"applied"}
    assert reading.description.row == f"zero{stage}"
    assert_agrees_or_says("deepspeed", template)
