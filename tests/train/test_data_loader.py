"""The global order, its cursor, and the ranks' shares."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.config import Config, config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.data import (
    IGNORED,
    ByteTokenizer,
    Cursor,
    GlobalOrder,
    Loader,
    SequenceDataset,
    evaluation_batches,
)
from terrazzo.train.data.cache import open_cache, write_cache
from terrazzo.train.data.records import Document
from terrazzo.train.data.sequences import split_documents
from terrazzo.train.data.sources import Skipped
from tests.helpers.examples import examples

LENGTH = 4


def make_dataset(folder: Path, sequences: int, text: str = "") -> SequenceDataset:
    """`sequences` sequences of `LENGTH` tokens, the last one half full."""
    numel = (sequences - 1) * LENGTH + LENGTH // 2
    content = text + "".join(chr(33 + index % 90) for index in range(numel - len(text)))
    write_cache(folder / "c", "key", [Document("a", content)], ByteTokenizer(), Skipped())
    cache = open_cache(folder / "c", "key", verify=True)
    assert cache is not None
    dataset = SequenceDataset(cache, split_documents(cache, 0.0)[0], LENGTH, ByteTokenizer.end_of_document)
    assert len(dataset) == sequences
    return dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> SequenceDataset:
    return make_dataset(tmp_path_factory.mktemp("data"), 29)


def batches(global_batch: int, micro_batch: int, seed: int = 0) -> Config:
    sizes = {"global_batch": global_batch, "micro_batch": micro_batch}
    return config_from_dict({"batch": sizes, "train": {"seed": seed}})


def loaders(dataset: SequenceDataset, world_size: int, prefetch: bool = True, **config: Any) -> list[Loader]:
    return [loader_of(dataset, batches(**config), prefetch, rank, world_size) for rank in range(world_size)]


def loader_of(dataset: SequenceDataset, config: Config, prefetch: bool, rank: int = 0, world_size: int = 1) -> Loader:
    """Once it is closed, it reads each step when it is asked for."""
    loader = Loader(dataset, config, rank, world_size)
    if not prefetch:
        loader.close()
    return loader


def rows(ranks: list[Loader]) -> list[list[int]]:
    """One step's inputs and targets over all ranks, in the order of the global batch."""
    batches = [batch for loader in ranks for batch in loader.next_step().micro_batches]
    return [row for batch in batches for row in torch.cat((batch.inputs, batch.targets), dim=1).tolist()]


@given(count=st.integers(1, 50), seed=st.integers(0, 5), takes=st.lists(st.integers(1, 70), max_size=8))
def test_no_sample_is_skipped_or_repeated_in_any_epoch(count: int, seed: int, takes: list[int]) -> None:
    order, cursor, taken = GlobalOrder(count, seed), Cursor(), []
    for take in takes:
        indices, cursor = order.take(cursor, take)
        taken += indices.tolist()
    assert divmod(sum(takes), count) == (cursor.epoch, cursor.samples)
    for start in range(0, len(taken), count):
        epoch = taken[start : start + count]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(count))


@given(seed=st.integers(0, 1000), takes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_order_does_not_depend_on_how_it_is_taken(seed: int, takes: list[int]) -> None:
    order, cursor, pieces = GlobalOrder(17, seed), Cursor(), []
    for take in takes:
        piece, cursor = order.take(cursor, take)
        pieces.append(piece)
    whole, end = GlobalOrder(17, seed).take(Cursor(), sum(takes))
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert end == cursor


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = [GlobalOrder(50, seed).permutation(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (2, 6), (3, 2), (4, 1), (12, 1)])
def test_global_batches_do_not_depend_on_world_size_or_micro_batch(
    dataset: SequenceDataset, world_size: int, micro_batch: int, prefetch: bool
) -> None:
    single = loaders(dataset, 1, global_batch=12, micro_batch=12, seed=3)
    many = loaders(dataset, world_size, global_batch=12, micro_batch=micro_batch, seed=3, prefetch=prefetch)
    for _ in range(8):  # past the third epoch's end
        assert rows(single) == rows(many)
    assert len({str(loader.state_dict()) for loader in [*single, *many]}) == 1


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 5), (5, 1), (7, 1), (3, 3), (16, 2)])
def test_rows_without_targets_fill_up_what_does_not_divide(
    dataset: SequenceDataset, world_size: int, micro_batch: int
) -> None:
    single = loaders(dataset, 1, global_batch=12, micro_batch=12, seed=3)
    many = loaders(dataset, world_size, global_batch=12, micro_batch=micro_batch, seed=3)
    for _ in range(8):
        (whole,), steps = [one.next_step() for one in single], [one.next_step() for one in many]
        assert {(step.valid_tokens, step.samples) for step in steps} == {(whole.valid_tokens, whole.samples)}
        parts = [batch for step in steps for batch in step.micro_batches]
        assert {batch.inputs.shape for batch in parts} == {(micro_batch, LENGTH)}
        assert len({len(step.micro_batches) for step in steps}) == 1
        assert sum(batch.valid_tokens for batch in parts) == whole.valid_tokens
        learnt = [batch.inputs[(batch.targets != IGNORED).any(dim=1)] for batch in parts]
        assert torch.equal(torch.cat(learnt), whole.micro_batches[0].inputs)
    assert len({str(loader.state_dict()) for loader in [*single, *many]}) == 1


def test_an_epoch_holds_every_target_once(dataset: SequenceDataset) -> None:
    ranks = loaders(dataset, 2, global_batch=2, micro_batch=1, seed=1)
    steps = [rows(ranks) for _ in range(29)]  # two epochs of 29 sequences
    found = Counter(tuple(row) for step in steps for row in step)
    whole = dataset.batch(np.arange(29))
    expected = Counter(tuple(row) for row in torch.cat((whole.inputs, whole.targets), dim=1).tolist())
    assert found == expected + expected


def test_valid_tokens_are_those_of_all_ranks(dataset: SequenceDataset) -> None:
    ranks = loaders(dataset, 3, global_batch=6, micro_batch=1)
    totals = []
    for _ in range(10):
        steps = [loader.next_step() for loader in ranks]
        assert len({step.valid_tokens for step in steps}) == 1
        batches = [batch for step in steps for batch in step.micro_batches]
        assert steps[0].valid_tokens == sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        assert all(batch.valid_tokens == int((batch.targets != IGNORED).sum()) for batch in batches)
        totals.append(steps[0].valid_tokens)
    assert set(totals) == {6 * LENGTH, 6 * LENGTH - 2}


@given(
    done=st.integers(0, 9),
    before=st.sampled_from([1, 2, 3, 6]),
    after=st.sampled_from([1, 2, 4, 8]),
    prefetch=st.booleans(),
)
@settings(max_examples=examples(15), deadline=None)
def test_resuming_at_another_world_size_and_batch_is_exact(
    tmp_path_factory: pytest.TempPathFactory, done: int, before: int, after: int, prefetch: bool
) -> None:
    dataset = make_dataset(tmp_path_factory.mktemp("data"), 19)
    old = loaders(dataset, before, global_batch=6, micro_batch=1, prefetch=prefetch)
    seen = [row for _ in range(done) for row in rows(old)]
    new = loaders(dataset, after, global_batch=8, micro_batch=1, prefetch=prefetch)
    for loader in new:
        loader.next_step()  # what was read and read ahead before must not matter
        loader.load_state_dict(old[-1].state_dict())
    seen += [row for _ in range(5) for row in rows(new)]
    whole = Loader(dataset, batches(1, 1))
    assert seen == [row for _ in range(len(seen)) for row in rows([whole])]


def test_a_cursor_of_something_else_is_refused(dataset: SequenceDataset, tmp_path: Path) -> None:
    state = Loader(dataset, batches(4, 4)).state_dict()
    with pytest.raises(BadInput, match="another seed"):
        Loader(dataset, batches(4, 4, seed=1)).load_state_dict(state)
    with pytest.raises(BadInput, match="another dataset"):
        Loader(make_dataset(tmp_path, 29, "other"), batches(4, 4)).load_state_dict(state)
    with pytest.raises(BadInput, match="another order"):
        Loader(dataset, batches(4, 4)).load_state_dict({**state, "order": 1})


class Failing(SequenceDataset):
    """Fails while reading the third step."""

    reads = 0

    def batch(self, indices: Any) -> Any:
        self.reads += 1
        if self.reads == 3:
            raise OSError("the disk went away")
        return super().batch(indices)


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_error_while_reading_comes_at_its_step_and_leaves_the_cursor(
    dataset: SequenceDataset, prefetch: bool
) -> None:
    failing = Failing(dataset.cache, dataset.split, LENGTH, 256)
    loader = loader_of(failing, batches(5, 5), prefetch)
    twin = Loader(dataset, batches(5, 5))
    for _ in range(2):
        assert rows([loader]) == rows([twin])
    with pytest.raises(OSError, match="disk went away"):
        loader.next_step()
    assert loader.cursor == twin.cursor
    assert rows([loader]) == rows([twin])  # a retry reads the same step


def test_close_ends_the_thread(dataset: SequenceDataset) -> None:
    loader = Loader(dataset, batches(5, 5))
    loader.next_step()
    assert any(thread.name.startswith("terrazzo-data") for thread in threading.enumerate())
    before = set(threading.enumerate())
    loader.close()
    assert len(set(threading.enumerate())) < len(before)
    twin = Loader(dataset, batches(5, 5))
    twin.next_step()
    assert rows([loader]) == rows([twin])


@given(
    sequences=st.integers(1, 30),
    micro_batch=st.integers(1, 4),
    world_size=st.integers(1, 5),
    limit=st.none() | st.integers(1, 40),
)
@settings(max_examples=examples(40), deadline=None)
def test_evaluation_gives_every_sequence_once_in_equal_numbers(
    tmp_path_factory: pytest.TempPathFactory,
    sequences: int,
    micro_batch: int,
    world_size: int,
    limit: int | None,
) -> None:
    dataset = make_dataset(tmp_path_factory.mktemp("data"), sequences)
    ranks = [list(evaluation_batches(dataset, micro_batch, rank, world_size, limit)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for one in ranks for batch in one]
    assert all(batch.inputs.shape == (micro_batch, LENGTH) for batch in batches)
    kept = [row for batch in batches for row in batch.inputs[(batch.targets != IGNORED).any(dim=1)].tolist()]
    every = dataset.batch(np.arange(sequences)).inputs.tolist()
    count = min(sequences, limit or sequences)
    assert len(kept) == count
    assert Counter(map(tuple, kept)) <= Counter(map(tuple, every))
    assert sum(batch.valid_tokens for batch in batches) == sum(int((b.targets != IGNORED).sum()) for b in batches)


def test_fewer_sequences_than_a_global_batch(dataset: SequenceDataset) -> None:
    with pytest.raises(BadInput, match=r"29 sequences of 4 tokens .* fewer than batch\.global_batch 32\. Give more"):
        Loader(dataset, batches(32, 2), readers=16)
