"""Conversion: a verdict for every key, no loss unnamed, comments kept, dtypes and their bytes; and differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import terrazzo as tz
from terrazzo.dialects.core.agreement import same_value
from terrazzo.dialects.core.description import PATHS, UNSET, Description, Extra, Setting, build
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Dialect, Reading, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import KeyVerdict, worst
from terrazzo.dialects.core.keys import BOOLEAN, NAME_LIST, TEXT, Type, choice, integer, matches, number
from terrazzo.dialects.core.mesh import data_ranks, degrees, ranks_left, ranks_needed
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.formats.terrazzo.dialect import DIALECT as OURS
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.comments import Comment, comments_of, insert_comments
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.diff import compare
from terrazzo.dialects.verbs.emit import to_text
from terrazzo.dialects.verbs.explain import explain, plan_words
from terrazzo.dialects.verbs.precision_table import costs, precisions
from terrazzo.dialects.verbs.understand import Understood, read_document, understand
from terrazzo.documents import Loaded, parse
from terrazzo.documents.dotted_keys import flatten, join, keys_in, split
from terrazzo.engine import Plan


def read_toy(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """Five keys: two that mean something anywhere, one with a rule, and two of its own."""
    reader = Reader(document, "Toy")
    lr = reader.take_as("old_lr" if "old_lr" in reader else "lr", number())
    reader.mark("old_lr", "renamed", "it is called lr now")
    clip = reader.take_raw("clip", 0.5)
    if clip.value == "auto":
        reader.mark("clip", "defaulted", "auto is 1.0 here")
        clip = Setting(1.0, "auto", "clip")
    reader.keep("verbose", "how much is printed", loss="harmless")
    reader.keep("magic", "nothing else does magic", loss="refused")
    settings: dict[str, Setting[Any]] = {"training.clip": clip}
    if lr.value is not None:
        settings["optimizer.lr"] = lr
    if "stage" in reader:
        stage = reader.take_as("stage", integer(high=3), 0)
        rows = Plan.named(f"zero{stage.value}").places()
        settings |= {f"sharding.{state}": Setting(str(value), "file", "stage") for state, value in rows.items()}
    return reader.finish("toy", settings, ("lr", "old_lr", "clip", "verbose", "magic", "stage"))


def write_toy(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    draft = Draft(description, "Toy", "toy")
    draft.copy("optimizer.lr", "lr")
    if description.dialect != "toy" or description["training.clip"].key:
        draft.copy("training.clip", "clip")
    return draft.finish()


def write_half_the_rate(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """It says that all is well."""
    draft = Draft(description, "Careless", "careless")
    draft.put("optimizer.lr", "lr", description.value("optimizer.lr") / 2)
    return draft.finish()


TOY = Dialect(
    name="toy",
    title="Toy",
    suffix=".yaml",
    keys={},
    recognises=lambda document: "verbose" in document,
    read=read_toy,
    write=write_toy,
    findings=lambda reading, context: (),
    meaning_by=lambda key: "",
)
CARELESS = replace(TOY, name="careless", title="Careless", write=write_half_the_rate)


def converted(
    document: dict[str, Any], source: Dialect, target: Dialect, context: ReadingContext = NO_CONTEXT
) -> Conversion:
    return convert_reading(source, read_document(source, document, context), target, context)


def kinds(conversion: Conversion) -> dict[str, str]:
    return {verdict.key: verdict.kind for verdict in conversion.verdicts}


# -- verdicts ------------------------------------------------------------------------------------------------------


def test_every_key_gets_its_verdict() -> None:
    document = {"lr": 0.1, "clip": "auto", "verbose": True, "magic": 3, "lrr": 2, "stage": 7}
    conversion = converted(document, TOY, OURS)
    assert kinds(conversion) == {
        "lr": "renamed",
        "clip": "defaulted",
        "verbose": "defaulted",
        "magic": "refused",
        "lrr": "refused",
        "stage": "refused",
    }
    by_key = {verdict.key: verdict for verdict in conversion.verdicts}
    assert by_key["lr"].target == "optimizer.lr"
    assert by_key["clip"].target == "train.clip"
    assert by_key["clip"].why == "auto is 1.0 here"
    assert "nothing else does magic" in by_key["magic"].why
    assert "Did you mean 'lr'?" in by_key["lrr"].why
    assert "expected a whole number from 0 to 3" in by_key["stage"].why
    assert {verdict.key for verdict in conversion.refused} == {"magic", "lrr", "stage"}
    assert conversion.document["optimizer"] == {"lr": 0.1}


def test_what_check_says_of_the_source_is_said() -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    source, context = dialect("deepspeed"), ReadingContext(world=2)
    for name in ("terrazzo", "deepspeed", "fsdp2"):
        said = converted(document, source, dialect(name), context).findings
        assert {each.key for each in said} == {"gradient_clipping", "bf16.check_grad_overflow"}
        assert set(said) <= set(
            check(
                Understood(
                    Loaded(Path("ds.json"), document, "", "json"), source, source.read(document, context), context
                )
            )
        )
    assert not converted({"train": {"steps": 8}}, OURS, source, context).findings


def test_an_alias_is_renamed_and_says_why() -> None:
    (verdict,) = converted({"old_lr": 0.1}, TOY, OURS).verdicts
    assert (verdict.kind, verdict.target, verdict.why) == ("renamed", "optimizer.lr", "it is called lr now")


@pytest.mark.parametrize(
    ("source", "document", "hint"),
    [
        ("megatron", {"num-layers": 2}, "in Terrazzo: model.layers"),
        ("deepspeed", {"steps_per_print": 10}, "in Terrazzo: log.every"),
        ("trainer", {"eval_steps": 10}, "in Terrazzo: train.eval_every"),
    ],
)
def test_what_terrazzo_says_by_a_key_of_its_own_is_said_of_terrazzo_alone(
    source: str, document: dict[str, Any], hint: str
) -> None:
    for target in ("terrazzo", "torchtitan", "fsdp2"):
        (verdict,) = converted(document, dialect(source), dialect(target)).verdicts
        assert (hint in verdict.why) is (target == "terrazzo"), verdict
        assert "Terrazzo" not in verdict.why or target == "terrazzo"


@pytest.mark.parametrize(
    ("source", "target", "document", "key"),
    [
        ("trainer", "terrazzo", {"output_dir": "x", "warmup_ratio": 0.03, "max_steps": 1000}, "warmup_ratio"),
        ("lightning", "accelerate", {"strategy": "ddp", "accelerator": "gpu"}, "accelerator"),
        ("terrazzo", "trainer", {"optimizer": {"options": {"fused": True}}}, "optimizer.options.fused"),
        ("terrazzo", "deepspeed", {"optimizer": {"options": {"fused": True}}}, "optimizer.options.fused"),
        ("lightning", "torchtitan", {"strategy": "fsdp", "precision": "32-true"}, "precision"),
    ],
)
def test_what_the_target_does_is_no_loss(source: str, target: str, document: dict[str, Any], key: str) -> None:
    verdicts = converted(document, dialect(source), dialect(target)).verdicts
    (verdict,) = [verdict for verdict in verdicts if key.startswith(verdict.key)]
    assert dialect(target).title not in verdict.why, verdict  # as in what is said of a document read back


def test_a_reason_is_said_once_of_all_that_have_it(tmp_path: Path) -> None:
    document = {"fp16": True, "num-layers": 2}
    verdicts = converted(document, dialect("megatron"), dialect("accelerate")).verdicts
    (why,) = [verdict.why for verdict in verdicts if verdict.key == "fp16"]
    reason = "it has the dtype in which the model is loaded"
    assert why.count(reason) == 1 and f"precision.accumulate, precision.saved: {reason}" in why
    older = {f"training.{name}": True for name in ("compile", "deterministic")}
    older |= {f"training.{name}": 1 for name in ("batch_size", "warmup_steps", "seed", "tensor_parallel_degree")}
    (tmp_path / "t.toml").write_text("\n".join(f"{key} = {str(value).lower()}" for key, value in older.items()))
    found = [finding for finding in check(understand(tmp_path / "t.toml", "torchtitan")) if "today's" in finding.text]
    assert not found
    (line,) = [each for each in check(understand(tmp_path / "t.toml", "torchtitan")) if "earlier" in each.text]
    assert line.text.startswith("6 keys are words of earlier versions: ")
    assert "training.compile is compile.enable" in line.text


def test_the_same_dialect_keeps_what_only_it_has() -> None:
    document = {"lr": 0.1, "verbose": True, "magic": 3}
    conversion = converted(document, TOY, TOY)
    assert conversion.document == document
    assert set(kinds(conversion).values()) == {"applied"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "# mine\nplan:  zero2   # small\ntrain: {steps: 8}\n"),
        ("a.json", '{"zero_optimization": {"stage": 2}, // small\n "train_micro_batch_size_per_gpu": 1,}'),
        ("a.toml", "# mine\n[training]\nsteps = 8\n"),
        ("a.sh", "#!/bin/bash\n# mine\nLR=1e-4\ntorchrun pretrain_gpt.py --lr $LR --micro-batch-size 1\n"),
    ],
)
def test_a_file_in_its_own_dialect_is_the_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    read = understand(tmp_path / name)
    conversion = convert_reading(read.dialect, read.reading, read.dialect, read.context)
    assert to_text(conversion.document, read.loaded.format, read.loaded, conversion.verdicts) == text


def test_what_a_library_refuses_is_left_out_of_its_own_document() -> None:
    document = {
        "zero_optimization": {"stage": 3, "max_live_parameters": 10, "stag": 1},
        "bfloat16": {"enabled": True},
        "elasticity": {"enabled": False},
        "gradient_clipping": "much",
    }
    conversion = converted(document, dialect("deepspeed"), dialect("deepspeed"))
    assert conversion.document == {
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10},
        "bf16": {"enabled": True},
    }
    assert {verdict.key for verdict in conversion.refused} == {"zero_optimization.stag", "gradient_clipping"}


@pytest.mark.parametrize(
    ("target", "place"), [("trainer", ("deepspeed",)), ("lightning", ("trainer", "strategy", "init_args", "config"))]
)
def test_a_deepspeed_document_is_carried_as_it_stands(target: str, place: tuple[str, ...]) -> None:
    """With what DeepSpeed alone knows; what the other says in its own words is left to it."""
    zero = {"stage": 2, "reduce_bucket_size": 7, "offload_optimizer": {"device": "none"}}
    document = {"zero_optimization": zero, "bfloat16": {"enabled": True}, "aio": {"queue_depth": 3}}
    inner: Any = converted(document, dialect("deepspeed"), dialect(target)).document
    assert inner.get("bf16", inner.get("trainer", {}).get("precision")) in (True, "bf16-true")
    for name in place:
        inner = inner[name]
    assert inner["zero_optimization"] == zero
    assert inner["aio"] == {"queue_depth": 3}


def test_a_value_that_auto_stands_for_is_written_and_an_open_one_is_not() -> None:
    inner = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}}}
    fields = {"output_dir": "x", "learning_rate": 1e-4, "deepspeed": inner}
    written = converted(fields, dialect("trainer"), dialect("deepspeed")).document
    assert (written["optimizer"]["params"]["lr"], written["optimizer"]["params"]["eps"]) == (1e-4, 1e-8)
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    conversion = converted({**batch, "zero_optimization": {"stage": 3}}, dialect("deepspeed"), dialect("torchtitan"))
    assert None not in flatten(conversion.document).values()
    assert {kinds(conversion)[key] for key in batch} == {"lossy"}


def test_a_loss_that_the_writer_hides_is_found_by_reading_back() -> None:
    conversion = converted({"optimizer": {"lr": 0.1}}, OURS, CARELESS)
    (verdict,) = conversion.verdicts
    assert verdict.kind == "lossy"
    assert "Careless has 0.05 for optimizer.lr, not 0.1" in verdict.why


def test_what_the_target_no_longer_says_is_a_loss_unless_the_writer_says_why_not() -> None:
    def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        draft = Draft(description, "Careless", "careless")
        draft.implied("optimizer.lr")
        draft.holds("optimizer.weight_decay", "the rate decays so")
        draft.implied("training.loss_mean")
        return draft.finish()

    document = {"optimizer": {"lr": 0.1, "weight_decay": 0.2}}
    gone, told = converted(document, OURS, replace(CARELESS, write=write)).verdicts
    assert (gone.kind, gone.why) == ("lossy", "Careless as written says nothing of optimizer.lr = 0.1")
    assert (told.kind, told.why) == ("applied", "the rate decays so")


@pytest.mark.parametrize("verb", ["put", "implied", "holds"])
def test_a_remark_hides_no_loss(verb: str) -> None:
    """What a writer says beside a key is no reason to believe it, unless it says how the setting holds all the same."""

    def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        draft = Draft(description, "Careless", "careless")
        draft.put("optimizer.lr", "lr", description.value("optimizer.lr") / 2, "it is the peak")
        if verb != "put":
            getattr(draft, verb)("optimizer.lr", "it is the peak", "lr")
        return draft.finish()

    (verdict,) = converted({"optimizer": {"lr": 0.1}}, OURS, replace(CARELESS, write=write)).verdicts
    assert verdict.kind == ("renamed" if verb == "holds" else "lossy")
    assert ("Careless has 0.05 for optimizer.lr, not 0.1; it is the peak" in verdict.why) == (verb != "holds")


def test_what_follows_from_others_is_no_exception() -> None:
    """A model that returns what it computes in does so elsewhere, too; where it is another dtype that is a loss."""

    def lost(precision: str) -> list[KeyVerdict]:
        conversion = converted({"plan": "zero0", "precision": precision}, OURS, dialect("lightning"), ReadingContext(8))
        return [each for each in conversion.verdicts if "nothing of precision.output" in each.why]

    assert not lost("bf16") and not lost("fp32")
    assert "precision.output = fp32" in lost("fp16")[0].why


def test_what_the_target_refuses_to_read_back_is_refused() -> None:
    document = {"optimizer": {"name": "AdEMAMix"}, "train": {"clip": 0.5}}
    conversion = converted(document, OURS, dialect("deepspeed"))
    (refusal,) = [
        each
        for each in read_document(dialect("deepspeed"), conversion.document).verdicts
        if each.key == "optimizer.type" and each.kind == "refused"
    ]
    by_key = {verdict.key: verdict for verdict in conversion.verdicts}
    assert (by_key["optimizer.name"].kind, by_key["optimizer.name"].why) == ("refused", refusal.why)
    assert by_key["train.clip"].kind == "renamed"


def test_reasons_of_one_key_say_which_setting_they_are_of() -> None:
    def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        draft = Draft(description, "Toy", "toy")
        draft.lossy("sharding.weight", "it is whole")
        draft.lossy("sharding.grad", "it is on one rank")
        draft.holds(["sharding.between", "sharding.optim"], "as here")
        return draft.finish()

    (verdict,) = converted({"plan": "zero3"}, OURS, replace(CARELESS, write=write)).verdicts
    assert "sharding.weight: it is whole; sharding.grad: it is on one rank" in verdict.why


def test_defaults_that_are_lost_are_named_too() -> None:
    conversion = converted({"lr": 0.1}, TOY, OURS)
    assert conversion.document["train"] == {"clip": 0.5}  # the source's default is no longer a default
    conversion = converted({"optimizer": {"lr": 0.1}}, OURS, TOY)
    assert {"sharding.weight", "schedule.name"} <= {verdict.key for verdict in conversion.unsaid}


def test_the_targets_own_defaults_are_named() -> None:
    added = {verdict.key: verdict.value for verdict in converted({"lr": 0.1}, TOY, OURS).added}
    assert added["schedule.name"] == "cosine"
    assert added["optimizer.weight_decay"] == 0.1
    assert "optimizer.lr" not in added


def test_what_holds_in_place_of_a_refused_setting_is_named() -> None:
    row = {f"sharding.{state}": Setting("S", "file", "stage") for state in ("weight", "between", "grad", "optim")}
    reading = Reading(build("toy", row), (KeyVerdict("stage", 9, "applied"),), {"stage": 9})
    conversion = convert_reading(TOY, reading, OURS, NO_CONTEXT)
    assert kinds(conversion) == {"stage": "refused"}
    assert {verdict.key: verdict.value for verdict in conversion.added}["sharding.weight"] == "D"


def test_the_gravest_verdict_wins() -> None:
    assert worst([]) == "applied"
    assert worst(["renamed", "lossy", "applied"]) == "lossy"
    assert worst(["refused", "lossy"]) == "refused"


# -- the reader and the draft --------------------------------------------------------------------------------------


def test_flat_keys_keep_names_with_dots_apart() -> None:
    document = {"a.b": {"c": 1}, "a": {"b": {"c": 2}}, "d": {}, "e": [{"f": 1}]}
    flat = flatten(document)
    assert flat == {'"a.b".c': 1, "a.b.c": 2, "d": {}, "e": [{"f": 1}]}
    assert [split(key) for key in flat] == [["a.b", "c"], ["a", "b", "c"], ["d"], ["e"]]
    assert flatten({"a": {"b": {"c": 1}}}, ["a.b"]) == {"a.b": {"c": 1}}
    assert join("", "a.b") == '"a.b"'
    for name in ('"x"', '"', 'a"b', '".', '"", "', ""):
        assert split(join(join("", "a"), name)) == ["a", name]
        assert keys_in(f"b, {join('a', name)}") == ("b", join("a", name))


@pytest.mark.parametrize(
    ("key", "pattern", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.<name>", True),
        ("a.b.c", "a.<name>", False),
        ("a.b.c", "a.*", True),
        ("a", "a.*", True),
        ("ab", "a.*", False),
        ("axb", "a.b", False),
    ],
)
def test_patterns_of_keys(key: str, pattern: str, expected: bool) -> None:
    assert matches(key, pattern) is expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (integer(), 8, 8),
        (integer(), 8.0, 8),
        (integer(), "5e8", 500_000_000),
        (integer(), 8.5, None),
        (integer(), True, None),
        (integer(), -1, None),
        (integer(), "eight", None),
        (number(), "1e-3", 1e-3),
        (number(), -0.5, None),
        (number(), [1], None),
        (BOOLEAN, "True", True),
        (BOOLEAN, False, False),
        (BOOLEAN, 1, None),
        (BOOLEAN, {}, None),
        (TEXT, "x", "x"),
        (TEXT, 3, None),
        (NAME_LIST, "a, b", ("a", "b")),
        (NAME_LIST, ["a"], ("a",)),
        (NAME_LIST, [1], None),
        (NAME_LIST, 3, None),
    ],
)
def test_typed_values(kind: Type, value: Any, expected: Any) -> None:
    reader = Reader({"a": value}, "Toy", ["a"])
    default = ("?",) if kind is NAME_LIST else None
    setting = reader.take_as("a", kind, default)
    (verdict,) = reader.finish("toy", {}, ["a"]).verdicts
    if expected is None:
        assert (setting.value, setting.origin, verdict.kind) == (default, "default", "refused")
        assert "expected" in verdict.why
    else:
        assert (setting.value, setting.origin, setting.key) == (expected, "file", "a")
        assert verdict.kind == "applied"


def test_choices_find_their_neighbour() -> None:
    reader = Reader({"a": "FUL", "b": "Full", "c": None, "d": [1]}, "Toy")
    choices = choice({"full": "FULL", "none": "NONE"})
    assert reader.take_as("a", choices, "x").value == "x"
    assert reader.take_as("b", choices).value == "FULL"
    assert reader.take_as("c", choices, "y", null=True).value == "y"
    reader.take_as("d", choices)
    why = {verdict.key: verdict.why for verdict in reader.finish("toy", {}, ["a", "b", "c", "d"]).verdicts}
    assert "one of FULL, NONE. Did you mean 'FULL'?" in why["a"]
    assert why["b"] == ""


def test_derived_settings_name_all_their_keys() -> None:
    whole = derived(6, Setting(2, "file", "a"), Setting(3, "file", "b"), UNSET)
    assert (whole.value, whole.origin, whole.keys) == (6, "derived", ("a", "b"))


def test_a_draft_forgets_nothing() -> None:
    settings_by_path = {
        "optimizer.lr": Setting(0.1),
        "mesh.tp": Setting(2),
        "mesh.cp": Setting(1),
        "batch.global_batch": Setting(8, "derived"),
    }
    draft = Draft(build("fsdp2", settings_by_path), "Toy", "toy")
    draft.copy("optimizer.lr", "a.lr")
    writing = draft.finish()
    assert writing.document == {"a": {"lr": 0.1}}
    assert {verdict.key: verdict.kind for verdict in writing.verdicts} == {
        "optimizer.lr": "applied",
        "mesh.tp": "lossy",
        "mesh.cp": "applied",
        "batch.global_batch": "applied",
    }


def test_a_description_knows_its_paths() -> None:
    with pytest.raises(KeyError, match=r"precision\.weigth"):
        build("x", {"precision.weigth": Setting("bf16")})
    description = build("x", {"precision.reduce": Setting("bf16")})
    assert description["precision.reduce"].value == "bf16"
    assert not description["precision.weight"].is_set
    assert description.plan is None
    assert description.row is None


# -- what follows from what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "replicate", "shard"),
    [
        ({"world": 16}, 1, 16),
        ({"world": 16, "dp_replicate": 2}, 2, 8),
        ({"world": 16, "tp": 4, "pp": 2}, 1, 2),
        ({"world": 16, "dp_shard": 8, "dp_replicate": None}, 2, 8),
        ({"world": 16, "dp_shard": 8}, 1, 8),
        ({"dp_shard": 8, "dp_replicate": None}, None, 8),
        ({"dp_replicate": 2}, 2, None),
        ({"world": 10, "dp_replicate": 4}, 4, None),
        ({"world": 16, "dp_replicate": None}, 1, 16),
    ],
)
def test_the_axis_that_is_left(mesh: dict[str, Any], replicate: int | None, shard: int | None) -> None:
    sizes = degrees(build("x", {f"mesh.{axis}": Setting(degree) for axis, degree in mesh.items()}))
    assert (sizes["dp_replicate"], sizes["dp_shard"]) == (replicate, shard)


def test_a_hybrid_row_without_degrees_has_unknown_ones() -> None:
    rows = {f"sharding.{state}": Setting(str(place)) for state, place in Plan.named("hybrid_shard").places().items()}
    description = build("x", {**rows, "mesh.world": Setting(16), "mesh.dp_replicate": Setting(None)})
    assert (degrees(description)["dp_replicate"], degrees(description)["dp_shard"]) == (None, None)
    assert data_ranks(description) == 16


def test_a_world_that_axes_do_not_divide_leaves_no_known_number_of_ranks() -> None:
    split = build("x", {"mesh.tp": Setting(4)})
    assert [ranks_left(split, world, ("tp", "cp")) for world in (None, 2, 6, 8)] == [None, None, None, 2]
    assert "(--world)" in ranks_needed(split, None, ("tp", "cp"))
    assert ranks_needed(split, 6, ("tp", "cp")) == "a number of ranks that divides by tp 4, not 6,"


@pytest.mark.parametrize(
    ("path", "one", "other", "expected"),
    [
        ("mesh.tp", None, 1, True),
        ("mesh.tp", 2, 1, False),
        ("optimizer.lr", 1e-3, 0.001, True),
        ("optimizer.betas", (0.9, 0.95), [0.9, 0.95], True),
        ("optimizer.betas", (0.9, 0.95), (0.9, 0.99), False),
        ("training.clip", None, 1.0, False),
        ("precision.reduce", "bf16", "fp32", False),
        ("schedule.warmup_steps", 0, None, True),
    ],
)
def test_what_means_the_same(path: str, one: Any, other: Any, expected: bool) -> None:
    assert same_value(path, one, other) is expected


# -- comments ------------------------------------------------------------------------------------------------------

TEXT = """\
# the head
# of the file

lr: 0.1  # the rate
# above clip
clip: 'a # b'    # beside clip
verbose: [1, # in a list
  2] # after it
nested:
  # above inner
  inner: |
    text # none
  other: 1
# the tail
"""


def test_comments_are_found_at_their_keys() -> None:
    comments = {key: (comment.above, comment.beside) for key, comment in comments_of(TEXT).items()}
    assert comments == {
        "": (["the head", "of the file", "the tail"], []),
        "lr": ([], ["the rate"]),
        "clip": (["above clip"], ["beside clip"]),
        "verbose": ([], ["in a list", "after it"]),
        "nested.inner": (["above inner"], []),
    }


def test_comments_are_placed_and_change_nothing() -> None:
    nested = {"inner": "one\ntwo # x\n", "other": 1, "long": "word " * 40, "quoted": "one: " * 40}
    document = {"lr": 0.1, "clip": "a # b", "nested": nested, "verbose": [1, 2]}
    text = yaml.safe_dump(document, sort_keys=False)
    beside = {f"nested.{key}": Comment(beside=[f"of {key}"]) for key in ("long", "quoted")}
    placed = insert_comments(text, comments_of(TEXT) | beside)
    assert yaml.safe_load(placed) == document
    for words in (
        "the head",
        "of the file",
        "the tail",
        "the rate",
        "above clip",
        "beside clip",
        "in a list",
        "above inner",
        "of long",
        "of quoted",
    ):
        assert placed.count(f"# {words}") + placed.count(f"; {words}") == 1, words
    assert "lr: 0.1  # the rate" in placed
    assert "# above clip\nclip:" in placed


def test_comments_follow_their_keys_into_another_dialect() -> None:
    text = "# head\nlr: 0.1  # tuned by hand\n# be quiet\nverbose: false\n# long runs\nclip: 2\n"
    loaded = Loaded(Path("a.yaml"), parse(text, "yaml"), text, "yaml")
    conversion = converted(loaded.document, TOY, OURS)
    written = to_text(conversion.document, "yaml", loaded, conversion.verdicts)
    assert yaml.safe_load(written) == conversion.document
    assert "  lr: 0.1  # tuned by hand" in written
    assert "  # long runs\n  clip: 2" in written
    assert written.startswith("# head\n# verbose: be quiet\n")


def test_json_has_no_comments() -> None:
    loaded = Loaded(Path("a.yaml"), {}, "# x\nlr: 1\n", "yaml")
    assert parse(to_text({"lr": 1, "betas": (0.9, 0.99)}, "json", loaded, []), "json") == {
        "lr": 1,
        "betas": [0.9, 0.99],
    }


# -- dtypes and their bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "precision", "ranks", "expected"),
    [  # the bytes of README's table, which the planner's tests hold against the engine
        ("zero0", "bf16", 8, 18),
        ("zero0", "fp32", 8, 16),
        ("zero1", "bf16", 8, 2 + 16 / 8),
        ("zero2", "bf16", 8, 2 + 16 / 8),
        ("zero3", "bf16", 8, 16 / 8),
        ("shard_grad_op", "bf16", 8, 16 / 8),
        ("zero3", "bf16-pure", 8, 8 / 8),
        ("hybrid_shard", "bf16", 8, 16 / 4),
        ("hpz", "bf16", 8, 16 / 8),
    ],
)
def test_bytes_are_those_of_the_table(plan: str, precision: str, ranks: int, expected: float) -> None:
    mesh = {"dp_replicate": 2} if plan in ("hybrid_shard", "hpz") else {}
    document = {"plan": {"name": plan, "mesh": mesh}, "precision": precision}
    (cost,) = costs(OURS.read(document).description, (ranks,))
    gradients = {"zero1": 4 - 4 / 8}.get(plan, 0)  # README counts them where they are split last
    assert cost.bytes_per_parameter == pytest.approx(expected + gradients)


# twice 2 bytes of each element that is sent in codes, and of the part of the sums that a rank encodes
@pytest.mark.parametrize(
    ("plan", "replicas", "expected"),
    [
        ("zero0", 1, 4 + 4 / 8),
        ("zero1", 1, 4.0),
        ("zero3", 1, 4.0),
        ("zero0", 2, 4 + 4 / 2),
        ("zero3", 2, 4 / 4),  # along dp_replicate, behind the sums of the 4 ranks of dp_shard
        ("hybrid_shard", 2, 4 / 4 + 4 / 8),
        ("hpz", 2, 4 / 4),
    ],
)
def test_what_codes_lose_is_in_the_table(plan: str, replicas: int, expected: float) -> None:
    document: dict[str, Any] = {"plan": {"name": plan, "mesh": {"dp_replicate": replicas}}}
    plain, coded = ({"name": "bf16", "quantized_reduce": "int4", "error_feedback": on} for on in (False, True))
    without, description = (OURS.read({**document, "precision": each}).description for each in (plain, coded))
    (before,), (cost,) = costs(without, (8,)), costs(description, (8,))
    assert before.bytes_per_parameter is not None
    assert cost.bytes_per_parameter == pytest.approx(before.bytes_per_parameter + expected)
    assert cost.upcast == before.upcast
    rows = [precisions(each).reduce for each in (without, description)]
    assert rows == ["fp32, int4 codes", "fp32, int4 codes with error feedback"]


def test_what_is_sent_in_codes_is_named_on_the_page() -> None:
    precision = {"name": "bf16", "gather": "int8", "quantized_reduce": "int4", "error_feedback": True}
    (line,) = [each for each in plan_words(OURS.read({"precision": precision}).description) if "dtypes: " in each]
    assert line.endswith("moments fp32, gather int8, quantized_reduce int4, error_feedback")
    assert "gather" not in "".join(plan_words(OURS.read({"precision": "bf16"}).description)).partition("dtypes")[2]


def foreign(weight: str, compute: str, master: str, **more: Any) -> Description:
    dtypes = {"weight": weight, "compute": compute, "accumulate": "fp32", "master": master, "moments": "fp32"}
    rows = {f"sharding.{state}": Setting(str(place)) for state, place in Plan.named("zero3").places().items()}
    return build("fsdp2", {**rows, **{f"precision.{name}": Setting(dtype) for name, dtype in dtypes.items()}, **more})


def test_another_library_keeps_a_narrow_weight_beside_its_master() -> None:
    (cost,) = costs(foreign("bf16", "bf16", "fp32"), (8,))
    assert cost.bytes_per_parameter == pytest.approx((2 + 4 + 4 + 8) / 8)
    (cost,) = costs(foreign("fp32", "bf16", "fp32"), (8,))
    assert cost.bytes_per_parameter == pytest.approx((4 + 4 + 8) / 8)


def test_upcasting_costs_less_on_more_ranks() -> None:
    one, eight = costs(foreign("fp32", "bf16", "fp32"), (1, 8))
    assert one.upcast == 8  # fp32 master, gradient and two moments in place of bf16
    assert eight.upcast == 1


def test_what_is_not_known_has_no_bytes() -> None:
    (cost,) = costs(foreign("loaded", "bf16", "fp32"), (8,))
    assert cost.bytes_per_parameter is None
    (cost,) = costs(build("fsdp2", {}), (8,))
    assert cost.bytes_per_parameter is None
    assert precisions(build("fsdp2", {})).cells() == ["-"] * 7


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD", "SGD")),
        *((name, {}) for name in ("Adagrad", "RMSprop", "Adafactor", "Muon", "Lion", "AdEMAMix")),
        *(("SGD", {"momentum": 0.9}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adam", {"amsgrad": True})),
    ],
)
def test_moments_are_as_many_as_the_optimizer_keeps(name: str, options: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(5, 4))
    optimizer = (getattr(torch.optim, name, None) or getattr(tz.optim, name))([weight], lr=0.1, **options)
    weight.grad = torch.ones(5, 4)
    optimizer.step()
    count = sum(state.numel() == 20 for state in optimizer.state[weight].values() if isinstance(state, torch.Tensor))
    told = {"optimizer.name": Setting(name), "optimizer.options": Setting(options)}
    (cost,) = costs(foreign("bf16", "bf16", "fp32", **told), (8,))
    assert cost.bytes_per_parameter == pytest.approx((2 + 4 + 4 + 4 * count) / 8)


def test_an_optimizer_that_nobody_knows_has_no_bytes() -> None:
    (cost,) = costs(foreign("bf16", "bf16", "fp32", **{"optimizer.name": Setting("my.Own")}), (8,))
    assert cost.bytes_per_parameter is None


def test_autocast_is_named_in_the_row() -> None:
    row = precisions(foreign("fp32", "bf16", "fp32", **{"precision.autocast": Setting(True)}))
    assert row.compute == "bf16 autocast"


# -- explain, check, diff ------------------------------------------------------------------------------------------


def write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(document))
    return path


def understood(tmp_path: Path, document: dict[str, Any], **context: Any) -> Understood:
    return understand(write(tmp_path / "a.yaml", document), "terrazzo", ReadingContext(**context))


def test_the_page_has_every_option_with_who_set_it(tmp_path: Path) -> None:
    document = {
        "plan": "zero3@cpu",
        "precision": "bf16",
        "batch": {"global_batch": 64, "micro_batch": 2},
        "log": {"every": 5},
    }
    page = explain(understood(tmp_path, document, world=8))
    options = {option.path: option for option in page.options}
    assert (options["sharding.grad"].value, options["sharding.grad"].origin) == ("D", "file")
    assert options["optimizer.lr"].origin == "default"
    assert (options["batch.accumulation"].value, options["batch.accumulation"].origin) == (4, "derived")
    assert options["offload.optim"].value == "cpu"
    text = "\n".join(page.plan)
    assert "zero3: weight D | between D | grad D@cpu | optim D@cpu" in text
    assert "optimizer: split over all data ranks, in host memory" in text
    assert "64 sequences = 2 × 4 micro-batches × 8 data ranks" in text
    assert [extra.key for extra in page.own] == ["log.every"]
    assert page.unsettled == ()
    assert {option.path for option in page.options} | set(page.left) == set(PATHS)
    assert "units.min_numel" in page.left


def test_a_batch_that_is_no_product_is_not_shown_as_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    path.write_text(json.dumps(sizes))
    text = "\n".join(explain(understand(path, "deepspeed", ReadingContext(world=3))).plan)
    assert "16 sequences ≠ 2 × 2 micro-batches × 3 data ranks, which are 12: the file contradicts itself" in text


def test_ranks_that_share_experts_are_ranks_of_the_data_axes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("plan: {name: zero3, mesh: {ep: 2}}\nlaunch: {ranks: 8}\n")
    lines = explain(understand(path, "terrazzo")).plan
    assert any(line.endswith("8 = dp_shard 8, of which 2 share experts") for line in lines), lines


def test_no_plan_is_said_to_be_none() -> None:
    assert "no plan" in next(iter(plan_words(build("x", {}))))


CHECKS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"train": {"stepps": 3}}, {}, "train.stepps", "Did you mean 'steps'?"),
    ({"optimizer": {"lr": "fast"}}, {}, "optimizer.lr", "expected a number"),
    ({"plan": {"mesh": {"dp_replicate": 3}}}, {"world": 8}, "plan.mesh.dp_replicate", "does not divide the 8 ranks"),
    (
        {"plan": {"mesh": {"dp_shard": 4}}},
        {"world": 8},
        "plan.mesh.dp_shard",
        "dp_shard 4 = 4 ranks, but the world has 8",
    ),
    ({"launch": {"ranks": 4}}, {"world": 8}, "launch.ranks", "says 4 ranks, and --world 8"),
    ({"plan": {"name": "hfsdp"}}, {"world": 8}, "plan", "set plan.mesh.dp_replicate to the number of groups"),
    ({"plan": {"weight": "D", "between": "D", "grad": "D", "optim": "-"}}, {}, "plan.weight", "prefix"),
    ({"plan": "zero3@nvme"}, {}, "offload.path", "folder"),
    ({"schedule": {"warmup_steps": 9}, "train": {"steps": 5}}, {}, "schedule.warmup_steps", "9 is longer than"),
    ({"offload": {"activations": "cpu"}}, {}, "offload.activations", "activation_checkpointing is 'none'"),
    ({"lora": {"alpha": 2.0}}, {}, "lora.alpha", "alpha without lora.rank"),
    ({"plan": {"name": "zero3", "weight": "D"}}, {}, "plan.weight", "a name, or all four places"),
    ({"plan": {"weight": "D"}}, {}, "plan.weight", "a name, or all four places"),
    ({"plan": {"mesh": {"pp": 2}}, "train": {"compile": True}}, {}, "plan.mesh.pp", "no stage is compiled yet"),
    ({"objective": {"name": "dpo"}, "data": {"packing": "whole"}}, {}, "objective", "two sequences of one text"),
]


def test_a_batch_that_is_no_multiple_is_an_error_where_none_is_filled_up(tmp_path: Path) -> None:
    path = tmp_path / "titan.json"
    path.write_text(json.dumps({"training": {"global_batch_size": 30, "local_batch_size": 4}}))
    found = check(understand(path, "torchtitan", ReadingContext(world=2)))
    (error,) = [finding for finding in found if finding.level == "error"]
    assert error.key == "training.global_batch_size, training.local_batch_size"
    assert "no multiple of 4 × 2 data ranks = 8; 24 is, for one" in error.text


@pytest.mark.parametrize(("document", "context", "key", "text"), CHECKS)
def test_check_finds(tmp_path: Path, document: dict[str, Any], context: dict[str, Any], key: str, text: str) -> None:
    errors = [finding for finding in check(understood(tmp_path, document, **context)) if finding.level == "error"]
    assert any(key in (finding.key, *keys_in(finding.key)) and text in finding.text for finding in errors), errors
    assert len({finding.key for finding in errors}) == len(errors)  # each is told once


@pytest.mark.parametrize(
    ("name", "document", "keys"),
    [
        ("megatron", {"lr-warmup-iters": 9, "train-iters": 5, "micro-batch-size": 1}, ["lr-warmup-iters"]),
        (
            "deepspeed",
            {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            ["zero_optimization.offload_param.device"],
        ),
        (
            "accelerate",
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "nvme"},
            },
            ["deepspeed_config.offload_optimizer_device"],
        ),
    ],
)
def test_check_finds_in_other_dialects(tmp_path: Path, name: str, document: dict[str, Any], keys: list[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    found = check(understand(path, name))
    assert [finding.key for finding in found if finding.level == "error"] == keys


def test_check_warns_of_what_may_be_meant(tmp_path: Path) -> None:
    document = {"precision": {"name": "fp32", "compute": "fp16", "master": "bf16"}}
    by_key = {finding.key: finding for finding in check(understood(tmp_path, document))}
    assert by_key["precision.compute"].level == "warning"
    assert "2^-8 " in by_key["precision.master"].text
    half = understood(tmp_path, {"precision": {"name": "fp32", "master": "fp16"}})
    assert [f.key for f in check(half) if "2^-11 " in f.text] == ["precision.master"]
    stochastic = {"precision": {"name": "bf16_pure", "rounding": "stochastic"}}
    assert not [finding for finding in check(understood(tmp_path, stochastic)) if "are lost" in finding.text]


def test_check_is_silent_where_nothing_is_wrong(tmp_path: Path) -> None:
    document = {"plan": "hybrid_shard", "batch": {"global_batch": 64, "micro_batch": 2}}
    assert (
        check(
            understood(tmp_path, {**document, "plan": {"name": "hybrid_shard", "mesh": {"dp_replicate": 2}}}, world=8)
        )
        == []
    )
    assert check(understood(tmp_path, {"plan": "zero3"})) == []


def test_the_models_sizes_are_checked(tmp_path: Path) -> None:
    description = build("toy", {"mesh.tp": Setting(3, "file", "tp"), "mesh.pp": Setting(40, "file", "pp")})
    loaded = Loaded(tmp_path / "a.yaml", {}, "", "yaml")
    findings = check(Understood(loaded, TOY, Reading(description, (), {}), ReadingContext(heads=32, layers=32)))
    assert {finding.key for finding in findings} == {"tp", "pp"}


def test_ranks_share_key_heads_and_stages_need_no_block_where_training_takes_that(tmp_path: Path) -> None:
    model = {"heads": 32, "kv_heads": 8, "layers": 6, "world": 128}
    mesh = {"tp": 16, "pp": 8}
    assert check(understood(tmp_path, {"plan": {"mesh": mesh}}, **model)) == []
    path = tmp_path / "titan.json"
    degrees = {"tensor_parallel_degree": 16, "pipeline_parallel_degree": 8}
    titan = {"parallelism": degrees, "training": {"disable_cuda_graphs": True}}
    path.write_text(json.dumps(titan))
    errors = [each for each in check(understand(path, "torchtitan", ReadingContext(**model))) if each.level == "error"]
    assert {each.key.rpartition(".")[2] for each in errors} == set(degrees)
    assert {each.key for each in check(understood(tmp_path, {"plan": {"mesh": {"tp": 12, "pp": 9}}}, **model))} >= {
        "plan.mesh.tp",
        "plan.mesh.pp",
    }


def test_differences_are_of_meaning() -> None:
    one = OURS.read({"plan": "zero3", "precision": "bf16", "log": {"every": 5}}).description
    other = OURS.read({"plan": {"name": "full_shard"}, "precision": {"name": "bf16"}, "log": {"every": 5}}).description
    assert compare(one, other) == []
    third = OURS.read(
        {"plan": "zero2", "precision": {"name": "bf16", "reduce": "bf16"}, "log": {"every": 6}}
    ).description
    differences = {difference.path: difference for difference in compare(one, third)}
    assert set(differences) == {"sharding.weight", "sharding.between", "precision.reduce", "log.every"}
    assert (differences["precision.reduce"].a.value, differences["precision.reduce"].b.value) == ("fp32", "bf16")


def test_what_one_leaves_to_code_is_told_from_what_differs() -> None:
    toy = TOY.read({"lr": 3e-4, "clip": 1.0}).description
    hub = OURS.read({}).description
    differences = {difference.path: difference.kind for difference in compare(toy, hub)}
    assert differences["schedule.name"] == "b"
    assert "optimizer.lr" not in differences
    assert "training.compile" not in differences  # off in one, unsaid in the other
    assert set(differences.values()) == {"b"}


def test_extras_of_one_dialect_are_compared() -> None:
    def described(value: int) -> Description:
        return build("toy", {}, (Extra("magic", value, "magic"),))

    spelling = build("toy", {"optimizer.lr": Setting(0.1, "file", "lr")}, (Extra("lr", "1e-1"),))
    plainly = build("toy", {"optimizer.lr": Setting(0.1, "file", "lr")}, (Extra("lr", 0.1),))
    assert compare(spelling, plainly) == []
    assert compare(described(1), described(1)) == []
    assert [difference.path for difference in compare(described(1), described(2))] == ["magic"]
    assert compare(described(1), build("fsdp2", {}, (Extra("magic", 2),))) == []


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("terrazzo", {"train": {"eval_batches": 8}}, {"train": {"eval_batches": 9}}),
        ("terrazzo", {"model": {"dim": 256}}, {"model": {"dim": 64}}),
        ("deepspeed", {"wall_clock_breakdown": False}, {"wall_clock_breakdown": True}),
        ("torchtitan", {"metrics": None}, {"metrics": {"log_freq": 3}}),
    ],
)
def test_a_default_that_is_written_out_is_no_difference(
    name: str, usual: dict[str, Any], other: dict[str, Any]
) -> None:
    stated, silent, changed = (read_document(dialect(name), each).description for each in (usual, {}, other))
    assert compare(stated, silent) == compare(silent, stated) == []
    assert compare(stated, changed) and compare(changed, silent)


def test_a_verdict_for_each_key_and_no_other() -> None:
    document = {"plan": {"name": "zero3", "mesh": {}}, "optimizer": {"options": {}}, "train": None, "x": [1]}
    reading = OURS.read(document)
    assert [verdict.key for verdict in reading.verdicts] == [
        "plan.name",
        "plan.mesh",
        "optimizer.options",
        "train",
        "x",
    ]
    kinds = {verdict.key: verdict.kind for verdict in reading.verdicts if isinstance(verdict, KeyVerdict)}
    assert kinds == {
        "plan.name": "applied",
        "plan.mesh": "applied",  # an empty section says nothing
        "optimizer.options": "applied",
        "train": "refused",  # and null is none, to the trainer
        "x": "refused",
    }


@pytest.mark.parametrize("name", ["a, b", "a.b", "a, b.c", ", "])
def test_a_name_with_commas_or_dots_of_its_own_is_one_key(name: str) -> None:
    document = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, name: 1}}}
    source, target = dialect("deepspeed"), dialect("terrazzo")
    conversion = convert_reading(source, read_document(source, document, NO_CONTEXT), target, NO_CONTEXT)
    verdict = next(each for each in conversion.verdicts if each.key == join("optimizer.params", name))
    assert (verdict.kind, verdict.why) == ("lossy", f"SGD has no {name}")
    again = convert_reading(source, read_document(source, document, NO_CONTEXT), source, NO_CONTEXT)
    assert again.document == document
