"""From a file to what it means: load, recognise, read, and work out what follows from what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from terrazzo.config import apply_override, is_rank_range
from terrazzo.dialects.core.description import Description, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Dialect, Reading, ReadingContext
from terrazzo.dialects.core.mesh import data_ranks, ranks_of_all_axes
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.registry import dialect, recognise
from terrazzo.documents import Loaded, load
from terrazzo.errors import BadInput

__all__ = ["Understood", "read_document", "understand"]


@dataclass(frozen=True)
class Understood:
    """A file with its meaning."""

    loaded: Loaded
    dialect: Dialect
    reading: Reading
    context: ReadingContext

    @property
    def description(self) -> Description:
        return self.reading.description


def understand(
    path: str | Path,
    name: str | None = None,
    context: ReadingContext = NO_CONTEXT,
    overrides: Sequence[str] = (),
) -> Understood:
    """Read a file.

    Args:
        name: of its dialect; None: as it looks.
        context: what the file does not say; its `folder` is set to the file's.
        overrides: settings of Terrazzo's own configuration that replace the file's, as `terrazzo train` takes them.

    Raises: `BadInput` for a file that cannot be loaded, or is of no dialect or of several, and for overrides of one
        that is not Terrazzo's own.
    """
    loaded = load(path, is_rank_range)
    source = dialect(name) if name else recognise(loaded.document, str(path))
    if overrides and source.name != "terrazzo":
        raise BadInput(
            f"'{overrides[0]}' would replace a setting of Terrazzo's own configuration, and '{path}' is one of "
            f"{source.title}: change the file."
        )
    for override in overrides:
        apply_override(loaded.document, override)
    context = replace(context, folder=loaded.path.parent)
    return Understood(loaded, source, read_document(source, loaded.document, context), context)


def read_document(source: Dialect, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """What a document means, with the number of ranks, by the context or all degrees, and the third size of a batch."""
    reading = source.read(document, context)
    settings: SettingsByPath = {}
    ranks = context.world or ranks_of_all_axes(reading.description)
    if reading.description.value("mesh.world") is None and ranks is not None:
        settings["mesh.world"] = Setting(ranks, "derived")
    description = reading.description.replace(settings)
    return replace(reading, description=description.replace(_batch(description)))


def _batch(description: Description) -> SettingsByPath:
    """The one size that follows from the others and the number of ranks, if one is missing."""
    whole, micro, count = (description[f"batch.{name}"] for name in ("global_batch", "micro_batch", "accumulation"))
    ranks = data_ranks(description)
    if ranks is None:
        return {}
    if whole.value is None and micro.value and count.value:
        return {"batch.global_batch": derived(micro.value * count.value * ranks, micro, count)}
    if count.value is None and whole.value and micro.value and whole.value % (micro.value * ranks) == 0:
        return {"batch.accumulation": derived(whole.value // (micro.value * ranks), whole, micro)}
    if micro.value is None and whole.value and count.value and whole.value % (count.value * ranks) == 0:
        return {"batch.micro_batch": derived(whole.value // (count.value * ranks), whole, count)}
    return {}
