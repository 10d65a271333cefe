"""Checkpoints: a folder of safetensors files under one JSON manifest, written by any plan, read by any other.

    tz.checkpoint.save("runs/a/step-00000100", model, optimizer, extra={"step": 100})
    extra = tz.checkpoint.load("runs/a/step-00000100", model, optimizer)

Each rank writes the element ranges it owns; reading asks for ranges, whoever wrote them. A folder gets its name only
when it is complete and on disk, and every byte that is read is checked against a digest. Nothing is pickled.

Open to other packages:

    audit, compare, convert, describe      what the command line does with folders
    exporters                              checkpoints as other libraries read them
    read, source, stores                   a checkpoint's weights as a mapping, whose a folder is, names of states
    store                                  names of steps
    rng                                    states of random generators
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.checkpoint.read import load, load_weights, open_source
    from terrazzo.checkpoint.replicas import check_replicas
    from terrazzo.checkpoint.saver import Saver
    from terrazzo.checkpoint.saving import save
    from terrazzo.checkpoint.series import (
        Resumed,
        claim,
        clear,
        complete_checkpoints,
        latest,
        load_newest,
        prune,
        set_aside,
        step_path,
    )
    from terrazzo.checkpoint.source import Source
else:
    __getattr__ = lazily(
        __name__,
        {
            "terrazzo.checkpoint.read": ("load", "load_weights", "open_source"),
            "terrazzo.checkpoint.replicas": ("check_replicas",),
            "terrazzo.checkpoint.saver": ("Saver",),
            "terrazzo.checkpoint.saving": ("save",),
            "terrazzo.checkpoint.series": (
                *("Resumed", "claim", "clear", "complete_checkpoints", "latest"),
                *("load_newest", "prune", "set_aside", "step_path"),
            ),
            "terrazzo.checkpoint.source": ("Source",),
        },
    )

__all__ = [
    "Resumed",
    "Saver",
    "Source",
    "check_replicas",
    "claim",
    "clear",
    "complete_checkpoints",
    "latest",
    "load",
    "load_newest",
    "load_weights",
    "open_source",
    "prune",
    "save",
    "set_aside",
    "step_path",
]
