"""One global order of samples, and each rank's share of it, step by step.

Number the samples of all epochs on: sample `g` is entry `g mod N` of the permutation of epoch `g // N`, for N
sequences. Step `s` takes samples `[s G, (s + 1) G)` for a global batch of G. Neither world size nor
micro-batch enters, an epoch ends in the middle of a step where it must, and no sample is ever skipped or
repeated within an epoch. The cursor (epoch, samples consumed in it) is therefore all there is to save. Where a global
batch does not divide among ranks and micro-batches, rows without targets fill it up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.messages import counted
from terrazzo.train.data.sequences import NO_SEQUENCE, Batch, Indices, SequenceDataset

__all__ = ["Cursor", "GlobalBatch", "GlobalOrder", "Loader", "evaluated", "evaluation_batches", "micro_batches_of"]


@dataclass(frozen=True)
class Cursor:
    """How much has been consumed: `epoch` whole passes, and `samples` of the next, over all ranks."""

    epoch: int = 0
    samples: int = 0


class GlobalOrder:
    """The order of all samples: per epoch, a permutation of `range(num_sequences)` from (seed, epoch)."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self.num_sequences, self.seed = num_sequences, seed
        self.drawn: tuple[int, npt.NDArray[np.int64]] | None = None

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Int64 `[num_sequences]`. The last one drawn is kept; two threads may ask at once."""
        drawn = self.drawn
        if drawn is None or drawn[0] != epoch:
            self.drawn = drawn = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences))
        return drawn[1]

    def take(self, cursor: Cursor, count: int) -> tuple[npt.NDArray[np.int64], Cursor]:
        """The next `count` sequence indices from `cursor`, and the cursor after them."""
        pieces: list[npt.NDArray[np.int64]] = []
        epoch, samples = cursor.epoch, cursor.samples
        while count > 0:
            piece = self.permutation(epoch)[samples : samples + count]
            pieces.append(piece)
            count, samples = count - len(piece), samples + len(piece)
            if samples == self.num_sequences:
                epoch, samples = epoch + 1, 0
        return np.concatenate(pieces), Cursor(epoch, samples)

    def fingerprint(self, epoch: int) -> int:
        """Checks that the generator still draws the same: another numpy may not."""
        return zlib.crc32(self.permutation(epoch)[:1024].astype("<i8").tobytes())


@dataclass(frozen=True)
class GlobalBatch:
    """One step's data: this rank's micro-batches, and over all ranks the targets, and the samples of the mean loss.

    Attributes:
        learnt: of these samples, those that gradients are summed over: of the own group where each trains by itself.
        input_tokens: inputs of the same sequences that are tokens, learnt or not.
    """

    micro_batches: tuple[Batch, ...]
    valid_tokens: int
    samples: int
    learnt: int
    input_tokens: int


_SAME = "Resume with the data, tokenizer, sequence_length, split, seed and numpy of the saved run."


class Loader:
    """Endless steps over a dataset, from a cursor that counts only what `next_step` has returned.

    Sizes are those of section `batch`; `reader`, one of `readers`, says whose share is read, and `train.seed` draws the
    order. Ranks that share sequences are one reader, and `part` gives each its own part of a micro-batch.

    Raises:
        BadInput: the dataset holds fewer sequences than one global batch.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        config: Config,
        reader: int = 0,
        readers: int = 1,
        part: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        if len(dataset) < config.batch.global_batch:
            raise BadInput(
                f"The training data have {counted(len(dataset), 'sequence')} of {dataset.sequence_length} tokens"
                f" ({counted(dataset.tokens_numel, 'token')}), fewer than batch.global_batch"
                f" {config.batch.global_batch}. Give more data, a shorter batch.sequence_length, or a smaller"
                " batch.global_batch."
            )
        self.dataset, self.batch, self.reader, self.readers = dataset, config.batch, reader, readers
        self.part = part
        mesh = config.plan.mesh
        self.groups = mesh.groups(readers * mesh.ranks_per_batch) if config.plan.sync_every is not None else 1
        self.order = GlobalOrder(len(dataset), config.train.seed)
        self.cursor = Cursor()
        self.thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="terrazzo-data")
        self.ahead: Future[tuple[GlobalBatch, Cursor]] | None = None  # the step at the cursor, being read

    def next_step(self) -> GlobalBatch:
        """The step at the cursor, which then moves on. An error while reading it ahead is raised here."""
        ahead, self.ahead = self.ahead, None
        batch, self.cursor = self.read(self.cursor) if ahead is None else ahead.result()
        if self.thread is not None:
            self.ahead = self.thread.submit(self.read, self.cursor)
        return batch

    def read(self, cursor: Cursor) -> tuple[GlobalBatch, Cursor]:
        """The step at `cursor`, and the cursor after it."""
        indices, following = self.order.take(cursor, self.batch.global_batch)
        micro_batches = tuple(self.part(self.dataset.batch(one)) for one in self._share(indices, self.reader))
        totals = self.dataset.valid_tokens(indices), self.dataset.samples(indices)
        own = self._of_group(indices)
        return GlobalBatch(micro_batches, *totals, self.dataset.samples(own), self.dataset.input_tokens(own)), following

    def _of_group(self, indices: Indices) -> Indices:
        """Those of a step's samples that this reader's group learns from."""
        of_groups = filled(indices, self.batch.micro_batch * self.readers).reshape(self.groups, -1)
        own: Indices = of_groups[self.reader * self.groups // self.readers]
        return own

    def first_of(self, reader: int, cursor: Cursor | None = None) -> Batch:
        """The first micro-batch that another reader has of the step at a cursor, or at this one; this rank's part."""
        indices, _ = self.order.take(self.cursor if cursor is None else cursor, self.batch.global_batch)
        return self.part(self.dataset.batch(self._share(indices, reader)[0]))

    def _share(self, indices: Indices, reader: int) -> Indices:
        """The sequences of a step that are one reader's, `[micro_batches, micro_batch]`."""
        share = filled(indices, self.batch.micro_batch * self.readers)
        own: Indices = share.reshape(self.readers, -1, self.batch.micro_batch)[reader]
        return own

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain numbers, with what it is only valid for; the same on every rank."""
        return {
            "epoch": self.cursor.epoch,
            "samples": self.cursor.samples,
            "seed": self.order.seed,
            "dataset": self.dataset.fingerprint,
            "order": self.order.fingerprint(self.cursor.epoch),
        }

    def load_state_dict(self, state: dict[str, Any], changed: bool = False, why: str = "") -> None:
        """Continues where `state` was taken, at any world size, micro-batch and global batch.

        Args:
            changed: go on in other data or another order, after as many epochs and samples.
            why: what has changed and what to do, for the refusal, as far as the caller knows.

        Raises:
            BadInput: the data, the sequence length or the order is not the one that the state is of.
        """
        cursor = Cursor(int(state["epoch"]), int(state["samples"]))
        expected = {
            "dataset": self.dataset.fingerprint,
            "seed": self.order.seed,
            "order": self.order.fingerprint(cursor.epoch),
        }
        for name, value in expected.items():
            if state[name] != value and not changed:
                raise BadInput(
                    f"The saved data cursor is of another {name} ({state[name]!r}; here {value!r}), so training would"
                    f" skip some samples and repeat others. {why or _SAME} checkpoint.allow_changed_data=true goes on"
                    " in the data as they are, after as many epochs and samples."
                )
        epochs, samples = divmod(cursor.samples, self.order.num_sequences)  # 0 epochs, unless the data are fewer now
        self.ahead, self.cursor = None, Cursor(cursor.epoch + epochs, samples)

    def skip(self, steps: int) -> int:
        """Leave out so many steps; returns the number."""
        self.ahead = None
        for _ in range(steps):
            _, self.cursor = self.order.take(self.cursor, self.batch.global_batch)
        return steps

    def skip_to(self, cursor: Cursor) -> int:
        """Leave out what is before a cursor that this loader has had, in steps of this batch; returns their number."""
        from_epoch = (cursor.epoch - self.cursor.epoch) * self.order.num_sequences
        return self.skip((from_epoch + cursor.samples - self.cursor.samples) // self.batch.global_batch)

    def close(self) -> None:
        """Ends the reading thread; the loader can still be used, without reading ahead."""
        if self.thread is not None:
            self.thread.shutdown(wait=True)
        self.thread, self.ahead = None, None


def evaluated(dataset: SequenceDataset, max_sequences: int | None = None) -> npt.NDArray[np.int64]:
    """The sequences of a pass over `dataset`: all, or at most `max_sequences`, evenly spaced."""
    count = min(len(dataset), max_sequences or len(dataset))
    return np.arange(count, dtype=np.int64) * len(dataset) // count


def evaluation_batches(
    dataset: SequenceDataset,
    micro_batch: int,
    reader: int = 0,
    readers: int = 1,
    max_sequences: int | None = None,
) -> Iterator[Batch]:
    """This rank's micro-batches of one pass over `dataset`, or over `max_sequences` evenly spaced sequences of it.

    Every rank gets the same number of batches, all of `[micro_batch, T]`, so that all run the same
    collectives; what is left over is filled with rows in which every target is ignored. Summed over ranks,
    each sequence comes once.
    """
    for indices in micro_batches_of(evaluated(dataset, max_sequences), micro_batch, reader, readers):
        yield dataset.batch(indices)


def micro_batches_of(chosen: Indices, micro_batch: int, reader: int = 0, readers: int = 1) -> Iterator[Indices]:
    """This reader's share of the `chosen` sequences, as many micro-batches on each; `NO_SEQUENCE` fills them."""
    yield from filled(chosen, micro_batch * readers).reshape(-1, readers, micro_batch)[:, reader]


def filled(chosen: Indices, multiple: int) -> Indices:
    """The `chosen` sequences, and `NO_SEQUENCE` behind them up to a multiple."""
    return np.pad(chosen, (0, -len(chosen) % multiple), constant_values=NO_SEQUENCE)
