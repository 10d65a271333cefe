"""Checkpoints: a folder of safetensors files under one JSON manifest, written by any plan, read by any other.

    tz.checkpoint.save("runs/a/step-00000100", model, optimizer, extra={"step": 100})
    extra = tz.checkpoint.load("runs/a/step-00000100", model, optimizer)

Each rank writes the element ranges it owns; reading asks for ranges, whoever wrote them. A folder gets its name only
when it is complete and on disk, and every byte that is read is checked against a digest. Nothing is pickled.

Each folder imports from those before it in this list:

    format      what a checkpoint's files look like: the manifest, its digests, and whether it can be trusted
    storage     where bytes lie: folders, object stores, several hosts; one rank's file
    importers   checkpoints that other programs wrote
    saving      from a sharded model to a complete folder, at once or in the background
    loading     from a folder of any format to a sharded model
    exporters   checkpoints for other programs
    series      the checkpoints of a run: which are newest, which stay, copies on other hosts
    operations  what `terrazzo checkpoint` does: shows, verifies, compares, converts

Beside the folders, used by several of them:

    source      what every checkpoint is to a reader, whoever wrote it: `Source`
    tensors     dtypes and bytes of tensors
    tied_names  tensors that are there under several names each, which must have the same values
    optimizers  one list of param groups for any optimizer
    replicas    states that several ranks hold alike are compared
    rng         states of random generators
    hub_names   how transformers names and cuts tensors in a folder
    hub_folder  what such a folder says besides its weights

How a rank's file is written:

1. `saving.snapshot.take` lists the element ranges that this rank owns, a `FileEntry` for each, and puts them into a
   `SaveJob`: plain values, so that another process can do the work (`saving.background`).
2. `SaveJob.write` in `saving.job` has `storage.rank_file` write the file: a header, the entries in the order of
   `format.rank_layout.arrange`, a digest of every block of `format.manifest.BLOCK_BYTES`; all of it is read back. What
   it returns, a `WrittenFile`, goes into a note beside the file, a `RankRecord`.
3. The bytes go through `storage.store.CheckpointDraft`: a hidden local folder, or uploads behind a URL.
4. `SaveJob.conclude` on the first rank makes the `format.manifest.Manifest` of all notes, seals it, and commits: the
   folder gets its name.

How it is read, by any ranks under any plan, from `load` in `loading.load`:

1. `open_source`: Terrazzo's own folder is a `TerrazzoCheckpoint`, of `loading.terrazzo_checkpoint`.
2. `misfits` compares, and each rank checks the digests of its share of all blocks, whoever will need them.
3. The engine asks for the runs of elements that this rank holds of each parameter (`ModelState.restore`).
   `_SourceReader` in `loading.load` answers by `source.read`, a flat range, or `read_box`, rectangles of a parameter
   that ranks share.
4. `TerrazzoCheckpoint` finds by the manifest in which files these elements are, whoever wrote them, and
   `storage.blocks` reads the bytes: of a block that has not been checked, all of it.

To change the order or the alignment of a rank's file, change `arrange` and `header_of` in `format.rank_layout`: readers
go by the manifest. What the manifest says of it is `File` and `Extent` in `format.manifest`; another version of that
needs a reader of the older one in `format.parse`, and a line in docs/reference/checkpoint-format.md.

Open to other packages:

    exporters      checkpoints as other libraries read them
    hub_folder     what a model folder of transformers says besides its weights
    hub_names      how transformers names and cuts tensors in a folder
    loading        a checkpoint's weights as a mapping
    source         what every checkpoint is to a reader, whoever wrote it
    storage        whose a folder is, names of states and of steps
    saving.save    a save for other libraries' scripts
    rng            states of random generators
    operations     what the command line does with checkpoints
    series         copies of local checkpoints on other hosts
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.checkpoint.loading.load import load, open_source
    from terrazzo.checkpoint.loading.weights import load_weights
    from terrazzo.checkpoint.replicas import check_replicas
    from terrazzo.checkpoint.saving.background import Saver
    from terrazzo.checkpoint.saving.save import save
    from terrazzo.checkpoint.series.claim import claim
    from terrazzo.checkpoint.series.listing import complete_checkpoints, latest, run_of, step_path
    from terrazzo.checkpoint.series.resume import Resumed, load_newest
    from terrazzo.checkpoint.series.retention import clear, prune, set_aside, suspect, suspects
    from terrazzo.checkpoint.source import Source
    from terrazzo.checkpoint.storage.store import step_of
else:
    __getattr__, __dir__ = lazily(__name__)

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
