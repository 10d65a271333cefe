"""The token cache on disk, the split, the sequences, and `load_data` over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.config import Config
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.exchange import together
from terrazzo.train.data import IGNORED, ByteTokenizer, SequenceDataset, TokenData, load_data
from terrazzo.train.data import load as load_module
from terrazzo.train.data.cache import TokenCache, open_cache, write_cache
from terrazzo.train.data.records import Document
from terrazzo.train.data.sequences import NO_SEQUENCE, split_documents
from terrazzo.train.data.sources import Skipped
from tests.helpers.data import data_config
from tests.helpers.examples import examples
from tests.helpers.threads import run_in_threads

T = TypeVar("T")

END = ByteTokenizer.end_of_document


def cache_of(folder: Path, texts: Sequence[str]) -> TokenCache:
    documents = [Document(f"{index}.txt", text) for index, text in enumerate(texts)]
    write_cache(folder / "c.tokens", "key", documents, ByteTokenizer(), Skipped(["x.png"]))
    cache = open_cache(folder / "c.tokens", "key", verify=True)
    assert cache is not None
    return cache


def dataset_of(folder: Path, texts: Sequence[str], sequence_length: int) -> SequenceDataset:
    cache = cache_of(folder, texts)
    return SequenceDataset(cache, split_documents(cache, 0.0)[0], sequence_length, END)


def stream_of(texts: Iterable[str]) -> list[int]:
    return [token for text in texts for token in [*text.encode(), END]]


def test_a_cache_holds_what_was_written(tmp_path: Path) -> None:
    texts = ["one", "zwölf", "", "x" * 300, *(str(number) for number in range(100))]
    cache = cache_of(tmp_path, texts)
    assert cache.tokens.tolist() == stream_of(texts)
    assert cache.tokens.dtype == np.uint16
    assert isinstance(cache.tokens, np.memmap)
    assert cache.text_bytes.tolist() == [len(text.encode()) for text in texts]
    assert np.diff(cache.ends, prepend=0).tolist() == [len(text.encode()) + 1 for text in texts]
    assert (cache.header.max_token, cache.header.max_token_document) == (END, "0.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["c.tokens"]


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 100_000
        end_of_document = 99_999

    write_cache(tmp_path / "c", "key", [Document("a", "abc")], Wide(), Skipped())
    cache = open_cache(tmp_path / "c", "key", verify=True)
    assert cache is not None
    assert (cache.tokens.dtype, cache.tokens.tolist()) == (np.uint32, [97, 98, 99, 99_999])


def test_every_truncation_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    cache_of(tmp_path, ["one", "two and a half"])
    path = tmp_path / "c.tokens"
    whole = path.read_bytes()
    assert open_cache(path, "other key", verify=True) is None
    for position in range(len(whole)):
        path.write_bytes(whole[:position])
        assert open_cache(path, "key", verify=False) is None, position
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert open_cache(path, "key", verify=True) is None, position
    path.write_bytes(whole)
    assert open_cache(path, "key", verify=True) is not None


def test_a_failure_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    cache_of(tmp_path, ["old"])

    def failing() -> Iterable[Document]:
        yield Document("a", "new")
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        write_cache(tmp_path / "c.tokens", "key", failing(), ByteTokenizer(), Skipped())
    cache = open_cache(tmp_path / "c.tokens", "key", verify=True)
    assert cache is not None
    assert cache.tokens.tolist() == stream_of(["old"])
    assert len(list(tmp_path.iterdir())) == 1


@given(
    texts=st.lists(st.text(alphabet="abc", max_size=12), min_size=1, max_size=20),
    sequence_length=st.integers(1, 9),
    fraction=st.sampled_from([0.0, 0.1, 0.3, 0.45]),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_token_but_each_first_is_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], sequence_length: int, fraction: float
) -> None:
    cache = cache_of(tmp_path_factory.mktemp("cache"), texts)
    splits = [split for split in split_documents(cache, fraction) if split is not None]
    streams = []
    for split in splits:
        dataset = SequenceDataset(cache, split, sequence_length, END)
        batch = dataset.batch(np.arange(len(dataset)))
        targets = batch.targets.flatten()[batch.targets.flatten() != IGNORED].tolist()
        ranges = zip(split.starts, split.stops, strict=True)
        streams.append([int(token) for start, stop in ranges for token in cache.tokens[start:stop]])
        assert targets == streams[-1][1:]
        assert batch.valid_tokens == len(targets)
        assert batch.inputs.shape == batch.targets.shape == (len(dataset), sequence_length)
        known = batch.targets != IGNORED
        assert batch.inputs[known].tolist() == streams[-1][:-1]
        assert batch.inputs.min() >= 0 if len(dataset) else True
    assert sorted(token for stream in streams for token in stream) == sorted(stream_of(texts))


def test_targets_are_one_ahead_and_what_is_left_over_is_ignored(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, ["abc", "de"], 4)  # a b c END d e END
    batch = dataset.batch(np.array([1, NO_SEQUENCE, 0]))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.tolist() == [[100, 101, END, END], [END] * 4, [97, 98, 99, END]]
    assert batch.targets.tolist() == [[101, END, IGNORED, IGNORED], [IGNORED] * 4, [98, 99, END, 100]]
    assert batch.valid_tokens == 6
    assert dataset.bytes_per_token == 5 / 7


def test_the_split_is_of_whole_documents_and_of_its_share(tmp_path: Path) -> None:
    texts = [f"{index:03}" * (1 + index % 7) for index in range(400)]
    cache = cache_of(tmp_path, texts)
    train, held_out = split_documents(cache, 0.1)
    assert held_out is not None
    bounds = {0, *cache.ends.tolist()}
    for split in (train, held_out):
        assert {*split.starts.tolist(), *split.stops.tolist()} <= bounds
    numel = int((held_out.stops - held_out.starts).sum())
    assert 0.1 <= numel / len(cache.tokens) < 0.11
    assert train.text_bytes + held_out.text_bytes == int(cache.text_bytes.sum())


def test_adding_documents_moves_few_others_between_the_parts(tmp_path: Path) -> None:
    def held_out_starts(count: int) -> set[int]:
        folder = tmp_path / str(count)
        cache = cache_of(folder, ["four"] * count)
        _, held_out = split_documents(cache, 0.1)
        assert held_out is not None
        ranges = zip(held_out.starts.tolist(), held_out.stops.tolist(), strict=True)
        return {position for start, stop in ranges for position in range(start, stop, 5)}

    before, after = held_out_starts(1000), held_out_starts(1100)
    assert len(before & after) > 0.85 * len(before)


def test_one_document_gives_its_end_to_validation(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, ["x" * 99])
    train, held_out = split_documents(cache, 0.2)
    assert held_out is not None
    assert [train.starts.tolist(), train.stops.tolist()] == [[0], [80]]
    assert [held_out.starts.tolist(), held_out.stops.tolist()] == [[80], [100]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(f"text number {index}\n" * 5)
    return folder


def config_of(texts: Path, *, sequence_length: int = 16, **changes: Any) -> Config:
    return data_config(
        str(texts), sequence_length, **{"validation_fraction": 0.1, "cache": texts.parent / "cache"} | changes
    )


def counted_builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    built: list[Path] = []

    def counting(path: Path, *rest: Any) -> Any:
        built.append(path)
        return write_cache(path, *rest)

    monkeypatch.setattr(load_module, "write_cache", counting)
    return built


def everything(data: TokenData) -> list[int]:
    parts = [part for part in (data.train, data.validation) if part is not None]
    return sorted(int(token) for part in parts for token in part.read(0, part.tokens_numel))


def test_the_cache_is_built_once_and_again_when_anything_changes(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = counted_builds(monkeypatch)
    first = load_data(config_of(texts))
    assert everything(first) == sorted(stream_of(path.read_text() for path in texts.iterdir()))
    assert first.validation is not None
    load_data(config_of(texts, sequence_length=32, validation_fraction=0.2))
    assert len(built) == 1
    load_data(config_of(texts, max_bytes=500))
    assert len(built) == 2
    os.utime(texts / "00.txt", ns=(1, 1))
    load_data(config_of(texts))
    (texts / "new.txt").write_text("more")
    load_data(config_of(texts))
    assert len(built) == len(set(built)) == 4


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_cache_is_rebuilt(texts: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(load_data(config_of(texts)))
    (path,) = (texts.parent / "cache").iterdir()
    content = bytearray(path.read_bytes())
    content[100] ^= 255
    path.write_bytes(content if damage == "flip" else content[:-30])
    built = counted_builds(monkeypatch)
    assert everything(load_data(config_of(texts))) == expected
    assert len(built) == 1


def test_one_rank_builds_and_the_others_open(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = counted_builds(monkeypatch)

    def builder_comes_first(work: Callable[[], T]) -> T:
        if not built:
            load_data(config_of(texts))
        return work()

    data = load_data(config_of(texts), builds=False, together=builder_comes_first)
    assert len(built) == 1
    assert data.train.fingerprint == load_data(config_of(texts)).train.fingerprint
    with pytest.raises(BadInput, match="not visible to this rank"):
        load_data(config_of(texts, max_bytes=100), builds=False)


def failures_of(config: Config) -> list[str]:
    """What `load_data` raises on each of two ranks, of which the first builds."""

    def body(rank: int) -> str:
        with pytest.raises(TerrazzoError) as caught:
            load_data(config, builds=rank == 0, together=partial(together, failed=BadInput))
        return str(caught.value)

    return run_in_threads(2, body)


def test_a_failure_on_one_rank_is_raised_on_all(texts: Path) -> None:
    (texts / "bad.jsonl").write_text("not json\n")
    one, other = failures_of(config_of(texts))
    assert one == other
    assert "bad.jsonl:1" in one


@pytest.mark.parametrize("foreign", [False, True])
def test_a_cache_that_one_rank_cannot_open_is_refused_on_all(
    texts: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    """It is opened after it was made, once all ranks have agreed that it was."""
    real = load_module.open_cache

    def blind(path: Path, key: str, *, verify: bool) -> TokenCache | None:
        if torch.distributed.get_rank() == 0:
            return real(path, key, verify=verify)
        if foreign:
            raise OverflowError("too many words")
        return None

    monkeypatch.setattr(load_module, "open_cache", blind)
    one, other = failures_of(config_of(texts))
    assert one.splitlines()[0] == other.splitlines()[0]
    assert other == "rank 1: OverflowError: too many words" if foreign else "not visible to this rank" in one


@pytest.mark.parametrize("fraction", [0.01, 0.001])
def test_a_part_held_out_that_has_nothing_to_learn_is_told_of(tmp_path: Path, fraction: float) -> None:
    """Of 101 tokens the hundredth part is one token, which predicts nothing, and a smaller one is none at all."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x" * 100)
    data = load_data(config_of(tmp_path / "texts", validation_fraction=fraction))
    assert data.validation is None
    assert [note for note in data.notes if f"data.validation_fraction is {fraction}" in note]
    assert load_data(config_of(tmp_path / "texts", validation_fraction=0.0)).notes == ()
    assert load_data(config_of(tmp_path / "texts", validation_fraction=0.1)).notes == ()


def test_a_validation_source_of_its_own(texts: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("quite another text")
    data = load_data(config_of(texts, validation_source=str(held_out)))
    assert data.train.tokens_numel == len(stream_of(path.read_text() for path in texts.iterdir()))
    assert data.validation is not None
    assert data.validation.read(0, 100).tolist() == stream_of(["quite another text"])
    assert load_data(config_of(texts, validation_fraction=0.0)).validation is None


def test_fingerprints_tell_data_split_and_length_apart(texts: Path) -> None:
    first = load_data(config_of(texts))
    others = [
        load_data(config_of(texts, **change))
        for change in ({"sequence_length": 8}, {"validation_fraction": 0.3}, {"max_bytes": 900})
    ]
    assert first.validation is not None
    prints = [data.train.fingerprint for data in (first, *others)] + [first.validation.fingerprint]
    assert len(set(prints)) == 5


def test_data_without_any_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.bin").write_bytes(b"\0" * 50)
    with pytest.raises(BadInput, match=r"holds no text at all.*1 found without UTF-8 text"):
        load_data(config_of(tmp_path / "texts"))
    (tmp_path / "texts" / "a.txt").write_text("x")
    assert load_data(config_of(tmp_path / "texts")).skipped.names == ["a.bin"]


def test_a_cache_folder_that_cannot_be_written(texts: Path) -> None:
    (texts.parent / "cache").write_text("a file in its place")
    with pytest.raises(BadInput, match=r"token cache.*data\.cache"):
        load_data(config_of(texts))


def test_a_vocabulary_that_is_too_small(texts: Path) -> None:
    data = load_data(config_of(texts))
    data.check_vocabulary(257)
    with pytest.raises(BadInput, match=r"token id 256 \(first in document '00\.txt'\).*at least 257"):
        data.check_vocabulary(256)


def test_files_that_come_after_the_cache_is_named_are_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name says which files it holds, so those that are read must be the same."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("one " * 50)
    found = load_module.find_files

    def growing(source: Any) -> Any:
        files = found(source)
        (tmp_path / "data" / "b.txt").write_text("two")
        return files

    monkeypatch.setattr(load_module, "find_files", growing)
    config = data_config(str(tmp_path / "data"), 8, validation_fraction=0.0, cache=tmp_path / "cache")
    assert load_data(config).train.cache.header.documents == 1
    assert load_data(config).train.cache.header.documents == 2
