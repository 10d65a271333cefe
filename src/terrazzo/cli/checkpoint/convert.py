"""`terrazzo checkpoint convert`: writes a checkpoint of any format as Terrazzo, Hugging Face or DCP has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint import Source, open_source
from terrazzo.checkpoint.exporters.huggingface import export_huggingface
from terrazzo.checkpoint.hub_folder import CONFIG_FILE, ModelDescription, describe_folder
from terrazzo.checkpoint.operations import describe
from terrazzo.checkpoint.operations.convert import convert
from terrazzo.checkpoint.source import WEIGHT
from terrazzo.checkpoint.storage.places import check_new
from terrazzo.cli.checkpoint.options import HuggingFaceOptions, Target
from terrazzo.cli.checkpoint.progress import progress
from terrazzo.cli.shared.terminal import say
from terrazzo.errors import BadInput
from terrazzo.files import is_url
from terrazzo.words import dtype_named

__all__ = ["convert_checkpoint"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WANTED = f"give --reference FOLDER, which holds the model's {CONFIG_FILE} and tokenizer."


def convert_checkpoint(src: str, dst: str, to: Target, options: HuggingFaceOptions) -> None:
    """Write a checkpoint in another format."""
    _check_target(to, dst, options.flags)
    keywords = _export_keywords(options)
    source = open_source(src)
    model = _model_of(src, source, options.reference) if to is Target.HF else None
    with progress("converting", describe.total_bytes(source, WEIGHT if to is Target.HF else None)) as advance:
        source.advance = advance
        if model is not None:
            export_huggingface(source, Path(dst), model, **keywords)
        elif to is Target.DCP:
            from terrazzo.checkpoint.exporters.dcp import export_dcp  # torch.distributed.checkpoint takes a second

            export_dcp(source, Path(dst))
        else:
            convert(source, dst)
    say(f"written: {dst}")
    for line in describe.lost(source, to):
        say(f"not taken over: {line}")


def _check_target(to: Target, dst: str, flags: list[str]) -> None:
    if flags and to is not Target.HF:
        raise BadInput(f"{flags[0]} is for --to hf, and this is --to {to}: leave it out.")
    if is_url(dst) and to is not Target.TERRAZZO:
        raise BadInput(f"'{dst}' is a URL, and --to {to} writes local folders only: give a path.")
    check_new(dst)


def _export_keywords(options: HuggingFaceOptions) -> dict[str, Any]:
    """Keyword arguments of `export_huggingface` for the options that were given; the others keep their defaults."""
    keywords: dict[str, Any] = {}
    if options.dtype is not None:
        dtype = dtype_named(options.dtype)
        if dtype not in DTYPES:
            raise BadInput(f"--dtype is '{options.dtype}'; there are: {', '.join(DTYPES)}.")
        keywords["dtype"] = DTYPES[dtype]
    if options.max_shard_size is not None:
        keywords["max_shard_bytes"] = _parse_size(options.max_shard_size)
    return keywords


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]I?B)", text.upper())
    if match is None or not (size_bytes := int(float(match[1]) * UNITS[match[2]])):
        raise BadInput(f"--max-shard-size is '{text}', expected a size such as 500MB, 5GB or 2GiB.")
    return size_bytes


def _model_of(src: str, source: Source, reference: Path | None) -> ModelDescription:
    """The model's description: from `reference`, else from the folder of weights, else from the run that saved it."""
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
