"""From conversations to tokens and targets: what is learnt, how sequences are filled, what is refused."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.config import load_config
from terrazzo.errors import BadInput
from terrazzo.train.data import IGNORED, TokenData, evaluation_batches, load_data
from terrazzo.train.data.cache import write_cache
from terrazzo.train.data.chat import Rendered
from terrazzo.train.data.packing import best_fit
from terrazzo.train.data.records import Document
from terrazzo.train.data.sources import Skipped
from terrazzo.train.data.tokenizer import ByteTokenizer
from terrazzo.train.preflight import check
from tests.helpers.chat import CHATML, MARKED, conversations, save_tokenizer, turns, write_records
from tests.helpers.data import data_config

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of one tokenizer with, without and with another chat template."""
    root = tmp_path_factory.mktemp("tokenizers")
    templates = {"marked": MARKED, "chatml": CHATML, "none": None}
    return {name: str(save_tokenizer(root / name, template)) for name, template in templates.items()}


def load(folder: Path, records: list[Any], tokenizer: str = "bytes", length: int = 400, **options: Any) -> TokenData:
    source = write_records(folder / "chat.jsonl", records)
    settings = {"validation_fraction": 0.0, "cache": folder / "cache", **options}
    return load_data(data_config(str(source), length, tokenizer=tokenizer, **settings))


def rows_of(data: TokenData) -> list[tuple[list[int], list[int]]]:
    """Of each sequence its inputs and targets."""
    batch = data.train.batch(np.arange(len(data.train)))
    assert batch.valid_tokens == data.train.targets_numel == int((batch.targets != IGNORED).sum())
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


def learnt(data: TokenData) -> list[str]:
    """What is learnt of each sequence, as text; `/` ends a document."""
    kept = [[token for token in targets if token != IGNORED] for _, targets in rows_of(data)]
    return ["".join("/" if token == 256 else chr(token) for token in row) for row in kept]


def masked(folder: str, messages: Any, template: str = MARKED) -> tuple[list[int], list[int]]:
    """A conversation's tokens and the assistant's of them, as transformers alone gives them."""
    found = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


def test_the_built_in_template_learns_what_the_assistant_wrote_and_its_end(tmp_path: Path) -> None:
    records = [turns("hi", "yes", "and?", "", system="be brief"), turns("one", "two")]
    data = load(tmp_path, records)
    assert learnt(data) == ["yes//", "two/"]
    inputs, _ = rows_of(data)[1]
    assert bytes(token for token in inputs if token < 256) == b"<|user|>\none<|assistant|>\ntwo"
    assert learnt(load(tmp_path, records, loss_on="all"))[1] == "|user|>\none/<|assistant|>\ntwo/"
    assert data.train.bytes_per_token == pytest.approx(6 / 9)


def test_the_text_of_all_that_is_learnt_counts(tmp_path: Path) -> None:
    """Of the byte tokenizer every token but an end is a byte, the roles' among them."""
    records = [turns("hi", "yes", "und? ü", "", system="be brief"), turns("one", "two")]
    data = load(tmp_path, records, loss_on="all")
    targets = [token for _, row in rows_of(data) for token in row if token != IGNORED]
    assert data.train.bytes_per_token == sum(token < 256 for token in targets) / len(targets)


@pytest.mark.parametrize("template", ["marked", "chatml"])
def test_templates_give_the_tokens_and_the_mask_of_transformers(
    tmp_path: Path, tokenizers: dict[str, str], template: str
) -> None:
    records = conversations(12)
    rows = rows_of(load(tmp_path, records, tokenizers[template]))
    for messages, (inputs, targets) in zip(records, rows, strict=True):
        tokens, mask = masked(tokenizers[template], messages)
        expected = [token if taken else IGNORED for token, taken in zip(tokens[1:], mask[1:], strict=True)]
        assert inputs[: len(tokens)] == tokens[: len(inputs)]
        assert targets == expected + [IGNORED] * (400 - len(expected))


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ';' }}{% endfor %}")
    (row,) = rows_of(load(tmp_path, [turns("a", "bc")], tokenizers["none"], chat_template=file))
    own = transformers.AutoTokenizer.from_pretrained(tokenizers["none"])
    assert own.decode([token for token in row[1] if token != IGNORED]) == "assistant: bc;"
    file.write_text("{% for m in messages %}{{ m['content'] + ';' }}{% endfor %}")
    (row,) = rows_of(load(tmp_path, [turns("a", "bc")], tokenizers["none"], chat_template=file))
    assert own.decode([token for token in row[1] if token != IGNORED]) == "bc;"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("none", turns("a", "b"), "no chat template for it. Set data.chat_template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", turns("a", "b"), r"jsonl:1: .*SecurityError"),
        ("{{ messages.append(1) }}", turns("a", "b"), r"SecurityError"),
        ("{% for m in messages %}\n{{ oh no", turns("a", "b"), r"own\.jinja' has an error in line 2 \(.*SyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", turns("a", "b"), "does not take.*roles must alternate"),
        # the turns before look different once there are more of them
        ("{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}", turns("a", "b", "c", "d"),
         "not certain in message 2.*differently.*generation"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [{"role": "assistant", "content": "hello"}, *turns("x")],
         "not certain in message 1: nothing comes before"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.role + m.content }};{% endfor %}",
         [*turns("a", "b"), {"role": "tool", "content": "42"}, *turns("c", "d")],
         "leaves out message 3, of role 'tool'"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_do_is_refused(
    tmp_path: Path, tokenizers: dict[str, str], template: str, messages: Any, message: str
) -> None:
    options: dict[str, Any] = {}
    if template != "none":
        options["chat_template"] = tmp_path / "own.jinja"
        options["chat_template"].write_text(template)
    with pytest.raises(BadInput, match=f"(?s){message}"):
        load(tmp_path, [messages], tokenizers["none"], **options)


def test_a_token_across_the_border_of_a_turn_is_refused(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(transformers.AutoTokenizer.from_pretrained(tokenizers["none"])("what")["input_ids"]) == 1
    with pytest.raises(BadInput, match=r"not certain in message 2: a token runs across.*loss_on=all"):
        load(tmp_path, [turns("wh", "at")], tokenizers["none"], chat_template=file)
    assert load(tmp_path, [turns("wh", "at no")], tokenizers["none"], chat_template=file, loss_on="all").train


def test_tools_go_to_a_template_that_knows_them(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    record = {"messages": [*turns("sum"), call, {"role": "tool", "content": "3"}], "tools": [{"name": "add"}]}
    with pytest.raises(BadInput, match="has tools, which the built-in template cannot show"):
        load(tmp_path, [record])
    with pytest.raises(BadInput, match="leaves out the record's tools"):
        load(tmp_path, [record], tokenizers["chatml"])
    file = tmp_path / "own.jinja"
    file.write_text(
        "{{ tools[0].name }}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    (row,) = rows_of(load(tmp_path, [record], tokenizers["none"], chat_template=file))
    own = transformers.AutoTokenizer.from_pretrained(tokenizers["none"])
    assert own.decode([token for token in row[0] if token]) == "add|user:sum|assistant:add|tool:3"
    assert own.decode([token for token in row[1] if token != IGNORED]) == "|assistant:add"


def test_conversations_without_an_answer_are_counted_and_refused_if_all(tmp_path: Path) -> None:
    silent = [turns("anyone?"), {"messages": []}]
    data = load(tmp_path, [*silent, turns("a", "b")])
    assert len(data.train) == 1
    left_out = "3 conversations; 2 without an assistant turn left out (first: chat.jsonl:1); training: 2 tokens learnt"
    assert data.notes[0].startswith(left_out)
    with pytest.raises(BadInput, match=r"Of 2 conversations, from chat\.jsonl:1 on, none.*\['user'\].*loss_on=all"):
        load(tmp_path, silent)


def test_turns_that_begin_or_end_with_dropped_characters_are_learnt_alone(tmp_path: Path) -> None:
    kinds = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["a", "b", "c", "d", "[UNK]", "</s>"])}
    tokenizer = kinds.Tokenizer(kinds.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = kinds.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "own")
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }} {% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    data = load(tmp_path, [turns("c", "a", "c", "d", "c")], str(tmp_path / "own"), chat_template=file)
    ((_, targets),) = rows_of(data)
    assert [token for token in targets if token != IGNORED] == [words["a"], words["d"]]


def test_a_template_that_marks_nothing_is_refused(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(BadInput, match=r"chat\.jsonl:1 on, the chat template marks no token.*generation"):
        load(tmp_path, [turns("a", "b")], tokenizers["none"], chat_template=file)


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([turns("a", "b"), [{"role": "asistant", "content": "b"}]], {}, r"jsonl:2: .*'asistant'. Did you mean"),
        ([[*turns("a"), {"role": "Assistant", "tool_calls": [{}]}]], {}, r"jsonl:1: .*'Assistant'. Did you mean"),
        ([{"text": "x", "messages": turns("a", "b")}], {}, r"jsonl:1 has both 'text' and 'messages'.*data\.text_field"),
        ([turns("a", "b")], {"packing": "stream", "too_long": "drop"}, "too_long is 'drop', but.*'stream'"),
        ([{"text": "x"}], {"too_long": "drop"}, "too_long is 'drop', but.*default for text"),
        ([turns("a" * 400, "b")], {"packing": "stream", "validation_fraction": 0.3}, "training data have no token"),
    ],
)  # fmt: skip
def test_what_would_not_be_learnt_is_refused(
    tmp_path: Path, records: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load(tmp_path, records, **options)
    if "text" in records[0] and "messages" in records[0]:
        assert learnt(load(tmp_path, records, text_field="no-text")) == ["b/"]


def test_a_token_that_the_cache_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Wide:
        def render(self, document: Document) -> Rendered:
            return Rendered(np.array([1, 70_000]), [(1, 2)], 1)

    with pytest.raises(BadInput, match=r"a:1 has the token id 70000, but tokenizer\.json ends at 256"):
        write_cache(tmp_path / "c", "key", [Document("a:1", messages=[])], ByteTokenizer(), Skipped(), Wide)


def test_a_template_that_no_record_needs_is_refused(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages }}")
    with pytest.raises(BadInput, match=r"no record of data\.source has 'messages'"):
        load(tmp_path, [{"text": "plain"}], tokenizers["none"], chat_template=file)


def test_long_conversations_are_cut_or_dropped_and_counted(tmp_path: Path) -> None:
    # 26 tokens before the answer, of which 4 fit with it into 30
    records = [turns("ok", "yes"), turns("ok", "0123456789"), turns("x" * 40, "lost"), turns("ok", "no")]
    data = load(tmp_path, records, length=29)
    assert learnt(data) == ["yes/", "0123", "no/"]
    assert "1 cut to a sequence; 1 left out because nothing to learn fits" in data.notes[0]
    data = load(tmp_path, records, length=29, too_long="drop")
    assert learnt(data) == ["yes/", "no/"]
    assert "2 left out as longer than a sequence" in data.notes[0]
    with pytest.raises(BadInput, match=r"sequences of 8 tokens: 4 documents are longer.*data\.too_long=truncate"):
        load(tmp_path, records, length=8, too_long="drop")
    with pytest.raises(BadInput, match="sequences of 8 tokens: 4 documents are cut before it"):
        load(tmp_path, records, length=8)
    validation = str(write_records(tmp_path / "long.jsonl", [turns("x" * 40, "lost")]))
    with pytest.raises(BadInput, match=r"validation data have no token.*: 1 documents are longer"):
        load(tmp_path, records, length=29, too_long="drop", validation_source=validation)


@pytest.mark.parametrize("length", [90, 150, 400])
def test_packing_learns_the_same_tokens_in_fewer_sequences(tmp_path: Path, length: int) -> None:
    records = conversations(24)
    single = load(tmp_path, records, length=length)
    whole = load(tmp_path, records, length=length, packing="whole")
    stream = load(tmp_path, records, length=length, packing="stream")
    assert len(whole.train) < len(single.train)
    assert whole.train.targets_numel == single.train.targets_numel
    pieces = sorted("".join(learnt(data)) for data in (single, whole))
    assert sorted(pieces[0]) == sorted(pieces[1])
    for inputs, targets in rows_of(whole):
        sequence = [inputs[0], *targets]
        starts = [i for i, (a, b) in enumerate(pairwise([256, *inputs])) if a == 256 and bytes([b % 256]) == b"<"]
        assert all(sequence[start] == IGNORED for start in starts[1:])  # no document follows from another's end
    # what a sequence cuts in two is still learnt, but for a target that begins the stream
    full = load(tmp_path, records, length=4000)
    assert stream.train.targets_numel == full.train.targets_numel


def test_best_fit_keeps_every_document_once_and_within_the_room() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    order, bounds = best_fit(lengths, 64)
    assert sorted(order.tolist()) == list(range(500))
    fills = [int(lengths[order[start:stop]].sum()) for start, stop in pairwise(bounds.tolist())]
    assert max(fills) <= 64
    least = max(lengths.sum() / 64, (lengths > 32).sum())  # of any packing
    assert len(fills) <= 11 / 9 * least + 1  # what best fit, longest first, guarantees


def test_validation_is_whole_conversations_with_the_same_masks(tmp_path: Path) -> None:
    data = load(tmp_path, conversations(24), validation_fraction=0.2)
    assert data.validation is not None
    assert 2 <= len(data.validation) <= 6
    assert len(data.train) + len(data.validation) == 24
    total = load(tmp_path, conversations(24)).train.targets_numel
    assert data.train.targets_numel + data.validation.targets_numel == total
    parts = [list(evaluation_batches(data.validation, 2, rank, 2)) for rank in range(2)]
    assert sum(batch.valid_tokens for part in parts for batch in part) == data.validation.targets_numel
    few = load(tmp_path, [turns("a", "b" * 30), turns("c", "d")], validation_fraction=0.1)
    assert few.validation is not None
    assert (len(few.train), len(few.validation)) == (1, 1)


def test_text_and_conversations_together_need_a_packing(tmp_path: Path) -> None:
    records = [{"text": "plain"}, turns("a", "b")]
    with pytest.raises(BadInput, match=r"1 conversations and 1 texts.*Set data\.packing"):
        load(tmp_path, records)
    assert learnt(load(tmp_path, records, packing="single")) == ["lain/", "b/"]
    (row,) = learnt(load(tmp_path, records, packing="stream"))
    assert row == "lain/b/"


def test_what_decides_the_tokens_names_the_cache(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    def caches() -> set[str]:
        return {path.name for path in (tmp_path / "cache").iterdir()}

    file = tmp_path / "own.jinja"
    folder = str(shutil.copytree(tokenizers["chatml"], tmp_path / "tokenizer"))
    load(tmp_path, conversations(4), folder)
    first = load(tmp_path, conversations(4), folder).train.fingerprint
    assert len(caches()) == 2  # the source was written anew
    source = str(tmp_path / "chat.jsonl")
    more = Path(folder) / "additional_chat_templates"
    for options in ({}, {"loss_on": "all"}, {"chat_template": file}):
        file.write_text("{% for m in messages %}{{ m.role + ' ' + m.content + ';' }}{% endfor %}")
        config = data_config(source, 400, tokenizer=folder, cache=tmp_path / "cache", **options)
        assert (load_data(config).train.fingerprint == first) is False
    assert len(caches()) == 4
    config = data_config(source, 400, tokenizer=folder, cache=tmp_path / "cache", validation_fraction=0)
    assert load_data(config).train.fingerprint == first
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    assert load_data(config).train.fingerprint == first
    assert len(caches()) == 5  # conversations with tools would be rendered with it
    whole = data_config(source, 400, tokenizer=folder, cache=tmp_path / "cache", packing="whole")
    assert load_data(whole).train.fingerprint != first


def test_a_template_for_the_built_in_tokenizer_is_refused() -> None:
    with pytest.raises(BadInput, match="has a template of its own"):
        load_data(data_config("python-stdlib", 16, chat_template="own.jinja"))


def test_parquet_conversations_with_tools_and_parts(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"messages": [turns("a", "b")], "tools": [json.dumps([{"name": "f"}])], "more": [1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="leaves out the record's tools"):
        load_data(data_config(str(tmp_path / "a.parquet"), 64, tokenizer=tokenizers["chatml"], cache=tmp_path / "c"))


def test_the_example_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folders = [f"log.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", "launch.ignore_planner=true"]
    config = load_config("examples/sft.yaml", folders)
    check(config, 2)
    data = load_data(config)
    assert data.notes[0].startswith("57 conversations; training: ")
    assert data.validation is not None
    assert len(data.train) >= config.batch.global_batch
    assert "left out" not in data.notes[0]
    assert "cut" not in data.notes[0]
