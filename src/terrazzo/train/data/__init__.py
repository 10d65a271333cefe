"""From files to batches: text, documents, tokens on disk, fixed sequences, one global order, this rank's share.

Nothing here talks to other ranks: what they must agree on goes through the function `together` that `load_data` gets.
In the order in which data go through them, which `load` brings together:

    load             from a configuration to tokens on disk: `load_data`
    sources          which files a source is, and the documents in them
    source_file      one file, local or in an object store
    records          documents in records: JSON, JSONL, parquet
    pair_records     preference pairs in records
    datasets_folder  folders that the package `datasets` reads
    tokenizer        text as tokens
    chat             conversations as tokens, and which of them are learnt
    rendering        chat templates, rendered in a process of their own
    cache            the tokens of a source on disk
    sequences        tokens as sequences of one length
    packing          which documents share a row
    pairs            sequences of preference pairs
    loader           one global order, and this rank's share of each step

Example:
    config = load_config("examples/quickstart.yaml")
    data = load_data(config)
    loader = Loader(data.train, config, reader=0, readers=2)
    step = loader.next_step()          # step.micro_batches: this rank's; step.valid_tokens: of all ranks
"""

from terrazzo.train.data.chat import Prompt, load_chat
from terrazzo.train.data.load import TokenData, load_data
from terrazzo.train.data.loader import (
    Cursor,
    GlobalBatch,
    GlobalOrder,
    Loader,
    evaluated,
    evaluation_batches,
    micro_batches_of,
)
from terrazzo.train.data.pairs import PairDataset
from terrazzo.train.data.sequences import IGNORED, Batch, Indices, SequenceDataset
from terrazzo.train.data.sources import PYTHON_STDLIB
from terrazzo.train.data.tokenizer import ByteTokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "PYTHON_STDLIB",
    "Batch",
    "ByteTokenizer",
    "Cursor",
    "GlobalBatch",
    "GlobalOrder",
    "Indices",
    "Loader",
    "PairDataset",
    "Prompt",
    "SequenceDataset",
    "TokenData",
    "evaluated",
    "evaluation_batches",
    "load_chat",
    "load_data",
    "load_tokenizer",
    "micro_batches_of",
]
