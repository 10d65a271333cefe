"""All checks of a configuration, in order."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.messages import counted
from terrazzo.planner.model.transformers import harmless
from terrazzo.train.data.chat import chat_fingerprint
from terrazzo.train.data.sources import find_files
from terrazzo.train.data.tokenizer import Tokenizer, load_tokenizer
from terrazzo.train.model.head_loss import wants_loss_without_logits
from terrazzo.train.model.huggingface import check_cuts_attention, weight_files
from terrazzo.train.model.lora import check_lora
from terrazzo.train.model.prepare import ModelOnPaper, decoder_config
from terrazzo.train.preflight.device_memory import check_plan
from terrazzo.train.preflight.idle_keys import idle_notes
from terrazzo.train.preflight.local_room import check_local
from terrazzo.train.preflight.offload_room import check_folders
from terrazzo.train.preflight.refusals import refusals, refusals_of_model, refusals_of_ranks
from terrazzo.train.preflight.written_folders import check_written
from terrazzo.train.settings.plan import filling_note

__all__ = ["check"]


def check(config: Config, world_size: int, fewer: Sequence[int] = ()) -> list[str]:
    """Raise `BadInput` for anything in `config` that cannot work with `world_size` ranks. Changes nothing.

    Args:
        fewer: numbers of ranks that the run may be started again with, which have to be able to run it too.

    Returns:
        Lines for the header of the run: settings without effect, and notes of the planner.
    """
    whole = ModelOnPaper(config)
    for _, refusal in refusals(config, world_size, whole):
        raise refusal
    _check_contents(config, whole)
    local = check_local(config, world_size)
    notes = [*idle_notes(config, world_size), *(f"offload: {note}" for note in check_folders(config))]
    filling = filling_note(config.batch, world_size, config.plan.mesh)
    notes += [*([filling] if filling else []), *local]
    notes += check_plan(config, world_size, whole)
    for number in fewer:
        _check_fewer(config, number, whole)
    return notes


def _check_contents(config: Config, whole: ModelOnPaper) -> None:
    """The checks of model, data and folders, which do not depend on the number of ranks."""
    if config.model.kind == "huggingface":
        for _, refusal in refusals_of_model(config, whole):
            raise refusal
        if wants_loss_without_logits(config, 1):
            _ = whole.model  # refuses one that cannot do without logits
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)
    _check_model(config, tokenizer)
    _check_data(config)
    check_written(config)


def _check_fewer(config: Config, number: int, whole: ModelOnPaper) -> None:
    """Raise `BadInput` if `number` ranks cannot run a configuration that more of them can."""
    try:
        for _, refusal in refusals_of_ranks(config, number):
            raise refusal
        check_local(config, number)
        check_plan(config, number, whole)
    except BadInput as error:
        raise BadInput(
            f"launch.ranks is {config.launch.ranks}, and of {counted(number, 'rank')} it would be refused: {error}"
        ) from None


def _check_model(config: Config, tokenizer: Tokenizer) -> None:
    if config.model.kind == "decoder":
        decoder_config(config, tokenizer)
        return
    assert config.model.path is not None
    values = harmless(read_model_config(config.model.path), f"'{config.model.path}'")
    if config.cuts_attention:
        check_cuts_attention(values)
    if config.model.weights == "pretrained":
        weight_files(config.model.path)
    check_lora(config)


def _check_data(config: Config) -> None:
    data = config.data
    chat_fingerprint(data.tokenizer, data.chat_template, data.loss_on)
    find_files(data.source)
    if data.validation_source is not None:
        find_files(data.validation_source)
