"""What every dialect promises, whatever is in a document: no exception, a verdict for every key, nothing run."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrazzo.dialects.core.description import DTYPES, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, Dialect, Reading, ReadingContext
from terrazzo.dialects.core.key_verdict import KINDS
from terrazzo.dialects.core.keys import ANY, MISSING, row_of
from terrazzo.dialects.core.reader import IDLE
from terrazzo.dialects.registry import NAMES, dialect
from terrazzo.dialects.verbs.convert import convert_reading
from terrazzo.dialects.verbs.emit import plain
from terrazzo.dialects.verbs.explain import plan_words
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.documents.dotted_keys import flatten, put
from tests.dialects.samples import SAMPLES, STACKS
from tests.helpers.examples import examples

CONTEXTS = [NO_CONTEXT, ReadingContext(world=8, hidden_size=64, load_dtype="bf16", heads=4, layers=2, parameters=10**6)]
TRAP = "trap_of_dialects:spring"

WORDS = ["auto", "none", "", "true", "cpu", "nvme", "bf16", "fp16", "FULL_SHARD", "AdamW", "WarmupLR", "3", TRAP,
         "1e-3", "²", "0,1", "__import__('trap_of_dialects')", "\x1b[31m", "é" * 300]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70),
    st.sampled_from([2**62, -(2**62), 0.0, -1.5, 1e300, 1e308, 5e-324]),
    st.sampled_from(WORDS),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["enabled", "a.b", "x", "type"]), SCALARS, max_size=2),
    st.just([[1, [2]], {"a": {"b": None}}]),
)


def keys_of(name: str) -> list[str]:
    """Every key of a dialect, with a word in place of each pattern."""
    return [spelled_out(key) for key in dialect(name).keys]


def of_each_kind(name: str) -> set[str]:
    """One key of all that have rows alike, default aside: they are read by the same lines."""
    rows = dialect(name).keys
    alike = {(row.type, row.default is None, row.meaning, row.loss, row.why): key for key, row in rows.items()}
    return {spelled_out(key) for key in alike.values()}


def spelled_out(key: str) -> str:
    return ".".join("word" if part.startswith("<") else part for part in key.split(".")).replace(".*", ".word")


def documents(name: str) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.tuples(st.sampled_from([*keys_of(name), "misspelt", "a.b"]), VALUES)
    return st.lists(pairs, max_size=12).map(nested)


def nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        inner: Any = document
        *parents, last = key.split(".")
        for part in parents:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.setdefault(last, value)
    return document


def assert_promises(source: Dialect, document: dict[str, Any], context: ReadingContext) -> Reading:
    assert isinstance(source.recognises(document), bool)
    reading = read_document(source, document, context)
    assert reading.description.dialect == source.name
    verdicts = {verdict.key for verdict in reading.verdicts}
    assert len(verdicts) == len(reading.verdicts)
    for leaf in flatten(document):
        known = leaf in verdicts or any(leaf.startswith(f"{key}.") for key in verdicts)
        assert known, f"no verdict for {leaf}"
    for verdict in reading.verdicts:
        assert verdict.kind in KINDS
        assert verdict.why or verdict.kind not in ("lossy", "refused"), verdict
    assert_sound(reading.description, set(verdicts))
    list(source.findings(reading, context))
    list(plan_words(reading.description))
    return reading


NO_DTYPES = (
    "error_feedback",
    "loss_scaling",
    "static_loss_scale",
    "autocast",
    "rounding",
    "gather",
    "quantized_reduce",
    "linears",
    "skip",
)


def assert_sound(description: Description, keys: set[str]) -> None:
    """Dtypes are pinned, and every setting of the file names keys of the file."""
    for path, setting in description.items():
        section, _, name = path.partition(".")
        if section == "precision" and name not in NO_DTYPES and setting.is_set:
            assert setting.value in DTYPES or (setting.value is None and setting.origin == "auto"), (path, setting)
        if setting.origin == "file":
            assert setting.keys, (path, setting)
        for key in setting.keys:
            assert key in keys, (path, setting)
            plain(setting)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_in_a_document(name: str, data: st.DataObject) -> None:
    document = data.draw(documents(name))
    context = data.draw(st.sampled_from(CONTEXTS))
    reading = assert_promises(dialect(name), document, context)
    target = dialect(data.draw(st.sampled_from(NAMES)))
    conversion = convert_reading(dialect(name), reading, target, context)
    assert [verdict.key for verdict in conversion.verdicts] == [verdict.key for verdict in reading.verdicts]
    for read, became in zip(reading.verdicts, conversion.verdicts, strict=True):
        if target.name != name and read.kind in ("lossy", "refused"):
            assert KINDS.index(became.kind) >= KINDS.index(read.kind), f"{became.key}: explained as {read.kind}"
    spoken = {verdict.key for verdict in target.write(reading.description, context).verdicts}
    assert spoken == {path for path, setting in reading.description.items() if setting.is_set}
    if target.name == name and not conversion.refused:
        assert conversion.document == document


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_every_key_alone_and_with_its_section_with_every_kind_of_value(name: str, every: int) -> None:
    sections: dict[str, list[str]] = {}
    turns = 1 if every == 1 else 2
    alone = set(sorted(of_each_kind(name))[::every])
    for key in keys_of(name):
        sections.setdefault(key.rpartition(".")[0], []).append(key)
        if key not in alone:
            continue
        for value in (None, True, TRAP, "²", {"a": {"b": [1]}}):
            assert_promises(dialect(name), nested([(key, value)]), CONTEXTS[1])
        reading = assert_promises(dialect(name), nested([(key, 1e308)]), CONTEXTS[1])
        convert_reading(dialect(name), reading, dialect("terrazzo"), CONTEXTS[1])
    for index, keys in enumerate(sections.values()):
        for value in (-1, 2**62, 0.5, "auto", [], [None], {})[index % turns :: turns]:
            assert_promises(dialect(name), nested([(key, value) for key in keys]), CONTEXTS[1])


CHECKPOINTS = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"every_n_train_steps": 5, "save_top_k": 3, "monitor": "step", "mode": "max", "dirpath": "runs"},
}
DEEP: dict[str, list[dict[str, Any]]] = {
    "fsdp2": [
        {
            "module": ["Block"],
            "mesh": {"dp_shard": 2, "ep": 2, "tp": 2},
            "dp_mesh_dims": {"shard": ["dp_shard", "ep"]},
            "offload_policy": {"pin_memory": False},
        }
    ],
    "lightning": [
        {
            "trainer": {
                "strategy": {
                    "class_path": "lightning.pytorch.strategies.FSDPStrategy",
                    "init_args": {"device_mesh": [2, 4], "mixed_precision": {"param_dtype": "torch.bfloat16"}},
                    "dict_kwargs": {"backward_prefetch": "BACKWARD_PRE"},
                },
                "precision": "bf16-mixed",
                "max_steps": 12,
                "callbacks": [CHECKPOINTS],
            },
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        },
        {
            "strategy": {
                "class_path": "DeepSpeedStrategy",
                "init_args": {"config": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}},
            },
            "precision": "16-mixed",
            "callbacks": CHECKPOINTS,
        },
        {
            "strategy": {"class_path": "DeepSpeedStrategy", "init_args": {"stage": 3, "loss_scale": 3.0}},
            "precision": "16-mixed",
        },
        {"strategy": {"class_path": "ModelParallelStrategy", "init_args": {"tensor_parallel_size": 4}}, "devices": 8},
    ],
    "trainer": [{"fsdp": "full_shard", "fsdp_config": {"version": 2}, "lr_scheduler_kwargs": {"power": 1}}],
}
"""Documents whose values stand in lists, or in documents inside of them, beside `SAMPLES`."""
MISSHAPEN = (None, True, -1.5, "x", [], ["x"], [1, 2], [{}], {}, {"a": {"b": [1]}}, [[None]])


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a value stands in a document: all of its sections, and all of its lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*at, key)
        yield from places(each, (*at, key))


@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.long), 7])
@pytest.mark.parametrize("name", NAMES)
def test_a_misshapen_value_is_told_wherever_it_stands(name: str, turns: int) -> None:
    for number, document in enumerate([*SAMPLES[name].values(), *DEEP.get(name, ())]):
        for index, place in enumerate(places(document)):
            for value in MISSHAPEN[(number + index) % turns :: turns]:
                broken = copy.deepcopy(document)
                around = functools.reduce(lambda inner, key: inner[key], place[:-1], broken)
                around[place[-1]] = value
                assert_promises(dialect(name), broken, CONTEXTS[index % 2])


@pytest.mark.parametrize(
    ("name", "document", "key", "words"),
    [
        ("lightning", {"strategy": "fsdp", "precision": {"a": {"b": 1}}}, "precision.a.b", "expected one of 16-true"),
        ("lightning", {"callbacks": {**CHECKPOINTS, "init_args": [1]}}, "callbacks", "[1], expected its arguments"),
        ("torchtitan", {"training": {"steps": {"a": 1}}}, "training.steps.a", "expected a whole number"),
        ("trainer", {"max_steps": {"a": 1}}, "max_steps.a", "expected a whole number"),
        ("fsdp1", {"cpu_offload": {"offload": True}}, "cpu_offload.offload", "no such key"),
    ],
)
def test_a_misshapen_value_is_told_by_what_was_expected(name: str, document: Any, key: str, words: str) -> None:
    reading = assert_promises(dialect(name), document, NO_CONTEXT)
    (verdict,) = [each for each in reading.verdicts if each.key == key]
    assert verdict.kind == "refused" and words in verdict.why


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "trainer", "lightning", "torchtitan", "megatron"])
def test_a_number_as_text_means_the_number(name: str) -> None:
    """YAML 1.1 takes `1e-3` for text. Who computes with it must take it as what it means."""
    numbers = 0
    for document in (*SAMPLES[name].values(), *PEAKS.get(name, ())):
        spelled = as_text(dialect(name), document)
        numbers += spelled != document
        one, other = (read_document(dialect(name), each, CONTEXTS[1]).description for each in (document, spelled))
        for path, setting in one.items():
            assert other[path].value == setting.value, path
    assert numbers


PEAKS: dict[str, list[dict[str, Any]]] = {
    "trainer": [
        {"learning_rate": 1e-3, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        {"learning_rate": 1e-3, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4, "power": 1}},
        {"max_steps": -1, "num_train_epochs": 3},
    ],
    "deepspeed": [
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 100}},
        }
    ],
    "lightning": [{"devices": 4, "num_nodes": 2, "strategy": "fsdp"}],
}
"""Documents whose numbers are computed with."""
_INNER = ("lr_scheduler_kwargs", "optimizer.param_groups")


def as_text(source: Dialect, document: dict[str, Any]) -> dict[str, Any]:
    """The document with text for each number, where the key's type takes text for one."""

    def spelled(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: spelled(f"{key}.{name}" if key else name, inner) for name, inner in value.items()}
        if key in _INNER and isinstance(value, list):
            return [spelled(key, each) for each in value]
        row = row_of(source.keys, key)
        inner = key.startswith(_INNER) and isinstance(value, float)
        takes = row is not None and row.type.parse(str(value)) == row.type.parse(value) != MISSING
        return str(value) if type(value) in (int, float) and (takes or inner) else value

    return {key: spelled(key, value) for key, value in document.items()}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_string_names_is_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap_of_dialects.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    for word in (TRAP, "trap_of_dialects.spring", "trap_of_dialects"):
        document = nested([(key, word) for key in keys_of(name)])
        reading = assert_promises(dialect(name), document, NO_CONTEXT)
        for target in NAMES:
            convert_reading(dialect(name), reading, dialect(target), NO_CONTEXT)
    assert time.process_time() - start < 5
    assert "trap_of_dialects" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_document_is_the_librarys_defaults(name: str) -> None:
    reading = assert_promises(dialect(name), {}, NO_CONTEXT)
    assert reading.verdicts == ()
    assert {setting.origin for _, setting in reading.description.items()} <= {"unset", "default", "derived"}
    for target in NAMES:
        conversion = convert_reading(dialect(name), reading, dialect(target), NO_CONTEXT)
        assert conversion.verdicts == ()


WITHOUT_MEANING = {
    "torchtitan": {"comm", "metrics", "profiler", "debug", "hf_assets_path", "dump_folder"},  # of no plan's concern
    "trainer": {"parallelism_config"},
    "terrazzo": {"objective", "optimizer", "plan", "precision", "schedule"},  # sections that may be one word
}


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_a_meaning_or_is_a_pattern(name: str) -> None:
    source = dialect(name)
    assert source.title
    assert source.suffix in (".json", ".yaml", ".sh")
    silent = [key for key in source.keys if not source.meaning(key) and not key.endswith(("*", ">"))]
    assert {key.partition(".")[0] for key in silent} <= WITHOUT_MEANING.get(name, set())


ONLY_WITH_OTHERS = {  # sections, and what is read beside min_num_params
    "fsdp1": {"mixed_precision", "auto_wrap_policy.size_based_auto_wrap_policy.<argument>"},
    "fsdp2": {"dp_mesh_dims", "mp_policy"},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_has_a_meaning_here_has_a_reader(name: str) -> None:
    unread = set()
    for key, row in dialect(name).keys.items():
        words = row.type.expected.removeprefix("one of ").split(", ")
        taken = [value for value in (True, 2, ["Name"], *words) if row.type.parse(value) is not MISSING]
        for value in [row.default, *taken] if not row.loss else ():
            outcomes = dialect(name).read(nested([(spelled_out(key), value)])).verdicts
            unread |= {key for verdict in outcomes if "does not take there" in verdict.why}
    assert unread == ONLY_WITH_OTHERS.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_a_key_alone_that_asks_for_something_gets_it_or_a_word(name: str) -> None:
    """Of each row that a reader takes: no key falls through it, as one that asks for nothing."""
    silent = set()
    for stack, (key, row) in itertools.product(STACKS[name], dialect(name).keys.items()):
        if row.loss or row.type is ANY or key[-1] in "*>":
            continue
        words = row.type.expected.removeprefix("one of ").split(", ")
        for value in (2, True, 0.25, "bfloat16", "2", *words):
            if row.type.parse(value) not in (MISSING, row.neutral, row.default):
                document = copy.deepcopy(stack)
                put(document, key, value)
                reading = dialect(name).read(document, CONTEXTS[1])
                unsaid = {extra.key for extra in reading.description.extras if extra.why in ("", IDLE)}
                silent |= {each.key for each in reading.verdicts if each.key == key and not each.target} & unsaid
    assert silent == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_other_dialects_must_refuse_says_what_to_do(name: str) -> None:
    silent = [key for key, row in dialect(name).keys.items() if row.loss == "refused" and not row.why]
    assert silent == []
