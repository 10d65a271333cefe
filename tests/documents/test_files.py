"""A stranger's file is plain data or refused, in less than a second, and nothing that it names is run."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from terrazzo.documents import MAX_BYTES, MAX_DEPTH, Format, dotted_keys, load, parse, write_yaml
from terrazzo.errors import BadInput

LIMIT_S = 1.0
HALF = MAX_BYTES // 2


def lol(levels: int = 9, width: int = 10) -> str:
    """Billion laughs: each list holds ten times the one before."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int = 9) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, levels)]
    return "\n".join(lines)


HOSTILE: dict[str, tuple[Format, str, str]] = {
    "cycle": ("yaml", "a: &a [*a]", "contains itself"),
    "cycle in a mapping": ("yaml", "a: &a {b: {c: *a}}", "contains itself"),
    "cycle by merging": ("yaml", "a: &a {<<: *a}", "contains itself"),
    "billion laughs": ("yaml", lol(), "once aliases are expanded"),
    "billion laughs by merging": ("yaml", merges(), "once aliases are expanded"),
    "nan": ("yaml", "a: .nan", "not a number that a setting"),
    "nan in JSON": ("json", '{"a": "NaN",\n"b": NaN}', "line 2 has NaN, which is not a number that a setting"),
    "infinity": ("yaml", "a: {b: [1, -.inf]}", "a.b is -inf"),
    "infinity in JSON": ("json", '{"a": -Infinity}', "not a number that a setting"),
    "a number that rounds to infinity": ("json", '{"a": 1e999}', "a is inf"),
    "key twice": ("yaml", "a: 1\nb:\n  c: 1\n  c: 2", "line 4: key 'c' appears twice in one section"),
    "key twice in JSON": ("json", '{"b": "{",\n"a": {"b": 1, // b\n"\\u0062" : 2}}', "line 3: key 'b' appears twice"),
    "key twice, once as a number": ("yaml", "8: a\n'8': b", "'8' appears twice"),
    "tag that calls": ("yaml", "a: !!python/object/apply:os.system ['true']", "nothing in it is called"),
    "tag that names": ("yaml", "a: !!python/name:os.system", "nothing in it is called"),
    "tag on a key": ("yaml", "!!python/name:os.system : 1", "nothing in it is called"),
    "tag on a mapping": ("yaml", "a: !!python/object:pathlib.Path {x: 1}", "nothing in it is called"),
    "bytes": ("yaml", "a: !!binary aGk=", "nothing in it is called"),
    "set": ("yaml", "a: !!set {x}", "nothing in it is called"),
    "deep lists": ("yaml", "a: " + "[" * HALF, f"more than {MAX_DEPTH} deep"),
    "deep lists in JSON": ("json", '{"a": ' + "[" * HALF, f"more than {MAX_DEPTH} deep"),
    "deep sections": ("yaml", "\n".join(" " * i + "a:" for i in range(1400)), f"more than {MAX_DEPTH} deep"),
    "deep dashes": ("yaml", "- " * HALF, f"more than {MAX_DEPTH} deep"),
    "deep keys": ("yaml", "? " * HALF, f"more than {MAX_DEPTH} deep"),
    "many values": ("yaml", "a: [" + "1," * HALF + "]", "more than 20,000 values"),
    "many values in JSON": ("json", '{"a": [' + "1," * HALF + "1]}", "more than 20,000 values"),
    "many keys": ("yaml", "\n".join(f"k{i}: x" for i in range(90_000)), "more than 20,000 values"),
    "many anchors": ("yaml", "\n".join(f"a{i}: &a{i} x" for i in range(40_000)), "more than 20,000 values"),
    "a string that does not end": ("json", '"' + '\\"' * HALF, "not valid JSON"),
    "a long number": ("yaml", "a: " + "9" * MAX_BYTES, "a number of 1,048,576 characters"),
    "a long number in JSON": ("json", '{"a": ' + "9" * HALF + "}", "cannot be read"),
    "a number beyond 64 bits": ("json", '{"a": ' + "9" * 30 + "}", "more than any setting has"),
    "a number in base 60": ("yaml", "a: 1" + ":59" * 300_000, "characters"),
    "a long fraction": ("yaml", "a: 1." + "1" * HALF, "characters"),
    "several documents": ("yaml", "a: 1\n---\nb: 2", "several YAML documents"),
    "NUL": ("yaml", "a: \0", "control character"),
    "escape sequence": ("yaml", "a: \x1b[31mred", "control character '\\x1b' in line 1"),
    "half a character": ("json", '{"a": "\\ud800"}', "half a character"),
    "half a character in a key": ("json", '{"\\ud800": 1}', "half a character"),
    "a list as a key": ("yaml", "? [a]\n: b", "a key is no text"),
    "nothing as a key": ("yaml", "~: b", "a key is no text"),
    "an alias of nothing": ("yaml", "a: *b", "not valid YAML"),
    "two commas too many": ("json", '{"a": 1,,}', "not valid JSON"),
    "comments without end": ("json", "/*" * HALF, "not valid JSON"),
    "commas without end": ("json", '{"a": [' + ", " * HALF + "]}", "not valid JSON"),
    "slashes": ("json", "/" * MAX_BYTES, "not valid JSON"),
    "deep behind comments": ("json", '{"a": ' + "[/*]]*/" * 100, f"more than {MAX_DEPTH} deep"),
    "a list": ("yaml", "- a", "holds a list, expected keys"),
    "a word": ("yaml", "hello", "holds a str, expected keys"),
    "empty": ("yaml", "# nothing\n", "is empty"),
    "empty TOML": ("toml", "# nothing\n", "is empty"),
    "no TOML": ("toml", "a: 1", "not valid TOML"),
    "nan in TOML": ("toml", "a = nan", "not a number that a setting"),
    "infinity in TOML": ("toml", "a.b = [1, -inf]", "a.b is -inf"),
    "key twice in TOML": ("toml", "a = 1\na = 2", "Cannot overwrite"),
    "deep lists in TOML": ("toml", "a = " + "[" * HALF, f"more than {MAX_DEPTH} deep"),
    "deep tables in TOML": ("toml", "a = " + "{a=" * (HALF // 3), f"more than {MAX_DEPTH} deep"),
    "a deep section in TOML": ("toml", "[" + "a." * (HALF // 2) + "a]\n" + "b=1\n" * 9, f"more than {MAX_DEPTH} deep"),
    "a deep name in TOML": ("toml", "a." * HALF + "a = 1", f"more than {MAX_DEPTH} deep"),
    "a deep name in a table in TOML": ("toml", "x={" + "a." * HALF + "a=1}", f"more than {MAX_DEPTH} deep"),
    "a deep section after blanks in TOML": ("toml", " \t[[ " + "a." * MAX_DEPTH + "a]]", f"more than {MAX_DEPTH} deep"),
    "blanks in TOML": ("toml", " " * 1_000_000, "is empty"),
    "blanks before brackets in TOML": ("toml", " " * HALF + "[" * HALF, f"more than {MAX_DEPTH} deep"),
    "brackets in TOML": ("toml", "[" * 1_000_000, f"more than {MAX_DEPTH} deep"),
    "blanks after commas in TOML": ("toml", "a = [" + ", " * HALF, "more than 20,000 values"),
    "many values in TOML": ("toml", "a=[" + "1," * HALF + "]", "more than 20,000 values"),
    "many tables in TOML": ("toml", "[[a]]\n" * 100_000, "more than 20,000 values"),
    "a long number in TOML": ("toml", "a = " + "9" * HALF, "cannot be read"),
    "a string that does not end in TOML": ("toml", 'a = "' + '\\"' * HALF, "not valid TOML"),
    "empty JSON": ("json", "", "not valid JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_at_once(name: str) -> None:
    kind, text, why = HOSTILE[name]
    start = time.process_time()
    with pytest.raises(BadInput) as caught:
        parse(text, kind, "it.yaml")
    assert time.process_time() - start < LIMIT_S
    assert why in str(caught.value)
    assert "it.yaml" in str(caught.value)
    assert len(str(caught.value)) < 500  # never the file itself


def test_toml_is_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "a.TOML"
    floats = ", ".join(["1.5"] * 60)
    path.write_text(f"[a]\r\nb.c = [{floats}]  # [[[\r\nd = 2026-01-31\n'e.f' = '{'[' * 99}'\n[[g]]\nh = 1e-3\n")
    loaded = load(path)
    assert loaded.format == "toml"
    assert loaded.document["a"] == {"b": {"c": [1.5] * 60}, "d": "2026-01-31", "e.f": "[" * 99}
    assert loaded.document["g"] == [{"h": 1e-3}]


def test_what_could_call_calls_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = []
    monkeypatch.setattr(os, "system", called.append)
    (tmp_path / "trap_of_files.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for text in (
        "a: !!python/object/apply:os.system [x]",
        "a: !!python/module:trap_of_files",
        "!!python/name:os.system : 1",
    ):
        with pytest.raises(BadInput):
            parse(text, "yaml")
    assert parse("a: os.system\nb: trap_of_files:go\nc: ${HOME}\nd: '{{ x }}'", "yaml")["a"] == "os.system"
    assert not called
    assert "trap_of_files" not in sys.modules


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.yaml", "a: é".encode("latin-1"), "not UTF-8 text: byte 0xe9 in line 1"),
        ("a.yaml", "a: 1".encode("utf-16"), "encoded as UTF-16"),
        ("a.json", b"\xfe\xff" + '{"a": 1}'.encode("utf-16-be"), "encoded as UTF-16"),
        ("a.json", b'{"a": "\xff"}', "not UTF-8 text"),
        ("a.yaml", b"a: b\nc: \x80", "byte 0x80 in line 2"),
        ("a.yaml", b"PK\x03\x04" + bytes(100), "control character"),
    ],
)
def test_other_encodings_are_refused(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=r"(s|S)ave|control") as caught:
        load(tmp_path / name)
    assert why in str(caught.value)


@pytest.mark.parametrize("size_bytes", [MAX_BYTES + 1, 100 * 2**20, 2**40])
def test_large_files_are_refused_unread(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    start = time.process_time()
    with pytest.raises(BadInput, match=f"{size_bytes:,} bytes; no file of this kind is more than"):
        load(path)
    assert time.process_time() - start < LIMIT_S


@pytest.mark.parametrize("what", ["folder", "pipe", "device", "absent", "loop"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "config.yaml"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    elif what == "device":
        path = Path("/dev/zero")
    start = time.process_time()
    with pytest.raises(BadInput, match=r"is a folder|no regular file|No configuration file|cannot be read"):
        load(path)
    assert time.process_time() - start < LIMIT_S


def test_a_misspelt_name_finds_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"Did you mean 'ds_config\.json'"):
        load(tmp_path / "ds_confg.json")


def test_a_name_with_nul_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        load("a\0b.yaml")


def test_plain_files_are_read_as_they_are(tmp_path: Path) -> None:
    document: dict[str, Any] = {"a": {"b": [1, 2.5, True, None, "x"]}, "c": "é", "d": {}, "e": []}
    (tmp_path / "a.json").write_text(json.dumps(document))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8-sig")
    assert load(tmp_path / "a.json").document == document
    assert load(tmp_path / "a.yaml").document == document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1e-3", 1e-3),
        ("a: 5e8", 5e8),
        ("a: 2026-01-02", "2026-01-02"),
        ("a: 'yes'", "yes"),
        ("a: yes", True),
        ("a: -1", -1),
        ("a: [0, 0.5, 1_000, 0x10]", [0, 0.5, 1000, 16]),
        ("a: '010'", "010"),
        ("a: '1:30'", "1:30"),
        ("a: 9223372036854775807", 2**63 - 1),
        ("b: &b {x: 1}\na: {<<: *b, y: 2}", {"x": 1, "y": 2}),
        ("b: &b [1]\na: *b", [1]),
    ],
)
def test_words_of_yaml(text: str, expected: Any) -> None:
    assert parse(text, "yaml")["a"] == expected


@pytest.mark.parametrize("text", ["1e-3", "12e45", "-1.e5", "1.5e-3", "yes", "010", "2026-01-02"])
def test_text_that_reads_as_another_kind_is_written_in_quotes(text: str) -> None:
    document = {"a": text, "b": [text], text: 1}
    assert parse(write_yaml(document), "yaml") == document


def test_numbers_in_base_60_are_text_only_where_the_caller_says_so() -> None:
    with pytest.raises(BadInput, match="base 60"):
        parse("ranks: 2:4", "yaml")
    document = parse("ranks: 2:4", "yaml", is_text=lambda key, text: (key, text) == ("ranks", "2:4"))
    assert document == {"ranks": "2:4"}


def test_json_with_comments_is_read_as_deepspeed_does(tmp_path: Path) -> None:
    hjson = pytest.importorskip("hjson")
    text = '{\n  // one\n  "a": [1, 2,], # two\n  /* "a": 3, */ "b": "http://x # y, ]",\n}'
    (tmp_path / "a.json").write_text(text)
    loaded = load(tmp_path / "a.json")
    assert loaded.document == hjson.loads(text) == {"a": [1, 2], "b": "http://x # y, ]"}
    assert loaded.relaxed
    (tmp_path / "a.json").write_text('{"a": "// # /* ,]"}')
    assert load(tmp_path / "a.json").document == {"a": "// # /* ,]"}
    assert not load(tmp_path / "a.json").relaxed


def test_a_comment_may_follow_a_comma_too_many() -> None:
    text = '{"a": [1, // one\n], "b": "x, // ]", /* last */\n# of all\n}'
    assert parse(text, "json") == {"a": [1], "b": "x, // ]"}


def test_keys_are_text() -> None:
    assert parse("on: 1\n8: 2\n1.5: 3", "yaml") == {"on": 1, "8": 2, "1.5": 3}


def test_the_deepest_and_the_largest_that_is_allowed() -> None:
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert parse(f'{{"a": {deep}}}', "json")
    assert parse(f"a: {deep}", "yaml")
    with pytest.raises(BadInput):
        parse(f'{{"a": [{deep}]}}', "json")
    assert len(parse("a: [" + "1," * 19_000 + "]", "yaml")["a"]) == 19_000


@pytest.mark.parametrize("names", [("a",), ("a", "b.c", "d"), ("a", ""), ("plan", "x, y")])
def test_dotted_keys_are_taken_apart_as_they_were_put_together(names: tuple[str, ...]) -> None:
    assert dotted_keys.split(functools.reduce(dotted_keys.join, names, "")) == list(names)
    assert dotted_keys.split("train..steps") == ["train", "", "steps"], "a name that is missing is none of the others"
