"""The trained model as a Hugging Face folder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from terrazzo import checkpoint
from terrazzo.checkpoint.exchange import gather_json, together
from terrazzo.checkpoint.exporters.huggingface import (
    ModelDescription,
    byte_tokenizer_files,
    decoder_as_llama,
    describe_folder,
    export_huggingface,
    tokenizer_files,
)
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.integrations.peft import save_adapter
from terrazzo.train.build import decoder_config
from terrazzo.train.config import Config
from terrazzo.train.data.tokenizer import BYTES, load_tokenizer
from terrazzo.train.session import Session

__all__ = ["describe_model", "export"]


def export(session: Session, *, trained: bool) -> Path:
    """Write the newest checkpoint's weights to `log.folder`/hf; rank 0 writes, in pieces. Collective.

    Of a run with adapters it is a PEFT folder, with the adapters alone. Where the run has written one before, it stays
    if nothing was `trained` since, and else goes to the first free name of `hf-1`, `hf-2`, ...
    """
    out = session.config.log.folder / "hf"
    if gather_json(out.exists())[0]:
        if not trained:
            return out
        together(lambda: _set_aside(out) if dist.get_rank() == 0 else None, SaveFailed)
    if session.config.lora.rank is not None:
        save_adapter(session.model, out)
        return out
    path = checkpoint.step_path(session.config.checkpoint_folder, session.step)

    def work() -> None:
        if dist.get_rank() == 0:
            export_huggingface(checkpoint.open_source(path), out, describe_model(session.config))

    together(work, SaveFailed)
    return out


def _set_aside(folder: Path) -> None:
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    folder.rename(next(name for name in names if not name.exists()))


def describe_model(config: Config) -> ModelDescription:
    """What a Hugging Face folder says of the configured model; the built-in decoder becomes a Llama."""
    if config.lora.rank is not None:
        raise BadInput(
            "The checkpoint is of a run with adapters (lora.rank), whose weights are no model of their own. Start the "
            "same command again with checkpoint.save_format=hf: a finished run then only writes its PEFT folder."
        )
    if config.model.kind == "huggingface":
        assert config.model.path is not None
        return describe_folder(config.model.path)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)
    values = asdict(decoder_config(config, config.model.vocab_size or tokenizer.vocab_size))
    return decoder_as_llama(values, _tokenizer(config), tokenizer.end_of_document)


def _tokenizer(config: Config) -> Mapping[str, bytes]:
    if config.data.tokenizer == BYTES:
        return byte_tokenizer_files()
    path = Path(config.data.tokenizer)
    return tokenizer_files(path if path.is_dir() else path.parent)
