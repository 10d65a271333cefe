"""`terrazzo checkpoint inspect`: shows what a checkpoint holds, or which checkpoints are in a folder."""

from __future__ import annotations

from terrazzo.checkpoint import open_source
from terrazzo.checkpoint.operations import describe
from terrazzo.cli.checkpoint.text import inspect_text, listing_text, tensors_text
from terrazzo.cli.shared.terminal import say, say_json
from terrazzo.errors import BadInput

__all__ = ["inspect_checkpoint"]


def inspect_checkpoint(path: str, show_tensors: bool, as_json: bool) -> None:
    """Print what a checkpoint holds, or which checkpoints are in a folder."""
    paths = describe.expand(path)
    if paths != [path]:
        if show_tensors:
            raise BadInput(f"'{path}' is a folder of checkpoints: --tensors needs one of them, such as '{paths[-1]}'.")
        listing = describe.list_checkpoints(path, paths)
        say_json(listing) if as_json else say(listing_text(listing))
        return
    source = open_source(path)
    description = describe.describe(source)
    tensors = describe.tensors(source) if show_tensors else []
    if as_json:
        say_json(description | {"all_tensors": tensors} if show_tensors else description)
        return
    say(path, "bold")
    say(inspect_text(description))
    if tensors:
        say(tensors_text(tensors))
