"""What `terrazzo checkpoint convert` does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint import Source, open_source
from terrazzo.checkpoint.exporters.huggingface import (
    CONFIG_FILE,
    ModelDescription,
    describe_folder,
    export_huggingface,
)
from terrazzo.checkpoint.source import WEIGHT
from terrazzo.checkpoint.storage.places import check_new
from terrazzo.checkpoint.upkeep import describe
from terrazzo.checkpoint.upkeep.convert import convert as convert_checkpoint
from terrazzo.cli.checkpoint.progress import progress
from terrazzo.cli.shared.terminal import say
from terrazzo.errors import BadInput
from terrazzo.words import dtype_named

__all__ = ["run"]

TERRAZZO, HF, DCP = "terrazzo", "hf", "dcp"  # what `convert` writes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WANTED = f"give --reference FOLDER, which holds the model's {CONFIG_FILE} and tokenizer."


def run(src: str, dst: str, to: str, given: Mapping[str, Any]) -> None:
    """Write a checkpoint in another format. `given` are the options of Hugging Face's, by name."""
    _check_target(to, dst, list(given))
    options = _huggingface_options(given.get("--dtype"), given.get("--max-shard-size"))
    source = open_source(src)
    model = _model_of(src, source, given.get("--reference")) if to == HF else None
    with progress("converting", describe.total_bytes(source, WEIGHT if to == HF else None)) as advance:
        source.advance = advance
        if model is not None:
            export_huggingface(source, Path(dst), model, **options)
        elif to == DCP:
            from terrazzo.checkpoint.exporters.dcp import export_dcp  # torch.distributed.checkpoint takes a second

            export_dcp(source, Path(dst))
        else:
            convert_checkpoint(source, dst)
    say(f"written: {dst}")
    for line in describe.lost(source, to):
        say(f"not taken over: {line}")


def _check_target(to: str, dst: str, given: Sequence[str]) -> None:
    if given and to != HF:
        raise BadInput(f"{given[0]} is for --to hf, and this is --to {to}: leave it out.")
    if "://" in dst and to != TERRAZZO:
        raise BadInput(f"'{dst}' is a URL, and --to {to} writes local folders only: give a path.")
    check_new(dst)


def _huggingface_options(dtype: str | None, max_shard_size: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if dtype is not None:
        dtype = dtype_named(dtype)
        if dtype not in DTYPES:
            raise BadInput(f"--dtype is '{dtype}'; there are: {', '.join(DTYPES)}.")
        options["dtype"] = DTYPES[dtype]
    if max_shard_size is not None:
        options["max_shard_bytes"] = _parse_size(max_shard_size)
    return options


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]I?B)?", text.upper())
    if match is None or not (size_bytes := int(float(match[1]) * UNITS[match[2] or ""])):
        raise BadInput(f"--max-shard-size is '{text}', expected a size such as 500MB, 5GB or 2GiB.")
    return size_bytes


def _model_of(src: str, source: Source, reference: Path | None) -> ModelDescription:
    """What the model is: as the reference says, else the folder of weights, else the run that saved it."""
    if reference is not None:
        return describe_folder(reference)
    if (Path(src) / CONFIG_FILE).is_file():
        return describe_folder(Path(src))
    settings = source.extra.get("config") if source.about() else None
    if not isinstance(settings, dict):
        raise BadInput(f"'{src}' does not say what model it is of: {WANTED}")
    from terrazzo.config import config_from_dict  # the trainer, and what it imports
    from terrazzo.train.checkpoints.export import describe_model

    try:
        return describe_model(config_from_dict(settings, origin=f"The run's configuration in '{src}'"))
    except BadInput as error:
        raise BadInput(f"{error} Or {WANTED}") from None
