"""`terrazzo checkpoint VERB`: look at checkpoints, verify, compare, prune and convert them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from terrazzo.checkpoint import Source, claim, complete_checkpoints, describe, open_source
from terrazzo.checkpoint import prune as remove_old
from terrazzo.checkpoint.audit import open_audit
from terrazzo.checkpoint.compare import Difference, compare, compare_settings
from terrazzo.checkpoint.convert import convert as convert_checkpoint
from terrazzo.checkpoint.exporters.huggingface import (
    CONFIG_FILE,
    ModelDescription,
    describe_folder,
    export_huggingface,
)
from terrazzo.checkpoint.source import WEIGHT, Watched
from terrazzo.checkpoint.stores import check_new
from terrazzo.cli.checkpoint_text import differences_text, inspect_text, listing_text, tensors_text
from terrazzo.cli.terminal import columns, say, say_json
from terrazzo.cli.verb import Verb
from terrazzo.engine import dtype_named
from terrazzo.errors import BadInput, Damaged

__all__ = ["checkpoint"]

Option = typer.Option
AsJson = Annotated[bool, Option("--json", help="print JSON")]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WANTED = f"give --reference FOLDER, which holds the model's {CONFIG_FILE} and tokenizer."
EXIT_CODES = {"whole": 0, "not verified": 2, "damaged": 1}  # the last that applies is the command's

checkpoint = typer.Typer(no_args_is_help=True, help="Look at checkpoints, verify, compare, prune and convert them.")


class Target(StrEnum):
    """What `convert` writes."""

    TERRAZZO = "terrazzo"
    HF = "hf"
    DCP = "dcp"


@checkpoint.command(cls=Verb)
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint of any format, or a folder of them.")],
    tensors: Annotated[bool, Option("--tensors", help="list every tensor with its shape and states")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, or which checkpoints are in a folder. Digests are not checked."""
    found = describe.expand(path)
    if found != [path]:
        if tensors:
            raise BadInput(f"'{path}' is a folder of checkpoints: --tensors needs one of them, such as '{found[-1]}'.")
        listing = describe.listing(path, found)
        say_json(listing) if as_json else say(listing_text(listing))
        return
    source = open_source(path)
    description = describe.describe(source)
    listed = describe.tensors(source) if tensors else []
    if as_json:
        say_json(description | {"all_tensors": listed} if tensors else description)
        return
    say(path, "bold")
    say(inspect_text(description))
    if listed:
        say(tensors_text(listed))


@checkpoint.command(cls=Verb)
def verify(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints, or folders of them.")],
    threads: Annotated[int | None, Option(min=1, help="threads that read and hash; default: one per core")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, and name each file, tensor and range of bytes that is not as it was written.

    Exit code 0: all is whole. 1: something is damaged. 2: nothing is, and something could not be verified: other
    formats hold no digests.
    """
    found = [each for path in paths for each in describe.expand(path)]
    results, start = [], time.perf_counter()
    for path in found:
        results.append(_verify(path, threads or len(os.sched_getaffinity(0))))
        if not as_json:
            _say_verified(results[-1])
    seconds = time.perf_counter() - start
    size_bytes = sum(result["size_bytes"] for result in results)
    states = [state for state in EXIT_CODES if any(result["state"] == state for result in results)]
    if as_json:
        say_json({"checkpoints": results, "size_bytes": size_bytes, "seconds": seconds})
    else:
        counts = [f"{sum(result['state'] == state for result in results)} {state}" for state in states]
        speed = f"{decimal(size_bytes)} in {seconds:.2f} s, {size_bytes / seconds / 1e9:.2f} GB/s"
        say(f"{', '.join(counts)}: {speed}")
    raise typer.Exit(EXIT_CODES[states[-1]])


@checkpoint.command(cls=Verb)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any format.")],
    kind: Annotated[
        str | None, Option(help="only this kind of state, such as weight; no step, no hyper-parameters")
    ] = None,
    show_all: Annotated[bool, Option("--all", help="list states that are equal too")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: every state of every tensor, hyper-parameters, and the step.

    Values are compared in the wider dtype. Exit code 0: equal. 1: different.
    """
    sources = open_source(a), open_source(b)
    settings = [] if kind else compare_settings(*sources)
    with _progress("comparing", sum(describe.total_bytes(source, kind) for source in sources)) as advance:
        one, other = (Watched(source, advance) for source in sources)
        found = list(compare(one, other, kind))
    equal = not settings and all(each.equal for each in found)
    if as_json:
        states = [_as_json(each) for each in found if show_all or not each.equal]
        say_json({"a": a, "b": b, "equal": equal, "compared": len(found), "settings": settings, "states": states})
    else:
        heads = [f"{side}  {source.where}: {source.format}" for side, source in zip("AB", sources, strict=True)]
        say("\n".join([*heads, *settings, "", differences_text(found, show_all)]))
    raise typer.Exit(0 if equal else 1)


@checkpoint.command(cls=Verb)
def prune(  # structure: signature fixed by the command line
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.")],
    keep_last: Annotated[int, Option(min=1, help="how many of the highest steps are kept")],
    keep_every: Annotated[int | None, Option(min=1, help="also those whose step is a multiple of it")] = None,
    keep_best: Annotated[int, Option(min=0, help="also so many with the lowest validation loss")] = 0,
    run: Annotated[str | None, Option(help="only this run's, as inspect names it; default: every run's")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="say what would be removed, and remove nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all checkpoints of a folder but those to keep. Damaged ones and those of other formats stay."""
    before = complete_checkpoints(folder)
    if not before:
        raise BadInput(f"'{folder}' holds no complete checkpoint: give the folder that holds the step-* folders.")
    keep: dict[str, Any] = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best, "run": run}
    lock = None if dry_run else claim(folder, f"terrazzo checkpoint prune, process {os.getpid()}")
    try:
        removed = remove_old(folder, **keep, dry_run=dry_run)
    finally:
        if lock is not None:
            lock.drop()
    kept = [name for path in before if (name := path.rpartition("/")[2]) not in removed]
    if as_json:
        say_json({"folder": folder, "dry_run": dry_run, "removed": removed, "kept": kept})
        return
    gone = "would be removed" if dry_run else "removed"
    say(columns(sorted([*([name, gone] for name in removed), *([name, "kept"] for name in kept)]), "<<"))


@checkpoint.command(cls=Verb)
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="What is to be written; it must not exist.")],
    to: Annotated[
        Target, Option(help="the format of DST: terrazzo (all states, bit for bit), hf (for from_pretrained), or dcp")
    ],
    reference: Annotated[
        Path | None,
        Option(help="hf: folder with the model's config.json and tokenizer; not for those of terrazzo train"),
    ] = None,
    dtype: Annotated[str | None, Option(help="hf: of the weights: fp32, bf16 or fp16; default: as they are")] = None,
    max_shard_size: Annotated[str | None, Option(help="hf: of a file, such as 500MB; default: 5GB")] = None,
) -> None:
    """Write a checkpoint of any format as one of Terrazzo, as a Hugging Face model folder, or for torch's DCP."""
    given = {"--reference": reference, "--dtype": dtype, "--max-shard-size": max_shard_size}
    _check_target(to, dst, [option for option, value in given.items() if value is not None])
    options = _huggingface_options(dtype, max_shard_size)
    source = open_source(src)
    model = _model_of(src, source, reference) if to == Target.HF else None
    with _progress("converting", describe.total_bytes(source, WEIGHT if to == Target.HF else None)) as advance:
        watched = Watched(source, advance)
        if model is not None:
            export_huggingface(watched, Path(dst), model, **options)
        elif to == Target.DCP:
            from terrazzo.checkpoint.exporters.dcp import export_dcp  # torch.distributed.checkpoint takes a second

            export_dcp(watched, Path(dst))
        else:
            convert_checkpoint(watched, dst)
    say(f"written: {dst}")
    for line in describe.lost(source, to):
        say(f"not taken over: {line}")


# -- verify, diff --------------------------------------------------------------------------------------------------


def _verify(path: str, threads: int) -> dict[str, Any]:
    """What `verify` reports of one checkpoint."""
    result: dict[str, Any] = {"path": path, "state": "whole", "problems": [], "size_bytes": 0}
    try:
        audit = open_audit(path)
        with _progress(path.rstrip("/").rpartition("/")[2], audit.size_bytes) as advance:
            problems = audit.problems(threads, advance)
        result["size_bytes"] = audit.size_bytes
    except BadInput as error:
        problems = [error]
    if problems:
        result["state"] = "damaged" if any(isinstance(each, Damaged) for each in problems) else "not verified"
    return result | {"problems": [str(each) for each in problems]}


def _say_verified(result: dict[str, Any]) -> None:
    style = {"whole": "green", "damaged": "red"}.get(result["state"], "yellow")
    say(f"{result['state']}: {result['path']}", style)
    for problem in result["problems"]:
        say(f"  {problem}")


def _as_json(each: Difference) -> dict[str, Any]:
    values = {"name": each.name, "kind": each.kind, "note": each.note, "differing": each.differing, "numel": each.numel}
    return values | {"max_abs": each.max_abs if math.isfinite(each.max_abs) else str(each.max_abs)}


# -- convert -------------------------------------------------------------------------------------------------------


def _check_target(to: Target, dst: str, given: Sequence[str]) -> None:
    if given and to != Target.HF:
        raise BadInput(f"{given[0]} is for --to hf, and this is --to {to}: leave it out.")
    if "://" in dst and to != Target.TERRAZZO:
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


# -- the terminal --------------------------------------------------------------------------------------------------


@contextmanager
def _progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, gone when the block ends; elsewhere nothing."""
    console = Console(stderr=True)
    parts = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    label_column, hidden = TextColumn("{task.description}", markup=False), not console.is_terminal
    with Progress(label_column, *parts, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda count_bytes: bar.advance(task, count_bytes)
