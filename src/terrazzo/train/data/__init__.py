"""From files to batches: text, documents, tokens on disk, fixed sequences, one global order, this rank's share.

Read `load` first, which goes through the others in this order: `sources` (with `source_file`, `records`, `pair_records`
and `datasets_folder`), `tokenizer`, `chat` (with `rendering`), `cache`, `sequences` (with `packing` and `pairs`),
`loader`. Nothing here talks to other ranks: what they must agree on goes through the function `together` that
`load_data` is given.

Example:
    config = load_config("examples/quickstart.yaml")
    data = load_data(config)
    loader = Loader(data.train, config, rank=0, world_size=2)
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
    rounds,
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
    "rounds",
]
