"""Pickles of other programs, as far as they describe plain values and dense tensors. Nothing in them is run.

Names are looked up in explicit lists alone, and what calls make is no larger than the pickle. `torch.load` with
`weights_only` runs no code either, but a file of a few bytes can make it fill the memory: it calls `bytearray(10**11)`.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar, NamedTuple

import torch
from torch import Tensor

from terrazzo.errors import BadInput, Damaged

__all__ = ["Allowed", "StandIn", "load_pickle", "load_torch_file", "read_archive"]

Allowed = Mapping[tuple[str, str], Any]
"""By module and name of a class or function, what stands for it: something harmless to call."""


class StandIn:
    """Stands for an object of another library: holds its attributes and does nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def attribute(self, name: str) -> Any:
        """An attribute of the object that it stands for; None where it had none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def load_torch_file(path: Path, allowed: Allowed) -> Any:
    """What `torch.save` wrote. Tensors are mapped into memory and read where they are used.

    Args:
        allowed: what may be in it beside dense tensors, dtypes, devices and built-in containers and values.

    Raises:
        BadInput: it needs a name that is not allowed, or is of an old kind, or of a big-endian machine.
        Damaged: it is not complete.
    """
    with _errors_name(path), path.open("rb") as file:
        records: Any = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        return read_archive(file, records, allowed)


def read_archive(file: BinaryIO, records: torch.UntypedStorage, allowed: Allowed = MappingProxyType({})) -> Any:
    """What is in an archive of `torch.save`; raises any exception for one that is damaged, or needs more.

    Args:
        file: the archive.
        records: the same bytes, mapped, of which the tensors are made.
    """
    return _TorchUnpickler(_Archive(file, records), allowed).load()


def load_pickle(path: Path, allowed: Allowed) -> Any:
    """What is in a plain pickle: built-in containers and values, and of others only what `allowed` lists.

    Raises:
        BadInput: it needs a name that is not allowed.
        Damaged: it is not complete.
    """
    with _errors_name(path):
        return _Unpickler(path.read_bytes(), allowed).load()


class _Refused(Exception):
    """Raised for what is not read, with the reason."""


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Turns whatever a damaged or hostile file raises into an error that names the file."""
    try:
        yield
    except _Refused as error:
        raise BadInput(f"'{path}' {error}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise Damaged(f"'{path}' cannot be read ({reason}). Copy it again, or use an older checkpoint.") from None


# Names by number from a list of the whole process, byte arrays that are filled before they are read, and integers with
# more digits than Python would print.
_LEFT_OUT = {pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0], pickle.BYTEARRAY8[0], pickle.LONG4[0]}


class _Unpickler(pickle._Unpickler):
    """The one that is written in Python: that in C sets memory aside for as many objects as a pickle announces."""

    def __init__(self, data: bytes, allowed: Allowed) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._classes = {value for value in allowed.values() if isinstance(value, type)}
        self._left = len(data)

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module
        if (module, name) not in self._allowed:
            raise _Refused(
                f"needs {f'{module}.{name}'!a:.200}, which is not on the list of what may be in such a file, and is not"
                " read: save it again without, with state dicts only."
            )
        return self._allowed[module, name]

    def charge(self, made: Sequence[Any]) -> None:
        """Count what a call makes of its arguments. A pickle holds each of them, unless it repeats some."""
        self._left -= len(made)
        if self._left < 0:
            raise _Refused("describes many more values than it holds, and is not read: it is damaged, or a trap.")

    def _build(self) -> None:
        """Give an object its attributes, but never a class: that would keep them for the whole process."""
        instance = self.stack[-2]  # type: ignore[attr-defined]
        if type(instance) is OrderedDict:
            self.stack.pop()  # type: ignore[attr-defined]  # the versions of a model's modules
        elif type(instance) in self._classes:
            super().load_build()  # type: ignore[misc]
        else:
            raise _Refused(f"changes a {type(instance).__name__}, and is not read: it is damaged, or a trap.")

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _LEFT_OUT},
        pickle.BUILD[0]: _build,
    }


class _Storage(NamedTuple):
    """Where torch keeps the elements of tensors, and the dtype they have unless a tensor names another."""

    dtype: torch.dtype
    data: torch.UntypedStorage


class _Archive:
    """What `torch.save` writes: a zip archive of a pickle and storages, none of them compressed."""

    def __init__(self, file: BinaryIO, records: torch.UntypedStorage) -> None:
        if file.read(4) != b"PK\3\4":
            raise _Refused(
                "is not a zip archive, as torch.save has written since torch 1.6: it is damaged, or an older one"
                " that is to be saved again by torch.save(torch.load(path, weights_only=True), path)."
            )
        self._infos = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(file).infolist()}
        self._bytes = records
        if "byteorder" in self._infos and self.read("byteorder") != b"little":
            raise _Refused("was written on a big-endian machine: save it again on this one.")

    def read(self, name: str) -> bytes:
        """A record, copied."""
        return bytes(_as_tensor(self.storage(name), torch.uint8).numpy())

    def storage(self, name: str) -> torch.UntypedStorage:
        """A record, mapped, as far as it is there. Its sum is not checked: torch can be told not to write one."""
        info = self._infos.get(name)
        if info is None:
            raise ValueError(f"there is no record {name}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"the record {name} is compressed, which torch's are not")
        lengths = self._bytes[info.header_offset + 26 : info.header_offset + 30]
        start = info.header_offset + 30 + sum(struct.unpack("<HH", bytes(lengths.tolist())))
        record: torch.UntypedStorage = self._bytes[start : start + info.file_size]
        return record


_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_VALUES: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch", "Tensor"): "Tensor",
    ("torch.nn.parameter", "Parameter"): "Parameter",
    ("torch", "device"): torch.device,
    ("collections", "OrderedDict"): lambda: OrderedDict(),  # torch fills them one by one
    ("builtins", "complex"): complex,
}


class _TorchUnpickler(_Unpickler):
    """Makes tensors as the functions do that `torch.save` names, and of those only the ones for dense tensors."""

    def __init__(self, archive: _Archive, allowed: Allowed) -> None:
        calls: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
            ("torch", "Size"): self._collection(torch.Size),
            ("builtins", "set"): self._collection(set),
            ("collections", "Counter"): self._collection(Counter),
            ("_codecs", "encode"): self._encoded,
        }
        super().__init__(archive.read("data.pkl"), {**_VALUES, **calls, **allowed})
        self._archive = archive
        self._storages: dict[str, _Storage] = {}

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage: once, so that tensors that shared it share it again."""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(numel) is not int:
            raise ValueError("it describes a storage as torch does not")
        if key not in self._storages:
            self._storages[key] = _Storage(dtype, self._archive.storage(f"data/{key}"))
        if numel * dtype.itemsize > self._storages[key].data.nbytes():
            raise ValueError(f"the record data/{key} is shorter than {numel} elements of {dtype}")
        return self._storages[key]

    def _collection(self, kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def make(items: Any) -> Any:
            self.charge(items)
            return kind(items)

        return make

    def _encoded(self, text: str, encoding: str) -> bytes:
        """Bytes, which the old protocol that torch uses keeps as text."""
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            raise ValueError("it encodes text as pickles do not")
        self.charge(text)
        return text.encode("latin-1")


def _as_tensor(data: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(data)


def _tensor(
    storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any, dtype: Any = None
) -> Tensor:
    """`rest`: whether it needs a gradient, hooks, and whether it is only to be seen as conjugated or negated."""
    if rest[2:] and rest[2]:
        raise ValueError("a tensor in it is conjugated or negated when it is used: save a clone")
    whole = _as_tensor(storage.data, dtype or storage.dtype)
    return whole.as_strided(tuple(size), tuple(stride), offset)


def _tensor_of_dtype(storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    grad, hooks, dtype, *metadata = rest
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor in it has no dtype")
    return _tensor(storage, offset, size, stride, grad, hooks, *metadata, dtype=dtype)


def _parameter(data: Any, *rest: Any) -> Tensor:
    """The tensor in a parameter: whether it is trained is for the model to say."""
    if not isinstance(data, Tensor):
        raise ValueError("a parameter in it is not a tensor")
    return data


def _with_attributes(function: Any, kind: Any, arguments: tuple[Any, ...], *rest: Any) -> Tensor:
    """The tensor alone, of one that had attributes."""
    if function not in (_tensor, _tensor_of_dtype, _parameter) or kind not in ("Tensor", "Parameter"):
        raise ValueError("a tensor in it is of a kind of its own")
    made: Tensor = function(*arguments)
    return made
