"""Folders that the library `datasets` reads.

These are folders that its `save_to_disk` wrote, and any other folder, such as a copy from the Hugging Face Hub, of
which a split is named: `FOLDER#train`, or `FOLDER#name/train` if there are several configurations. Nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, install
from terrazzo.train.data.records import ROWS_PER_READ, Document, RecordForm, record_of
from terrazzo.train.data.source_file import SourceFile, folder_files

__all__ = ["dataset_of", "folder_of_source", "read_dataset"]


def folder_of_source(source: str) -> tuple[Path, str | None]:
    """The path that a source names, and the split behind its `#`, where the folder before that exists."""
    path = Path(source).expanduser()
    before, mark, split = source.rpartition("#")
    if mark and not path.exists() and (folder := Path(before).expanduser()).is_dir():
        return folder, split
    return path, None


def dataset_of(source: str) -> SourceFile | None:
    """The folder of a source that is for `datasets` to read, else None.

    Raises:
        BadInput: the package is not installed.
    """
    folder, split = folder_of_source(source)
    if split is None and not _is_saved(folder):
        return None
    package = find_spec("datasets")
    if package is None or package.origin is None:  # a folder of that name in the current one is no package
        raise BadInput(
            f"data.source {source!r} is for the package 'datasets' to read, which is not installed."
            f" {install('datasets')}, or convert it to JSONL or parquet."
        )
    files = [(path, path.stat()) for path in folder_files(folder)]
    content = [(path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns) for path, status in files]
    stamp = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    size_bytes = sum(status.st_size for _, status in files)
    return SourceFile(str(folder), folder.resolve().name, True, size_bytes, stamp, split=split or "")


def read_dataset(file: SourceFile, form: RecordForm) -> Iterator[Document]:
    """One document per row, only the needed columns.

    Raises:
        BadInput: the folder cannot be read, there is no such split, or it lacks the columns.
    """
    dataset = _chosen(_opened(file), file)
    needed = form.columns(dataset.column_names or list(next(iter(dataset), {})), file.where)
    number = 0
    for batch in dataset.with_format(None).select_columns(needed).iter(batch_size=ROWS_PER_READ):
        for values in zip(*(batch[column] for column in needed), strict=True):
            number += 1
            record = record_of(dict(zip(needed, values, strict=True)))
            yield form.document(record, f"{file.name}:{number}", f"{file.where}:{number}")


def _is_saved(folder: Path) -> bool:
    one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return one or (folder / "dataset_dict.json").is_file()


def _opened(file: SourceFile) -> Any:
    import datasets

    if _is_saved(Path(file.path)):
        return datasets.load_from_disk(file.path)
    configuration = (file.split or "").rpartition("/")[0]
    builder = datasets.load_dataset_builder(file.path, configuration or None)
    inside = os.path.join(os.path.abspath(file.path), "")
    for name in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
        if not os.path.abspath(name).startswith(inside):
            raise BadInput(f"The card of '{file.where}' names '{name}', outside of the folder, which is not read.")
    return builder.as_streaming_dataset()


def _chosen(opened: Any, file: SourceFile) -> Any:
    """The split that was asked for, or the only one."""
    split = (file.split or "").rpartition("/")[2]
    if not isinstance(opened, dict):
        if split:
            raise BadInput(f"'{file.where}' is one dataset without splits: leave out '#{file.split}'.")
        return opened
    splits = [str(name) for name in opened]
    if not split and len(splits) == 1:
        return opened[splits[0]]
    if split not in splits:
        meant = did_you_mean(split, splits) if split else ""
        raise BadInput(f"'{file.where}' has the splits {splits}.{meant} Name one, as in '{file.where}#{splits[0]}'.")
    return opened[split]
