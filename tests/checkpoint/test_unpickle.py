"""The unpickler for files of other programs: what torch reads it reads too, and hostile ones do nothing."""

from __future__ import annotations

import pickle
import random
import resource
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint.importers.parts.unpickle import load_pickle, load_torch_file
from terrazzo.errors import BadInput
from tests.helpers.imported import RunsCode

Load = Callable[[Path, dict[tuple[str, str], Any]], Any]


class Point:
    """A class of another program; `Stand` stands for it."""

    def __init__(self, x: int) -> None:
        self.x = x


class Stand:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


POINT = {(Point.__module__, "Point"): Stand}


def load_torch_pickle(path: Path, allowed: dict[tuple[str, str], Any]) -> Any:
    """The pickle in a file, read as one in an archive of torch."""
    archive = path.with_suffix(".pt")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a/data.pkl", path.read_bytes())
        file.writestr("a/data/0", bytes(16))
    return load_torch_file(archive, allowed)


both = pytest.mark.parametrize("load", [load_pickle, load_torch_pickle])


def test_all_that_torch_saves_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = torch.randn(4, 6)
    model = torch.nn.Linear(3, 2)
    model.bias.owner = "mine"  # torch writes parameters with attributes another way
    values = {
        "state": model.state_dict(),
        "parameters": list(model.parameters()),
        "views": [whole, whole[1:3, ::2], whole.t(), whole.expand(2, 4, 6)],
        "empty": [torch.empty(0), torch.empty(3, 0), torch.tensor(1.5)],
        "dtypes": [
            torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool)
        ],
        "numbers": [torch.tensor([1 + 2j]), 1 + 2j, 2**60, -1, 0.1, True, None],
        "text": ["é\ud800", b"\xff\0", "x" * 300],
        "containers": [{1, 2}, Counter("aab"), OrderedDict(b=1, a=2), (1, (2,)), []],
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cuda", 1)],
    }
    torch.save(values, tmp_path / "a.pt")
    found, expected = load_torch_file(tmp_path / "a.pt", {}), torch.load(tmp_path / "a.pt", weights_only=True)
    assert_equal(found, expected)
    base, view = found["views"][:2]
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.stride() == expected.stride()
        assert torch.equal(found.to(torch.complex64), expected.to(torch.complex64))
    elif isinstance(expected, dict):
        assert type(found) is type(expected) and list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected and type(found) is type(expected)


def test_tensors_stay_in_their_file(tmp_path: Path) -> None:
    torch.save({"big": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "a.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    part = load_torch_file(tmp_path / "a.pt", {})["big"][40 << 20 : 41 << 20].clone()
    assert part.sum().item() == 1 << 20
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert pages * resource.getpagesize() < 16 << 20


@both
def test_objects_become_what_stands_for_them(tmp_path: Path, load: Load) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps([Point(3), Point], protocol=2))
    found, kind = load(tmp_path / "a", POINT)
    assert type(found) is Stand and found.x == 3 and kind is Stand
    with pytest.raises(BadInput, match=rf"a(\.pt)?' needs '{Point.__module__}\.Point'"):
        load(tmp_path / "a", {})


def stack_global(module: str, name: str) -> bytes:
    texts = (b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + b"".join(texts) + b"\x93"


REFUSED = {
    "code": pickle.dumps(RunsCode(), protocol=2),
    "code, protocol 5": pickle.dumps({"x": RunsCode()}, protocol=5),
    "system": b"cos\nsystem\n(S'true'\ntR.",
    "system of posix": b"cposix\nsystem\n(S'true'\ntR.",
    "inst": b"(S'1'\nibuiltins\neval\n.",
    "old builtins": b"c__builtin__\neval\n(S'1'\ntR.",
    "new opcode": stack_global("builtins", "exec") + b"(S'1'\ntR.",
    "getattr": b"cbuiltins\ngetattr\n(cbuiltins\nset\nS'__class__'\ntR.",
    "dotted": stack_global("torch", "nn.Module.load_state_dict") + b".",
    "loader": b"ctorch\nload\n(S'a'\ntR.",
    "submodule": b"ctorch.nn.modules.linear\nLinear\n(K\x01K\x01tR.",
    "persistent": b"Pstorage\n.",
    "extension": b"\x82\x01.",
    "attribute of a class": b"c" + Point.__module__.encode() + b"\nPoint\n}(S'x'\nK\x01ub.",
    "attribute of a class, by slot": b"c" + Point.__module__.encode() + b"\nPoint\n(N}S'x'\nK\x01stb.",
    "attribute of a list": b"]}b.",
    "another encoding": b"c_codecs\nencode\n(S'ab'\nS'rot13'\ntR.",
}


@both
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_run_code_is_refused_and_does_not(tmp_path: Path, load: Load, name: str) -> None:
    (tmp_path / "a").write_bytes(REFUSED[name])
    with pytest.raises(BadInput, match=r"/a(\.pt)?'"):
        load(tmp_path / "a", POINT)
    assert RunsCode.ran == 0 and not hasattr(Stand, "x")


ENDLESS = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nByteStorage\nS'0'\nS'cpu'\nK\x10tQ"
    b"K\x00(J\0\0\0\x40t(K\0tI00\nNtR"
)
"""A tensor of one byte, expanded to a thousand million."""
MEMORY = {
    "bytearray": b"cbuiltins\nbytearray\n(J\0\0\0\x40tR.",
    "bytearray of protocol 5": b"\x80\x05\x96" + (1 << 30).to_bytes(8, "little") + b".",
    "memo": b"Nr\0\0\0\x40.",
    "integer": b"\x8b" + (1 << 30).to_bytes(4, "little") + b".",
    "tensor": b"ctorch\nTensor\n(J\0\0\0\x40tR.",
    "storage": b"ctorch.storage\nUntypedStorage\n(J\0\0\0\x40tR.",
    "set of a tensor": b"cbuiltins\nset\n(" + ENDLESS + b"tR.",
    "size of a tensor": b"ctorch\nSize\n(" + ENDLESS + b"tR.",
    "dict of a tensor": b"ccollections\nOrderedDict\n(" + ENDLESS + b"tR.",
    "set of a set": b"(" + b"K\x00" * 2000 + b"lp0\n" + b"cbuiltins\nset\n(g0\ntR0" * 2000 + b".",
    "bytes of text": b"X\x10'\0\0" + b"a" * 10000 + b"p0\n" + b"c_codecs\nencode\n(g0\nS'latin1'\ntR" * 2000 + b".",
}


@both
@pytest.mark.parametrize("name", MEMORY)
def test_a_small_pickle_takes_little_memory(tmp_path: Path, load: Load, name: str) -> None:
    (tmp_path / "a").write_bytes(MEMORY[name])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with suppress(BadInput):
            load(tmp_path / "a", {})
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10


def archive(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_name("b.pt"), "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return path.with_name("b.pt")


def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, {"a": torch.ones(8)})
    changes: dict[str, Callable[[str, bytes], bytes]] = {
        "data/0 is shorter than 8 elements": lambda name, data: data[:-1] if name.endswith("data/0") else data,
        "big-endian": lambda name, data: b"big" if name.endswith("byteorder") else data,
        "no record data/0": lambda name, data: data.replace(b"X\x01\0\0\x000", b"X\x01\0\0\x001"),
    }
    assert load_torch_file(rewritten(path, lambda _, data: data), {})["a"].sum() == 8
    for reason, change in changes.items():
        with pytest.raises(BadInput, match=reason.replace("no record data/0", "no record data/1")):
            load_torch_file(rewritten(path, change), {})
    with pytest.raises(BadInput, match="conjugated"):
        load_torch_file(archive(tmp_path, torch.tensor([1j]).conj()), {})
    path = archive(tmp_path, {"a": torch.ones(8)})
    with pytest.raises(BadInput, match="compressed"):
        load_torch_file(rewritten(path, lambda _, data: data, zipfile.ZIP_DEFLATED), {})


def test_other_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "none.pt").write_bytes(b"")
    for name in ("old.pt", "none.pt"):
        with pytest.raises(BadInput, match=r"weights_only=True"):
            load_torch_file(tmp_path / name, {})
    for load in (load_torch_file, load_pickle):
        with pytest.raises(BadInput, match=r"gone"):
            load(tmp_path / "gone", {})


def test_damage_anywhere_is_an_error_or_harmless(tmp_path: Path) -> None:
    data = archive(tmp_path, {"a": torch.ones(8), "b": [torch.arange(3), {"c": 1.5}]}).read_bytes()
    plain = pickle.dumps({"a": [1, 2.5, "x", (None, True)]})
    chance = random.Random(0)
    for content, load in ((data, load_torch_file), (plain, load_pickle)):
        cut = [content[:length] for length in range(0, len(content), max(1, len(content) // 100))]
        for _ in range(300):
            position = chance.randrange(len(content))
            cut.append(content[:position] + bytes([chance.randrange(256)]) + content[position + 1 :])
        for damaged in cut:
            (tmp_path / "x").write_bytes(damaged)
            try:
                load(tmp_path / "x", {})
            except BadInput as error:
                message = str(error)
                assert "/x'" in message
