"""The trained model as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from terrazzo import checkpoint
from terrazzo.checkpoint.exporters.huggingface import export_huggingface
from terrazzo.checkpoint.hub_folder import ModelDescription, describe_folder, tokenizer_files
from terrazzo.checkpoint.hub_names import HubTensor, hub_tensors, pretrained_model
from terrazzo.config import Config
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.exchange import on_first, patiently
from terrazzo.files import replace_file
from terrazzo.integrations.peft import save_adapter
from terrazzo.telemetry.log.run_folder import RunFolder, note_of
from terrazzo.train.checkpoints.run_checkpoints import RunCheckpoints
from terrazzo.train.data.tokenizer import BYTES, load_tokenizer
from terrazzo.train.model.as_llama import byte_tokenizer_files, decoder_as_llama
from terrazzo.train.model.huggingface import scored_class
from terrazzo.train.model.prepare import decoder_config, prepare_model
from terrazzo.untrusted_files import read_json

__all__ = ["describe_model", "export"]


def export(config: Config, checkpoints: RunCheckpoints, model: nn.Module, step: int, *, trained: bool) -> Path:
    """Write the newest checkpoint's weights to `log.folder`/hf; rank 0 writes, in pieces. Collective.

    With adapters it is a PEFT folder of the adapters alone. An existing folder stays if `hf.json` beside it says that
    it is of this run and step, and nothing was `trained` since; else it is renamed to the first free name of `hf-1`,
    `hf-2`, ...

    Args:
        checkpoints: of the run; `step` has been saved.
        model: sharded.
        trained: whether steps were taken since this start.

    Returns:
        The folder.
    """
    out = RunFolder(config.log.folder).hf
    origin = {"run": checkpoints.run, "step": step}
    if not trained and on_first(lambda: out.exists() and _origin(out) == origin):
        return out
    on_first(lambda: _set_aside(out))
    if config.lora.rank is not None:
        save_adapter(model, out)
    else:
        path = checkpoint.step_path(checkpoints.folder, step)

        def write() -> None:
            if checkpoints.is_first:
                export_huggingface(checkpoint.open_source(path), out, describe_model(config))

        patiently(write, SaveFailed)
    on_first(lambda: replace_file(note_of(out), json.dumps(origin) + "\n", sync=True))
    return out


def _origin(folder: Path) -> Any:
    """The content of the folder's note; None if there is none, or it cannot be read."""
    try:
        return read_json(note_of(folder), 1 << 10)
    except (OSError, BadInput):
        return None


def _set_aside(folder: Path) -> None:
    """Rename the folder and its note. The note goes first: a folder without one is never mistaken for another."""
    if not folder.exists():
        note_of(folder).unlink(missing_ok=True)
        return
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists() and not note_of(name).exists())
    with contextlib.suppress(FileNotFoundError):
        note_of(folder).rename(note_of(aside))
    folder.rename(aside)


def describe_model(config: Config) -> ModelDescription:
    """The Hugging Face description of the configured model; the built-in decoder becomes a Llama."""
    if config.lora.rank is not None:
        raise BadInput(
            "The checkpoint is of a run with adapters (lora.rank), whose weights are no model of their own. Start the "
            "same command again with checkpoint.save_format=hf: a finished run then only writes its PEFT folder."
        )
    if config.model.kind == "huggingface":
        assert config.model.path is not None
        described = replace(describe_folder(config.model.path), tensors=_tensors(config))
        return _with_score(config, described) if config.objective.kind.scored else described
    if config.objective.kind.scored:
        raise BadInput(
            "The checkpoint is of a reward model on the built-in decoder, which transformers has only without a score:"
            " set model.kind to 'huggingface' in a run whose model is to be exported."
        )
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)
    values = asdict(decoder_config(config, tokenizer))
    return decoder_as_llama(values, _tokenizer(config), tokenizer.end_of_document)


def _tensors(config: Config) -> Mapping[str, Sequence[HubTensor]]:
    """The tensors under the names that `transformers` saves; empty keeps the model's own names, which it reads too.

    Empty if these names cannot be derived, or `transformers` does not know the model.
    """
    try:
        model = prepare_model(config)
        base, shapes = pretrained_model(model), {name: tuple(each.shape) for name, each in model.state_dict().items()}
        return {} if base is None else hub_tensors(base, shapes)
    except BadInput:
        return {}


def _with_score(config: Config, described: ModelDescription) -> ModelDescription:
    """The description of a model for sequence classification.

    `transformers` reads its score at the last token that is not `pad_token_id`, so that must not be a token which texts
    end with. Without a `pad_token_id` it takes texts one by one.
    """
    assert config.model.path is not None
    values = dict(described.config) | {"architectures": [scored_class(config.model.path)], "id2label": {"0": "score"}}
    values["label2id"] = {"score": 0}
    if values.get("pad_token_id") == load_tokenizer(config.data.tokenizer, config.data.end_of_document).end_of_document:
        values["pad_token_id"] = None
    return replace(described, config=values)


def _tokenizer(config: Config) -> Mapping[str, bytes]:
    if config.data.tokenizer == BYTES:
        return byte_tokenizer_files()
    path = Path(config.data.tokenizer)
    return tokenizer_files(path if path.is_dir() else path.parent)
