"""`terrazzo checkpoint VERB`: look at checkpoints, verify, compare, prune and convert them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.checkpoint.options import HuggingFaceOptions, Target
from terrazzo.cli.shared.arguments import AsJsonOption
from terrazzo.cli.shared.verb import Verb

__all__ = ["checkpoint"]

checkpoint = typer.Typer(no_args_is_help=True, help="Look at checkpoints, verify, compare, prune and convert them.")


@checkpoint.command(cls=Verb)
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint of any format, or a folder of them.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor with its shape and states")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Show what a checkpoint holds, or which checkpoints are in a folder. Digests are not checked."""
    from terrazzo.cli.checkpoint.inspect import inspect_checkpoint  # imports torch, which --help can do without

    inspect_checkpoint(path, tensors, as_json)


@checkpoint.command(cls=Verb)
def verify(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints, or folders of them.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="threads that read and hash; default: one per core")
    ] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Recompute every digest, and name each file, tensor and range of bytes that is not as it was written.

    Exit code 0: all is whole. 1: something is damaged. 3: nothing is, and something could not be verified: other
    formats hold no digests.
    """
    from terrazzo.cli.checkpoint.verify import verify_checkpoints  # imports torch, which --help can do without

    raise typer.Exit(verify_checkpoints(paths, threads, as_json))


@checkpoint.command(cls=Verb)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any format.")],
    kind: Annotated[
        str | None, typer.Option(help="only this kind of state, such as weight; no step, no hyper-parameters")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="list states that are equal too")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Compare two checkpoints: every state of every tensor, hyper-parameters, and the step.

    Values are compared in the wider dtype. Exit code 0: equal. 1: different.
    """
    from terrazzo.cli.checkpoint.diff import diff_checkpoints  # imports torch, which --help can do without

    raise typer.Exit(diff_checkpoints((a, b), kind, show_all, as_json))


@checkpoint.command(cls=Verb)
def prune(  # structure: signature fixed by the command line
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.")],
    keep_last: Annotated[int, typer.Option(min=1, help="how many of the highest steps are kept")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="also those whose step is a multiple of it")] = None,
    keep_best: Annotated[int, typer.Option(min=0, help="also so many with the lowest validation loss")] = 0,
    run: Annotated[str | None, typer.Option(help="only this run's, as inspect names it; default: every run's")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be removed, and remove nothing")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Remove all checkpoints of a folder but those to keep. Damaged ones and those of other formats stay."""
    from terrazzo.cli.checkpoint.prune import KeptCheckpoints, prune_folder  # imports torch, which --help does without

    prune_folder(folder, KeptCheckpoints(keep_last, keep_every, keep_best, run), dry_run, as_json)


@checkpoint.command(cls=Verb)
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="What is to be written; it must not exist.")],
    to: Annotated[
        Target,
        typer.Option(help="the format of DST: terrazzo (all states, bit for bit), hf (for from_pretrained), or dcp"),
    ],
    reference: Annotated[
        Path | None,
        typer.Option(help="hf: folder with the model's config.json and tokenizer; not for those of terrazzo train"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="hf: of the weights: fp32, bf16 or fp16; default: as they are")
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="hf: of a file, such as 500MB; default: 5GB")] = None,
) -> None:
    """Write a checkpoint of any format as one of Terrazzo, as a Hugging Face model folder, or for torch's DCP."""
    from terrazzo.cli.checkpoint.convert import convert_checkpoint  # imports torch, as above

    convert_checkpoint(src, dst, to, HuggingFaceOptions(reference, dtype, max_shard_size))
