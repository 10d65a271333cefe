"""What the verbs of `terrazzo checkpoint` do."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from terrazzo.checkpoint import Source, claim, complete_checkpoints, open_source
from terrazzo.checkpoint import prune as remove_old
from terrazzo.checkpoint.exporters.huggingface import (
    CONFIG_FILE,
    ModelDescription,
    describe_folder,
    export_huggingface,
)
from terrazzo.checkpoint.source import WEIGHT, Watched
from terrazzo.checkpoint.storage.places import check_new
from terrazzo.checkpoint.upkeep import describe
from terrazzo.checkpoint.upkeep.audit import open_audit
from terrazzo.checkpoint.upkeep.compare import Difference, compare, compare_settings
from terrazzo.checkpoint.upkeep.convert import convert as convert_checkpoint
from terrazzo.cli.checkpoint_text import differences_text, inspect_text, listing_text, tensors_text
from terrazzo.cli.terminal import columns, say, say_json
from terrazzo.engine import dtype_named
from terrazzo.errors import BadInput, Damaged

__all__ = ["convert", "diff", "inspect", "prune", "verify"]

TERRAZZO, HF, DCP = "terrazzo", "hf", "dcp"  # what `convert` writes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
WANTED = f"give --reference FOLDER, which holds the model's {CONFIG_FILE} and tokenizer."
EXIT_CODES = {"whole": 0, "not verified": 2, "damaged": 1}  # the last that applies is the command's


def inspect(path: str, show_tensors: bool, as_json: bool) -> None:
    """What a checkpoint holds, or which checkpoints are in a folder."""
    found = describe.expand(path)
    if found != [path]:
        if show_tensors:
            raise BadInput(f"'{path}' is a folder of checkpoints: --tensors needs one of them, such as '{found[-1]}'.")
        listing = describe.listing(path, found)
        say_json(listing) if as_json else say(listing_text(listing))
        return
    source = open_source(path)
    description = describe.describe(source)
    listed = describe.tensors(source) if show_tensors else []
    if as_json:
        say_json(description | {"all_tensors": listed} if show_tensors else description)
        return
    say(path, "bold")
    say(inspect_text(description))
    if listed:
        say(tensors_text(listed))


def verify(paths: Sequence[str], threads: int | None, as_json: bool) -> int:
    """Recompute every digest; the exit code."""
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
    return EXIT_CODES[states[-1]]


def diff(paths: tuple[str, str], kind: str | None, show_all: bool, as_json: bool) -> int:
    """Compare two checkpoints; the exit code."""
    sources = open_source(paths[0]), open_source(paths[1])
    settings = [] if kind else compare_settings(*sources)
    with _progress("comparing", sum(describe.total_bytes(source, kind) for source in sources)) as advance:
        one, other = (Watched(source, advance) for source in sources)
        found = list(compare(one, other, kind))
    equal = not settings and all(each.equal for each in found)
    if as_json:
        states = [_as_json(each) for each in found if show_all or not each.equal]
        say_json(
            {
                "a": paths[0],
                "b": paths[1],
                "equal": equal,
                "compared": len(found),
                "settings": settings,
                "states": states,
            }
        )
    else:
        heads = [f"{side}  {source.where}: {source.format}" for side, source in zip("AB", sources, strict=True)]
        say("\n".join([*heads, *settings, "", differences_text(found, show_all)]))
    return 0 if equal else 1


def prune(folder: str, keep: Mapping[str, Any], dry_run: bool, as_json: bool) -> None:
    """Remove all checkpoints of a folder but those to keep."""
    before = complete_checkpoints(folder)
    if not before:
        raise BadInput(f"'{folder}' holds no complete checkpoint: give the folder that holds the step-* folders.")
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


def convert(src: str, dst: str, to: str, given: Mapping[str, Any]) -> None:
    """Write a checkpoint in another format. `given` are the options of Hugging Face's, by name."""
    _check_target(to, dst, list(given))
    options = _huggingface_options(given.get("--dtype"), given.get("--max-shard-size"))
    source = open_source(src)
    model = _model_of(src, source, given.get("--reference")) if to == HF else None
    with _progress("converting", describe.total_bytes(source, WEIGHT if to == HF else None)) as advance:
        watched = Watched(source, advance)
        if model is not None:
            export_huggingface(watched, Path(dst), model, **options)
        elif to == DCP:
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
