"""Sources that a library reads: compressed files, URLs, and folders of `datasets`."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from terrazzo.checkpoint import latest
from terrazzo.config import config_from_dict, without_passwords
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.train.checkpoints.resume import resume_notes
from terrazzo.train.data import load as load_module
from terrazzo.train.data import load_data
from terrazzo.train.data.records import Document, TextRecords
from terrazzo.train.data.sources import Skipped, find_files, read_documents
from terrazzo.train.preflight import check
from tests.helpers.data import data_config

LINES = b'{"text": "a"}\n{"text": "b"}\n'


def documents(source: Path | str, text_field: str = "text") -> list[Document]:
    return list(read_documents(find_files(str(source)), TextRecords(text_field), None, Skipped()))


def pairs(source: Path | str) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in documents(source)]


# -- compressed files --------------------------------------------------------------------------------------------------


def zstandard(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_lines_are_read_through_all_their_frames(suffix: str, tmp_path: Path) -> None:
    pack = PACKERS[suffix]
    file = tmp_path / f"a.jsonl.{suffix}"
    file.write_bytes(pack(LINES) + pack(LINES))
    assert pairs(tmp_path) == [(f"{file.name}:{line}", text) for line, text in enumerate("abab", start=1)]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_file_that_is_cut_is_refused_at_every_length(suffix: str, tmp_path: Path) -> None:
    whole = PACKERS[suffix](LINES)
    file = tmp_path / f"a.jsonl.{suffix}"
    for length in range(1, len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(BadInput, match=rf"a\.jsonl\.{suffix}' cannot be read"):
            documents(file)


def test_errors_in_a_compressed_file_name_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES + b"no\n"))
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz:3 is not valid JSON"):
        documents(tmp_path)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES + b"[" * 100_000))
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz:3 is not valid JSON"):
        documents(tmp_path)


def test_zstandard_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"Zstandard.*pip install -e '\.\[data\]"):
        documents(tmp_path)


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A store in memory with some objects, as `memory://bucket`."""
    store = fsspec.filesystem("memory")
    objects = {"a.txt": b"one", "sub/c.jsonl": LINES, "z.jsonl.gz": gzip.compress(LINES), "image.png": b"\x89\0"}
    hidden = {".hidden": b"x", ".git/x": b"x", "__pycache__/y.pyc": b"x"}
    store.pipe({f"/bucket/{name}": data for name, data in (objects | hidden).items()})
    yield store
    store.rm("/bucket", recursive=True)


def test_a_url_names_an_object_a_prefix_or_a_glob(bucket: Any) -> None:
    lines, packed = [("sub/c.jsonl:1", "a"), ("sub/c.jsonl:2", "b")], [("z.jsonl.gz:1", "a"), ("z.jsonl.gz:2", "b")]
    assert pairs("memory://bucket") == [("a.txt", "one"), *lines, *packed]
    assert pairs("memory://bucket/") == pairs("memory://bucket")
    assert pairs("memory://bucket/a.txt") == [("a.txt", "one")]
    assert pairs("memory://bucket/**/*.jsonl") == lines
    assert pairs("memory://bucket/sub/*") == [("c.jsonl:1", "a"), ("c.jsonl:2", "b")]


def test_a_url_gives_what_the_same_folder_gives(bucket: Any, tmp_path: Path) -> None:
    bucket.get("/bucket/", str(tmp_path / "copy"), recursive=True)
    assert documents("memory://bucket") == documents(tmp_path / "copy")


def test_parquet_behind_a_url(bucket: Any, tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / "t.parquet")
    bucket.pipe("/bucket/t.parquet", (tmp_path / "t.parquet").read_bytes())
    assert pairs("memory://bucket/t.parquet") == [("t.parquet:1", "a"), ("t.parquet:2", "b")]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("memory://bucket/absent", "names no file that exists"),
        ("memory://bucket/*.absent", "names no file that exists"),
        ("memory://bucket/image.png", "memory://.*binary"),
        ("absent://bucket", "Protocol not known"),
    ],
)
def test_urls_that_cannot_be_used(source: str, named: str, bucket: Any) -> None:
    with pytest.raises(BadInput, match=named):
        documents(source)


@pytest.mark.parametrize(("protocol", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs")])
def test_a_store_whose_package_is_absent(protocol: str, package: str, extra: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=rf"pip install -e '\.\[{extra}\]'"):
        find_files(f"{protocol}://bucket/a.txt")
    with pytest.raises(BadInput, match=rf"The checkpoints' place .* pip install -e '\.\[{extra}\]'"):
        latest(f"{protocol}://bucket/runs/a")


@pytest.mark.parametrize(("kind", "lasts"), [(RuntimeError, True), (ConnectionResetError, False)])
def test_a_store_that_fails_on_the_way(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], lasts: bool
) -> None:
    """After a connection that was reset, a new start may succeed: launch.restarts tries it."""
    files = find_files("memory://bucket/a.txt")

    def fail(*_: Any, **__: Any) -> None:
        raise kind("connection reset")

    monkeypatch.setattr(type(bucket), "_open", fail)
    with pytest.raises(
        TerrazzoError, match=rf"memory://.*a\.txt' cannot be read.* \({kind.__name__}: connection reset\)"
    ) as caught:
        list(read_documents(files, TextRecords(), None, Skipped()))
    assert isinstance(caught.value, BadInput) == caught.value.lasts == lasts


def test_tokens_of_a_url_are_cached_until_an_object_changes(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, built = load_module.write_cache, []

    def counting(path: Path, *rest: Any) -> Any:
        built.append(path)
        return real(path, *rest)

    monkeypatch.setattr(load_module, "write_cache", counting)
    config = data_config("memory://bucket/*.txt", 2, validation_fraction=0.0, cache=tmp_path)
    assert load_data(config).train.tokens_numel == len("one") + 1
    load_data(config)
    assert len(built) == 1
    bucket.pipe("/bucket/a.txt", b"other")
    assert load_data(config).train.tokens_numel == len("other") + 1
    assert len(built) == 2


def test_a_password_in_the_url_of_data_is_no_change_to_it() -> None:
    config = config_from_dict({"data": {"source": "memory://me:pass-word@bucket/*.txt"}})
    saved = without_passwords(config.model_dump(mode="json"))
    assert "pass-word" not in str(saved)
    assert resume_notes(config, saved) == []


# -- folders of `datasets` ---------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture
def rows(library: Any) -> Any:
    return library.Dataset.from_dict({"id": [1, 2, 3], "text": ["a", "", "c"]})


def test_what_save_to_disk_wrote_is_read_as_it_is(rows: Any, library: Any, tmp_path: Path) -> None:
    rows.select([2, 1, 0]).with_format("numpy").save_to_disk(tmp_path / "one", num_shards=2)
    assert pairs(tmp_path / "one") == [("one:1", "c"), ("one:3", "a")]
    assert [document.text for document in documents(tmp_path / "one#")] == ["c", "a"]
    library.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(tmp_path / "two")
    assert pairs(tmp_path / "two#train") == [("two:1", "a"), ("two:3", "c")]
    assert pairs(tmp_path / "two" / "test") == [("test:1", "c")]


def test_splits_are_asked_for_and_named(rows: Any, library: Any, tmp_path: Path) -> None:
    rows.save_to_disk(tmp_path / "one")
    library.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    with pytest.raises(BadInput, match=r"splits \['train', 'test'\]\. Name one, as in '.*two#train'"):
        documents(tmp_path / "two")
    with pytest.raises(BadInput, match=r"Did you mean 'test'\?"):
        documents(tmp_path / "two#tset")
    with pytest.raises(BadInput, match="without splits: leave out '#train'"):
        documents(tmp_path / "one#train")
    with pytest.raises(BadInput, match=r"no column 'txt' or 'messages'; it has \['id', 'text'\]"):
        documents(tmp_path / "one", text_field="txt")
    with pytest.raises(BadInput, match="does not exist"):
        documents(tmp_path / "three#train")
    (tmp_path / "a#b").write_text("plain")
    assert pairs(tmp_path / "a#b") == [("a#b", "plain")]


CARD = """---
configs:
- {{config_name: default, data_files: [{{split: train, path: {train}}}, {{split: test, path: data/test-*}}]}}
- {{config_name: small, data_files: [{{split: train, path: data/test-*}}]}}
---
# A data set
"""


def hub_folder(folder: Path, rows: Any, train: str = "data/train-*") -> Path:
    """As `hf download` leaves it."""
    (folder / "data").mkdir(parents=True)
    rows.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    rows.select([2]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD.format(train=train))
    return folder


def test_a_copy_of_a_hub_folder_by_split_and_configuration(rows: Any, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "hub", rows)
    assert pairs(f"{folder}#default/train") == [("hub:1", "a"), ("hub:3", "c")]
    assert pairs(f"{folder}#default/test") == [("hub:1", "c")]
    assert pairs(f"{folder}#small/train") == [("hub:1", "c")]
    with pytest.raises(BadInput, match=r"'absent' not found.*default"):
        documents(f"{folder}#absent/train")


def test_a_card_leads_nowhere_else(rows: Any, tmp_path: Path) -> None:
    rows.to_parquet(tmp_path / "secret.parquet")
    folder = hub_folder(tmp_path / "hub", rows, train="../secret.parquet")
    with pytest.raises(BadInput, match=r"secret\.parquet', outside of the folder"):
        documents(f"{folder}#default/train")


def conversation(arguments: dict[str, Any], content: str | None) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "tool_calls": [call]} | ({} if content is None else {"content": content})
    return [{"role": "user", "content": "hi"}, said]


def test_what_a_table_adds_to_conversations_is_taken_away(library: Any, tmp_path: Path) -> None:
    """Its structs have every field that some row has, null in the others."""
    chats = [conversation({"x": 1}, None), conversation({"y": "s"}, "so")]
    table = library.Dataset.from_dict({"messages": chats, "tools": [None, '[{"name": "f"}]']})
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "chats.parquet")
    for source in ("saved", "chats.parquet"):
        found = documents(tmp_path / source)
        assert [document.messages for document in found] == chats
        assert [document.tools for document in found] == [None, [{"name": "f"}]]


def test_the_library_is_asked_for_by_its_extra(rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows.save_to_disk(tmp_path / "one")
    monkeypatch.setattr("terrazzo.train.data.datasets_folder.find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"pip install -e '\.\[datasets\]'"):
        find_files(str(tmp_path / "one"))
    assert importlib.util.find_spec("datasets") is not None


def test_a_saved_dataset_is_cached_until_it_changes(rows: Any, tmp_path: Path) -> None:
    rows.save_to_disk(tmp_path / "one")
    config = data_config(str(tmp_path / "one"), 2, validation_fraction=0.0, cache=tmp_path / "cache")
    first = load_data(config).train.fingerprint
    assert load_data(config).train.fingerprint == first
    rows.select([0, 1]).save_to_disk(tmp_path / "one")
    assert load_data(config).train.fingerprint != first
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_logs_do_not_go_into_the_folder_that_is_read(rows: Any, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "hub", rows)
    given = {"data": {"source": f"{folder}#default/train"}, "log": {"folder": str(folder)}}
    with pytest.raises(BadInput, match="which is the data itself"):
        check(config_from_dict(given), 1)
