"""Which files and documents a source gives, and what is refused."""

from __future__ import annotations

import builtins
import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terrazzo.errors import BadInput
from terrazzo.train.data.records import Document, TextRecords
from terrazzo.train.data.sources import PYTHON_STDLIB, Skipped, find_files, read_documents
from terrazzo.train.data.tokenizer import ByteTokenizer, load_tokenizer
from terrazzo.train.model.prepare import decoder_config
from tests.helpers.data import data_config


def documents(source: str | list[str], text_field: str = "text", max_bytes: int | None = None) -> list[Document]:
    return list(read_documents(find_files(source), TextRecords(text_field), max_bytes, Skipped()))


def pairs(source: str | list[str]) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in documents(source)]


def write_jsonl(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_folder_glob_file_and_list(tmp_path: Path) -> None:
    (tmp_path / "b" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name, text in [("b/two.py", "2"), ("a.txt", "1"), ("c.md", ""), (".hidden", "x"), (".git/x", "x")]:
        (tmp_path / name).write_text(text)
    (tmp_path / "b" / "__pycache__" / "two.pyc").write_text("x")
    (tmp_path / "b" / "__pycache__" / "three.py").write_text("x")
    (tmp_path / ".git" / "four.py").write_text("x")
    whole = [("a.txt", "1"), ("b/two.py", "2")]
    assert pairs(str(tmp_path)) == whole
    assert pairs(f"{tmp_path}/**/*.py") == pairs(f"{tmp_path}/*/*.py") == [("b/two.py", "2")]
    with pytest.raises(BadInput, match="matches no visible file"):
        pairs(f"{tmp_path}/b/*/*.py")
    assert pairs([f"{tmp_path}/b", f"{tmp_path}/a.txt"]) == [("two.py", "2"), ("a.txt", "1")]


def test_text_is_kept_to_the_byte_but_for_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\t\xc3\xa9\n")
    assert pairs(str(tmp_path)) == [("a.txt", "one\r\ntwo\té\n")]


def test_binary_files_are_skipped_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_text("fine")
    skipped = Skipped()
    assert [d.text for d in read_documents(find_files(str(tmp_path)), TextRecords(), None, skipped)] == ["fine"]
    assert skipped.names == ["a.png", "b.txt"]
    assert str(skipped) == "2 found without UTF-8 text or records, and skipped (a.png, b.txt)"
    with pytest.raises(BadInput, match=r"a\.png.*binary"):
        documents(str(tmp_path / "a.png"))
    with pytest.raises(BadInput, match=r"b\.txt.*0xe9 at offset 3.*iconv"):
        documents(str(tmp_path / "b.txt"))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("absent.txt", "does not exist"),
        ("*.absent", "matches no visible file"),
        ("empty", "without any visible file"),
    ],
)
def test_sources_that_name_nothing(source: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=named):
        find_files(source)


def test_empty_list_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(BadInput, match="empty list"):
        find_files([])
    with pytest.raises(BadInput, match="all are empty"):
        find_files(str(tmp_path))


CHATS = [{"messages": [{"role": "user", "content": text}]} for text in "ab"]


@pytest.mark.parametrize("form", ["list", "indented", "lines", "one"])
@pytest.mark.parametrize("named_by", ["itself", "folder", "glob"])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_json_of_conversations_is_read_as_such_and_never_as_text(
    form: str, named_by: str, suffix: str, tmp_path: Path
) -> None:
    text = {
        "list": json.dumps(CHATS),
        "indented": "\ufeff" + json.dumps(CHATS, indent=2),
        "lines": "\n" + "\n".join(map(json.dumps, CHATS)),
        "one": json.dumps(CHATS[0]),
    }[form]
    file = tmp_path / f"chats{suffix}"
    file.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    source = {"itself": str(file), "folder": str(tmp_path), "glob": f"{tmp_path}/*.json*"}[named_by]
    expected = CHATS[:1] if form == "one" else CHATS
    assert [document.messages for document in documents(source)] == [record["messages"] for record in expected]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{\n  "data": [{"text": "one"}]\n}', "must hold a list of objects with a 'text' or.*one such object per line"),
        ('["one", "two"]', "must hold a list of objects"),
        ('[{"text": "one"}, "two"]', "must hold a list of objects"),
        ('[{"txet": "one"}]', r"c\.json:1: the record has neither a 'text' nor a 'messages'"),
        ('{"txet": "one"}', r"c\.json:1: the record has neither a 'text' nor a 'messages'"),
        ("a word", "is not valid JSON .*correct it"),
        ("[" * 100_000, "is not valid JSON .*correct it"),
    ],
)
def test_json_without_records_is_refused_by_name_and_named_in_a_folder(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    (tmp_path / "d.txt").write_text("fine")
    with pytest.raises(BadInput, match=named):
        documents(str(tmp_path / "c.json"))
    skipped = Skipped()
    assert [d.text for d in read_documents(find_files(str(tmp_path)), TextRecords(), None, skipped)] == ["fine"]
    assert skipped.names == ["c.json"]


@pytest.mark.parametrize("text", ['[{"text": "one"}, {"text": 2}]', '{"text": "one"}\n{"text": 2}'])
def test_a_bad_record_behind_good_ones_is_refused_in_a_folder_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(BadInput, match=r"c\.json:2: field 'text' is int"):
        documents(str(tmp_path))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_text_is_text(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    suffix = {gzip.compress: "gz", bz2.compress: "bz2"}.get(compress, "xz")
    (tmp_path / f"a.txt.{suffix}").write_bytes(compress(b"one"))
    (tmp_path / f"b.bin.{suffix}").write_bytes(compress(b"\0\1"))
    skipped = Skipped()
    assert [d.text for d in read_documents(find_files(str(tmp_path)), TextRecords(), None, skipped)] == ["one"]
    assert skipped.names == [f"b.bin.{suffix}"]
    (tmp_path / f"c.txt.{suffix}").write_bytes(compress(b"one")[:-4])
    with pytest.raises(BadInput, match=rf"c\.txt\.{suffix}' cannot be read"):
        documents(str(tmp_path))


@pytest.mark.parametrize("max_bytes", [1, 5, 6, 7, 100])
def test_max_bytes_cuts_between_characters(max_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd")
    (tmp_path / "b.txt").write_text("éé")
    read = "".join(document.text for document in documents(str(tmp_path), max_bytes=max_bytes))
    assert "abcdéé".startswith(read)
    assert max_bytes - 1 <= len(read.encode()) <= max_bytes or read == "abcdéé"


def test_python_stdlib_is_source_text_without_tests() -> None:
    names = [file.name for file in find_files(PYTHON_STDLIB)]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "__pycache__"}
    assert all(name.endswith(".py") for name in names)


def test_jsonl_with_text_and_messages(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    chat = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": parts}]
    source = write_jsonl(tmp_path / "a.jsonl", {"text": "one", "id": 1}, "", {"text": ""}, {"messages": chat})
    conversation = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": "42"}]
    assert documents(source) == [Document("a.jsonl:1", "one"), Document("a.jsonl:4", messages=conversation)]
    other = write_jsonl(tmp_path / "b.ndjson", {"content": "x"})
    assert [document.text for document in documents(other, text_field="content")] == ["x"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{'text': 1}", "not valid JSON"),
        ('["text"]', "is a JSON list"),
        ({"txet": "x"}, r"neither a 'text' nor a 'messages'.*\['txet'\].*Did you mean 'txet'"),
        ({"text": 7}, "'text' is int"),
        ({"messages": "hi"}, "'messages' is str"),
        ({"messages": [{"role": "user"}]}, "'role' and a 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
        *(({"messages": [{"role": "user", "content": [{"type": "text", "text": t}]}]}, "only text") for t in (None, 5)),
        (r'{"text": "a\ud800"}', r"lone surrogate \(\\ud800 at character 1\)"),
    ],
)
def test_malformed_jsonl_names_file_and_line(line: Any, named: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"text": "fine"}, line)
    with pytest.raises(BadInput, match=r"(?s)a\.jsonl:2.*" + named):
        documents(source)


def test_jsonl_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(BadInput, match=r"a\.jsonl:1.*utf-8"):
        documents(str(tmp_path))


def test_parquet_with_text_and_messages(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"id": [1, 2, 3], "text": ["a", "", "c"]}), tmp_path / "a.parquet")
    chat = [[{"role": "user", "content": "hi"}]]
    parquet.write_table(pa.table({"messages": chat}), tmp_path / "b.parquet")
    found = [Document("a.parquet:1", "a"), Document("a.parquet:3", "c"), Document("b.parquet:1", messages=chat[0])]
    assert documents(str(tmp_path)) == found


def test_parquet_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"txt": ["a"], "id": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(BadInput, match=r"no column 'text'.*\['txt', 'id'\].*Did you mean 'txt'"):
        documents(str(tmp_path / "a.parquet"))
    with pytest.raises(BadInput, match=r"null\.parquet:2.*NoneType"):
        documents(str(tmp_path / "null.parquet"))
    with pytest.raises(BadInput, match="not a readable parquet"):
        documents(str(tmp_path / "b.parquet"))
    without(monkeypatch, "pyarrow")
    with pytest.raises(BadInput, match=r"pip install -e '\.\[data\]'"):
        documents(str(tmp_path / "a.parquet"))


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    text = "naïve\n\0🙂"
    (tokens,) = tokenizer.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([*tokens.tolist(), tokenizer.end_of_document]) == text
    assert tokenizer.decode([0xE9]) == "\N{REPLACEMENT CHARACTER}"


def word_tokenizer(folder: Path, **config: Any) -> Path:
    """A tokenizer folder: one word, one id; id 7 is `</s>`, ids 4 to 6 are not used."""
    backend = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "</s>": 7, "<end>": 8}
    model = backend.Tokenizer(backend.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = backend.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["</s>"])
    model.enable_truncation(2)
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_huggingface_tokenizer(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (9, 7)
    first, second = tokenizer.encode(["one two three one", "two</s>one"])
    assert first.tolist() == [1, 2, 3, 1]  # the file's truncation is for inference
    assert second.tolist() == [0]  # the text of a special token is not the token
    assert tokenizer.decode([1, 2, 7]) == "one two"
    by_file = load_tokenizer(str(folder / "tokenizer.json"), end_of_document="<end>")
    assert by_file.end_of_document == 8
    assert by_file.fingerprint != tokenizer.fingerprint
    stated = load_tokenizer(str(word_tokenizer(tmp_path / "other", eos_token={"content": "<end>"})))
    assert stated.end_of_document == 8


def test_tokenizers_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = word_tokenizer(tmp_path / "words")
    with pytest.raises(BadInput, match="neither 'bytes' nor an existing path"):
        load_tokenizer("gpt2")
    with pytest.raises(BadInput, match="has no token 'absent'"):
        load_tokenizer(str(folder), end_of_document="absent")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(BadInput, match="not a readable tokenizer"):
        load_tokenizer(str(tmp_path / "bad.json"))
    without(monkeypatch, "tokenizers")
    with pytest.raises(BadInput, match=r"pip install -e '\.\[hf\]'"):
        load_tokenizer(str(folder))


def test_a_decoders_vocabulary_is_of_the_tokenizer_with_the_end_that_is_given(tmp_path: Path) -> None:
    stated = word_tokenizer(tmp_path / "words", eos_token="absent")
    with pytest.raises(BadInput, match=r"Set data\.end_of_document"):
        decoder_config(data_config("python-stdlib", 16, tokenizer=str(stated)))
    given = data_config("python-stdlib", 16, tokenizer=str(stated), end_of_document="<end>")
    assert decoder_config(given).vocab_size == 9


def test_a_folder_without_any_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes `import package` fail as if it were not installed."""
    real = builtins.__import__

    def importing(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", importing)
