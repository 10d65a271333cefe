"""Which files a source names, and the documents in them.

A source is a file, a folder (read recursively), a glob, `python-stdlib`, or a URL of one of the first three, which
fsspec reads; several may be listed. The file's suffix decides: `.jsonl` and `.ndjson` hold one document per line,
`.json` a list of them or the same, `.parquet` one per row, anything else is one document of text; all but parquet
perhaps compressed. Files come in sorted order, hidden ones and `__pycache__` left out. What the library `datasets`
saved, and `FOLDER#SPLIT`, is its to read (`datasets_folder`).

A file met in a folder or by a glob is skipped and counted where it is binary (a NUL byte near its start), not UTF-8, or
JSON without records, since real folders hold images, archives and settings; one that was named by itself is refused.
Nothing is ever decoded with replacement characters: they would be learnt.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.config import DataConfig
from terrazzo.errors import BadInput
from terrazzo.files import is_url
from terrazzo.messages import listed
from terrazzo.train.data.datasets_folder import dataset_of, read_dataset
from terrazzo.train.data.records import (
    Document,
    RecordForm,
    is_json,
    is_jsonl,
    is_parquet,
    opened,
    read_json,
    read_jsonl,
    read_parquet,
)
from terrazzo.train.data.source_file import SourceFile, folder_files, is_visible, plain_part, reading, stored_files

__all__ = ["PYTHON_STDLIB", "Skipped", "find_files", "named_sources", "read_documents", "without_records"]

PYTHON_STDLIB = "python-stdlib"
"""The source that every machine has: the text of Python's own standard library."""
# Not the standard library proper: tests, applications, other people's packages, machine-made tables.
STDLIB_EXCLUDED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
    }
    | {"pydoc_data", "encodings", "lib-dynload", "__phello__", "__pycache__"}
)
BINARY_PROBE_BYTES = 8192


@dataclass
class Skipped:
    """The files that were found but are neither text nor records."""

    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.names:
            return "no file skipped"
        return f"{len(self.names)} found without UTF-8 text or records, and skipped ({listed(self.names)})"


def named_sources(data: DataConfig) -> list[str]:
    """Every single source, of training and of validation."""
    return [*_listed(data.source), *_listed(data.validation_source or [])]


def without_records(data: DataConfig) -> bool:
    """Whether all sources are source code, which has no fields and no conversations."""
    return set(named_sources(data)) == {PYTHON_STDLIB}


def _listed(sources: str | Sequence[str]) -> list[str]:
    return [sources] if isinstance(sources, str) else list(sources)


def find_files(sources: str | Sequence[str]) -> list[SourceFile]:
    """The files of one or several sources, each source's in sorted order.

    Raises:
        BadInput: a source that names nothing, or only empty files.
    """
    listed = _listed(sources)
    if not listed:
        raise BadInput("data.source is an empty list. Give a file, a folder, a glob, or 'python-stdlib'.")
    files = [file for source in listed for file in _files_of(source)]
    if all(file.size_bytes == 0 for file in files):
        raise BadInput(
            f"data.source {sources!r} names {len(files)} file(s) and all are empty (0 bytes). Point it at "
            f"files that hold text, JSONL or parquet."
        )
    return files


def _files_of(source: str) -> list[SourceFile]:
    """The files of one source."""
    if source == PYTHON_STDLIB:
        return _stdlib_files()
    if is_url(source):
        return stored_files(source)
    if (dataset := dataset_of(source)) is not None:
        return [dataset]
    path = Path(source).expanduser()
    if path.is_file():
        return [SourceFile.local(path, path.name, required=True)]
    if path.is_dir():
        root, files = path, folder_files(path)
    else:
        root = Path(plain_part(str(path)))
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
        files = [match for match in matches if is_visible(match.relative_to(root).as_posix())]
    if files:
        return [SourceFile.local(file, file.relative_to(root).as_posix(), required=False) for file in files]
    if path.is_dir():
        raise BadInput(
            f"data.source {source!r} is a folder without any visible file. Put text, JSONL or parquet in it."
        )
    if glob.has_magic(str(path)):
        raise BadInput(
            f"data.source {source!r} is a glob that matches no visible file (seen from {os.getcwd()}). Correct it."
        )
    raise BadInput(
        f"data.source {source!r} does not exist (seen from {os.getcwd()}). Give an existing file, folder or "
        f"glob, or '{PYTHON_STDLIB}', which needs no download."
    )


def _stdlib_files() -> list[SourceFile]:
    """Python's own modules as source text, without tests and applications: text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder_files(root, STDLIB_EXCLUDED) if path.suffix == ".py"]
    if not paths:
        raise BadInput(
            f"data.source '{PYTHON_STDLIB}' found no .py file under {str(root)!r}: this Python keeps its "
            f"library in another form. Give a file or folder of text as data.source."
        )
    return [SourceFile.local(path, path.relative_to(root).as_posix(), required=False) for path in paths]


def read_documents(
    files: Sequence[SourceFile], form: RecordForm, max_bytes: int | None, skipped: Skipped
) -> Iterator[Document]:
    """The non-empty documents of `files`, in order, cut off after `max_bytes` of UTF-8 in total.

    A conversation or a pair is not cut: the first one that goes beyond is left out with all that follow.

    The names of files that are not text are added to `skipped` on the way.
    """
    left_bytes = max_bytes
    for file in files:
        for document in _documents_of(file, form, skipped):
            if left_bytes is None:
                yield document
                continue
            if document.is_whole:
                left_bytes -= document.size_bytes
                if left_bytes < 0:
                    return
                yield document
                continue
            encoded = document.text.encode()[:left_bytes]
            left_bytes -= len(encoded)
            if text := encoded.decode(errors="ignore"):  # a character cut in two is dropped
                yield Document(document.name, text)
            if not left_bytes:
                return


def _documents_of(file: SourceFile, form: RecordForm, skipped: Skipped) -> Iterator[Document]:
    """The non-empty documents of one file."""
    if file.split is not None:
        documents = read_dataset(file, form)
    elif is_jsonl(file.name):
        documents = read_jsonl(file, form)
    elif is_json(file.name):
        documents = _read_records(file, form, skipped)
    elif is_parquet(file.name):
        documents = read_parquet(file, form)
    else:
        form.check_text(file.where)
        documents = _read_text(file, skipped)
    with nullcontext() if file.is_plain else reading(f"'{file.where}'"):
        yield from (document for document in documents if document.text or document.is_whole)


def _read_records(file: SourceFile, form: RecordForm, skipped: Skipped) -> Iterator[Document]:
    """The records of a JSON file, which may be none."""
    with opened(file) as stream:
        content = stream.read()
    try:
        documents = read_json(file, content, form)
    except BadInput:
        if file.required:
            raise
        skipped.names.append(file.name)
        return
    yield from documents


def _read_text(file: SourceFile, skipped: Skipped) -> Iterator[Document]:
    """The whole file as one document; line ends and all else are kept, a byte-order mark is not."""
    with opened(file) as stream:
        content = stream.read(BINARY_PROBE_BYTES)
        is_binary = b"\0" in content
        content += b"" if is_binary else stream.read()
    if is_binary:
        problem = "holds NUL bytes, so it is binary"
    else:
        try:
            yield Document(file.name, content.decode("utf-8-sig"))
            return
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start:,})"
    if file.required:
        raise BadInput(
            f"The data file {file.where!r} {problem}. Convert it first, for instance with "
            "'iconv -f LATIN1 -t UTF-8', or name a folder: files in it that are not text are skipped and "
            "counted."
        )
    skipped.names.append(file.name)
