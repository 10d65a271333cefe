"""Checkpoints: a folder of safetensors files under one JSON manifest, written by any plan, read by any other.

    tz.checkpoint.save("runs/a/step-00000100", model, optimizer, extra={"step": 100})
    extra = tz.checkpoint.load("runs/a/step-00000100", model, optimizer)

Each rank writes the element ranges it owns; reading asks for ranges, whoever wrote them. A folder gets its name only
when it is complete and on disk, and every byte that is read is checked against a digest. Nothing is pickled.

To read how it works: `format.manifest` (what a folder holds), `saving.save` and `saving.job` (how it is written),
`loading.load` (how it is read), `storage` (where bytes lie), `upkeep.series` (the checkpoints of a run).

Beside the folders: `tensors` (dtypes and bytes), `optimizers` (one list of param groups for any optimizer), `replicas`
(states that several ranks hold alike are compared), `importers` (checkpoints of other programs).

Open to other packages:

    exporters      checkpoints as other libraries read them
    hub_names      how transformers names and cuts tensors in a folder
    loading        a checkpoint's weights as a mapping
    source         what every checkpoint is to a reader, whoever wrote it
    storage        whose a folder is, names of states and of steps
    saving.save    a save for other libraries' scripts
    rng            states of random generators
    upkeep         what the command line does with folders
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.checkpoint.loading.load import load, open_source
    from terrazzo.checkpoint.loading.weights import load_weights
    from terrazzo.checkpoint.replicas import check_replicas
    from terrazzo.checkpoint.saving.background import Saver
    from terrazzo.checkpoint.saving.save import save
    from terrazzo.checkpoint.source import Source
    from terrazzo.checkpoint.storage.store import step_of
    from terrazzo.checkpoint.upkeep.series import (
        Resumed,
        claim,
        clear,
        complete_checkpoints,
        latest,
        load_newest,
        prune,
        run_of,
        set_aside,
        step_path,
        suspect,
        suspects,
    )
else:
    __getattr__ = lazily(__name__)

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
    "run_of",
    "save",
    "set_aside",
    "step_of",
    "step_path",
    "suspect",
    "suspects",
]
