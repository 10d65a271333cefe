"""Checkpoints that are not what was written: every damage is refused by name, and nothing has been changed by then."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint import step_path
from terrazzo.checkpoint.loading.load import restore
from terrazzo.checkpoint.storage.local import LocalStore
from terrazzo.errors import BadInput, Damaged, RanksApart
from tests.checkpoint import faults
from tests.checkpoint.faults import Call, sampled, tapped_for_all
from tests.checkpoint.subject import State, build, differences, fast_folder, put, save, state_of
from tests.helpers.threads import exclusive, run_in_threads

FILES = ("manifest.json", "manifest.sha256", "rank-00000.safetensors", "rank-00001.safetensors")
BITS = 2  # flipped in each region of each file, and ten times as many in the manifest and its seal
LENGTHS = 4  # to which each file is cut


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints of steps 1 and 2, saved by two ranks."""
    with fast_folder(tmp_path_factory.mktemp("saved")) as root:
        for step in (1, 2):
            run_in_threads(2, lambda rank, step=step: save(root, step))  # type: ignore[misc]
        yield root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of `saved` to damage."""
    with fast_folder(tmp_path) as folder:
        yield Path(shutil.copytree(saved, folder / "copy"))


@dataclass(frozen=True)
class Damage:
    """What `do` does to the checkpoint in `folder`; the error names all of `words`."""

    name: str
    do: Callable[[Path], object]
    words: tuple[str, ...]


class Patient:
    """A rank's model in a state of its own, which no refused load may change."""

    def __init__(self, plan: str = "zero3") -> None:
        self.model, self.optimizer = build(5, plan=plan)
        self.before: State = state_of(self.model, self.optimizer)

    def refuses(self, path: Path | str, words: tuple[str, ...], what: str) -> None:
        """Loading `path` raises `Damaged` with these words, and changes nothing. Collective."""
        problem = self.problem(path)
        assert problem is not None, f"{what}: was not noticed"
        missing = [word for word in words if word not in problem]
        assert not missing, f"{what}: {missing} is not in: {problem}"
        assert differences(state_of(self.model, self.optimizer), self.before) == [], what

    def cannot_read(self, root: Path | str, file: str, code: int | None) -> None:
        """Loading step 2, and the newest of `root`, names the file and takes nothing for damaged. Collective."""
        for load in (lambda: checkpoint.load(step_path(root, 2), self.model, self.optimizer),
                     lambda: checkpoint.load_newest(root, self.model, self.optimizer)):  # fmt: skip
            with pytest.raises(BadInput, match=rf"{file}' cannot be read: .* not known: have the file") as caught:
                load()
            assert caught.type is BadInput
            assert code is None or os.strerror(code) in str(caught.value)
        assert differences(state_of(self.model, self.optimizer), self.before) == []

    def problem(self, path: Path | str) -> str | None:
        """What is wrong with a checkpoint, if anything. Collective."""
        try:
            checkpoint.load(path, self.model, self.optimizer)
        except Damaged as error:
            return str(error)
        return None


def all_refused(root: Path, damages: list[Damage]) -> None:
    """Each damage in turn is done to step 2, refused by two ranks, and repaired."""
    good = root / "good"
    shutil.move(step_path(root, 2), good)

    def body(rank: int) -> None:
        patient = Patient()
        for damage in damages:
            if rank == 0:
                shutil.rmtree(step_path(root, 2), ignore_errors=True)
                damage.do(Path(shutil.copytree(good, step_path(root, 2))))
            dist.barrier()
            patient.refuses(step_path(root, 2), damage.words, damage.name)
            dist.barrier()

    run_in_threads(2, body, timeout_s=faults.PATIENCE_S)


def flipped(file: str, offset: int, bit: int) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[offset] ^= 1 << bit
        (folder / file).write_bytes(data)

    return do


def regions(folder: Path) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """(file, first, last, words): bytes that belong together, and what an error about them has to name."""
    manifest = json.loads((folder / "manifest.json").read_text())
    yield "manifest.json", 0, (folder / "manifest.json").stat().st_size, ("manifest.json",)
    yield "manifest.sha256", 0, (folder / "manifest.sha256").stat().st_size, ("manifest.sha256",)
    for file in manifest["files"]:
        yield file["name"], 0, 8, (file["name"], "header")
        yield file["name"], 8, file["header_bytes"], (file["name"], "header")
    for name, tensor in manifest["tensors"].items():
        for kind, state in tensor["states"].items():
            itemsize = getattr(torch, state["dtype"]).itemsize
            for part in (part for tile in state["tiles"] for part in tile["ranges"]):
                file = manifest["files"][part["file"]]["name"]
                count_bytes = (part["stop"] - part["start"]) * itemsize
                yield file, part["offset"], part["offset"] + count_bytes, (file, name, kind)


def test_the_regions_are_all_of_every_file(saved: Path) -> None:
    folder = Path(step_path(saved, 2))
    for file in FILES:
        spans = sorted((first, last) for of, first, last, _ in regions(folder) if of == file)
        assert spans[0][0] == 0 and spans[-1][1] == (folder / file).stat().st_size
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_a_flipped_bit_anywhere(root: Path) -> None:
    damages = []
    for number, (file, first, last, words) in enumerate(regions(Path(step_path(root, 2)))):
        count = 10 * BITS if file.startswith("manifest") else BITS
        for place, offset in enumerate(sampled(range(first, last), count)):
            bit = (number + 3 * place) % 8
            damages.append(Damage(f"bit {bit} of byte {offset} in {file}", flipped(file, offset, bit), words))
    assert len(damages) > 50
    all_refused(root, damages)


def test_a_file_cut_to_any_length(root: Path) -> None:
    damages = []
    for file in FILES:
        size = (Path(step_path(root, 2)) / file).stat().st_size
        lengths = {0, 1, 7, 8, 4096, size - 1, *sampled(range(size), LENGTHS)} & set(range(size))
        damages += [Damage(f"{file} cut to {n} of {size}", cut(file, n), (file,)) for n in sorted(lengths)]
    all_refused(root, damages)


def deleted(file: str) -> Callable[[Path], None]:
    return lambda folder: os.unlink(folder / file)


def cut(file: str, length: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, length)


def appended(file: str, data: bytes) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        with (folder / file).open("ab") as opened:
            opened.write(data)

    return do


def replaced(file: str, by: Callable[[Path], object]) -> Callable[[Path], None]:
    """The file's name is another kind of entry, made by `by`; the file itself is beside the checkpoint."""

    def do(folder: Path) -> None:
        outside = folder.parent / f"outside-{file}"
        outside.unlink(missing_ok=True)
        os.rename(folder / file, outside)
        by(folder / file)

    return do


def test_files_that_are_lost_longer_or_something_else(root: Path) -> None:
    damages = []
    for file in FILES:
        words, good = (file,), (Path(step_path(root, 2)) / file).read_bytes()
        damages += [
            Damage(f"{file} deleted", deleted(file), words),
            Damage(f"{file} and a byte", appended(file, b"\0"), words),
            Damage(f"{file} and a line", appended(file, b"\n"), words),
            Damage(f"{file} twice", appended(file, good), words),
            Damage(
                f"{file} a link",
                replaced(file, lambda path: path.symlink_to(path.parent.parent / f"outside-{path.name}")),
                (file, "plain file"),
            ),
            Damage(f"{file} a pipe", replaced(file, os.mkfifo), (file, "plain file")),
            Damage(f"{file} a folder", replaced(file, os.mkdir), (file, "plain file")),
            Damage(f"{file} a device", replaced(file, device), (file, "plain file")),
        ]
    all_refused(root, damages)


def device(path: Path) -> None:
    """A file that never ends; a link to one where devices cannot be made."""
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))
    except OSError:
        path.symlink_to("/dev/zero")


def test_files_in_each_others_places(root: Path) -> None:
    other = Path(step_path(root, 1))

    def of_another_step(file: str) -> Callable[[Path], object]:
        return lambda folder: shutil.copy(other / file, folder / file)

    def of_another_rank(folder: Path) -> None:
        os.rename(folder / FILES[2], folder / "between")
        os.rename(folder / FILES[3], folder / FILES[2])
        os.rename(folder / "between", folder / FILES[3])

    damages = [Damage("ranks swapped", of_another_rank, ("rank-0000",))]
    damages += [Damage(f"{file} of another step", of_another_step(file), (file,)) for file in FILES]
    all_refused(root, damages)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOTCONN, errno.ESTALE])
@pytest.mark.parametrize("name", ["open", "preadv", "fstat"])
def test_files_that_cannot_be_read(root: Path, code: int, name: str) -> None:
    def body(rank: int) -> None:
        patient = Patient()
        for file in FILES:
            fault = failing(name, f"{step_path(root, 2)}/{file}", code)
            with tapped_for_all(root, fault):
                patient.cannot_read(root, f"{step_path(root, 2)}/{file}", code)

    run_in_threads(2, body)


@pytest.mark.parametrize("name", ["open", "preadv", "fstat"])
def test_a_medium_that_has_failed_is_damage(root: Path, name: str) -> None:
    def body(rank: int) -> None:
        patient = Patient()
        for file in FILES:
            path = f"{step_path(root, 2)}/{file}"
            with tapped_for_all(root, failing(name, path, errno.EIO)):
                patient.refuses(step_path(root, 2), (path, os.strerror(errno.EIO)), name)
                resumed = checkpoint.load_newest(root, patient.model, patient.optimizer)
            assert resumed is not None and resumed.path == step_path(root, 1)
            assert path in resumed.refused[step_path(root, 2)]
            if rank == 0:
                next(root.glob("step-00000002.damaged-*")).rename(step_path(root, 2))
            dist.barrier()
            put(patient.model, patient.optimizer, 5)

    run_in_threads(2, body)


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, Damaged), (errno.ESTALE, BadInput)])
def test_a_block_that_cannot_be_read_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[BadInput]
) -> None:
    manifest = json.loads((Path(step_path(root, 2)) / "manifest.json").read_text())
    first = manifest["files"][1]["header_bytes"]

    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if offset >= first:
            raise OSError(code, os.strerror(code))
        return real(descriptor, buffers, offset)

    def body(rank: int) -> None:
        patient = Patient()
        with pytest.raises(kind, match=rf"{os.strerror(code)}.* This concerns bytes {first} to \d+, .*, ") as told:
            checkpoint.load(step_path(root, 2), patient.model, patient.optimizer)
        assert told.type is kind

    monkeypatch.setattr(os, "preadv", preadv)
    run_in_threads(2, body)


def test_a_server_that_sends_more_than_was_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/terrazzo-whole", recursive=True)
    real = type(memory).cat_file
    monkeypatch.setattr(type(memory), "cat_file", lambda self, path, **_: real(self, path))

    def body(rank: int) -> None:
        Patient().refuses("memory://terrazzo-whole/step-00000002", ("/rank-0000", "the server sent"), "ranges")

    try:
        run_in_threads(2, body)
    finally:
        memory.rm("/terrazzo-whole", recursive=True)


def test_what_may_be_there_is_not_known_where_nothing_can_be_seen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "is_dir", refused)
    for look in (LocalStore(root).candidates, LocalStore(root).unfinished):
        with pytest.raises(BadInput, match=rf"'{root}' cannot be read: {os.strerror(errno.EACCES)}"):
            look()


class StoreError(Exception):
    """As libraries of object stores have: no `OSError`."""


@pytest.mark.parametrize("name", ["info", "cat_file"])
@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), StoreError("503")])
def test_objects_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/terrazzo-unread", recursive=True)
    real, asked = getattr(type(memory), name), [""]

    def fails(self: Any, path: str, *rest: Any, **named: Any) -> Any:
        if path.endswith(f"step-00000002/{asked[0]}") and dist.get_rank() == 1:
            raise error
        return real(self, path, *rest, **named)

    def body(rank: int) -> None:
        patient = Patient()
        for file in FILES:
            asked[0] = file
            dist.barrier()
            patient.cannot_read("memory://terrazzo-unread", file, getattr(error, "errno", None))
            dist.barrier()

    monkeypatch.setattr(type(memory), name, fails)
    try:
        run_in_threads(2, body)
    finally:
        monkeypatch.undo()
        memory.rm("/terrazzo-unread", recursive=True)


def failing(name: str, path: str, code: int) -> faults.Fault:
    """Calls of that name fail on that path on the second rank."""

    def fault(call: Call, real: faults.Real) -> Any:
        if call.name == name and call.path == path and dist.is_initialized() and dist.get_rank() == 1:
            raise OSError(code, os.strerror(code))
        return real()

    return fault


def test_the_newest_is_damaged_and_the_older_one_is_used(root: Path) -> None:
    kinds = [Damage("bit", flipped(FILES[3], -1, 0), (FILES[3],)), Damage("cut", cut(FILES[2], 5000), (FILES[2],)),
             Damage("seal", cut(FILES[1], 3), (FILES[1],)), Damage("manifest", cut(FILES[0], 0), (FILES[0],)),
             *(Damage(f"no {file}", deleted(file), (file,)) for file in FILES),
             Damage("pipe", replaced(FILES[0], os.mkfifo), (FILES[0],))]  # fmt: skip
    good = root / "good"
    shutil.move(step_path(root, 2), good)

    def body(rank: int) -> None:
        model, optimizer = build(1)
        expected = state_of(model, optimizer)
        for damage in kinds:
            if rank == 0:
                shutil.rmtree(step_path(root, 2), ignore_errors=True)
                damage.do(Path(shutil.copytree(good, step_path(root, 2))))
            dist.barrier()
            put(model, optimizer, 5)
            resumed = checkpoint.load_newest(root, model, optimizer)
            assert resumed is not None and resumed.path == step_path(root, 1), damage.name
            assert list(resumed.refused) == [step_path(root, 2)], damage.name
            reason = resumed.refused[step_path(root, 2)]
            assert all(word in reason for word in damage.words), (damage.name, reason)
            assert differences(state_of(model, optimizer), expected) == [], damage.name
            dist.barrier()

    run_in_threads(2, body)


def test_all_are_damaged_and_every_reason_is_given(root: Path) -> None:
    flipped(FILES[3], -1, 0)(Path(step_path(root, 1)))
    os.unlink(Path(step_path(root, 2)) / FILES[0])

    def body(rank: int) -> None:
        patient = Patient()
        with pytest.raises(Damaged) as caught:
            checkpoint.load_newest(root, patient.model, patient.optimizer)
        words = [step_path(root, 1), FILES[3], step_path(root, 2), FILES[0]]
        assert [word for word in words if word not in str(caught.value)] == []
        assert differences(state_of(patient.model, patient.optimizer), patient.before) == []

    run_in_threads(2, body)


def test_what_is_not_a_checkpoint_is_left_alone(root: Path) -> None:
    (root / "lost+found").mkdir(0o000)
    (root / "step-00000009").touch()
    (root / "step-00000008").mkdir()
    (root / ".step-00000007.partial-00ff").mkdir()
    (root / "step-7").mkdir()
    (root / "notes").symlink_to("nowhere")

    def body(rank: int) -> None:
        model, optimizer = build(5)
        resumed = checkpoint.load_newest(root, model, optimizer)
        assert resumed is not None and resumed.path == step_path(root, 2)
        assert resumed.refused == {}

    run_in_threads(2, body)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(root: Path) -> None:
    def body(rank: int) -> None:
        patient = Patient()
        for code in (errno.EACCES, errno.EIO, errno.ESTALE):
            for failing_rank in (0, 1):

                def fault(call: Call, real: faults.Real, code: int = code, failing_rank: int = failing_rank) -> Any:
                    listing = call.name in ("scandir", "listdir") and call.path == str(root)
                    if listing and dist.is_initialized() and dist.get_rank() == failing_rank:
                        raise OSError(code, os.strerror(code), call.path)
                    return real()

                with tapped_for_all(root, fault), pytest.raises(BadInput, match=os.strerror(code)):
                    checkpoint.load_newest(root, patient.model, patient.optimizer)
        assert differences(state_of(patient.model, patient.optimizer), patient.before) == []

    run_in_threads(2, body)


def test_a_checkpoint_that_cannot_be_listed_is_not_passed_over(root: Path) -> None:
    def locked(call: Call, real: faults.Real) -> Any:
        if call.path.startswith(step_path(root, 2)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), call.path)
        return real()

    def body(rank: int) -> None:
        patient = Patient()
        with tapped_for_all(root, locked):
            patient.cannot_read(root, step_path(root, 2) + ".*", errno.EACCES)

    run_in_threads(2, body)


def test_ranks_that_are_told_or_see_different_things(root: Path) -> None:
    """Nothing is loaded: a rank without optimizer states, or with those of another step, trains on without a word."""

    def body(rank: int) -> None:
        patient = Patient()
        model, optimizer, path = patient.model, patient.optimizer, step_path(root, 1)
        with pytest.raises(RanksApart, match="optimizer is given on rank 0 and None on rank 1"):
            checkpoint.load(path, model, None if rank else optimizer)
        with pytest.raises(RanksApart, match="cast is False on rank 0 and True on rank 1"):
            checkpoint.load(path, model, optimizer, cast=bool(rank))
        with pytest.raises(
            RanksApart, match=f"the checkpoint is '{path}' on rank 0 and '{step_path(root, 2)}' on rank"
        ):
            checkpoint.load(step_path(root, rank + 1), model, optimizer)
        torch.save({"a": torch.ones(1)}, foreign := root / f"{rank}.pt")  # of a format whose contents have no identity
        with pytest.raises(RanksApart, match=r"0\.pt' on rank 0 and '.*1\.pt' on rank 1"):
            checkpoint.load(foreign, model, None)
        source = checkpoint.open_source(path)
        source.identity += str(rank)  # as of hosts that show other contents under one path
        with pytest.raises(Damaged, match="do not see the same checkpoint"):
            restore(source, model, optimizer)
        assert differences(state_of(patient.model, patient.optimizer), patient.before) == []

    run_in_threads(2, body)


def test_the_newest_has_not_reached_every_rank(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.checkpoint.series.resume._PATIENCE_S", 0.1, raising=False)

    def unseen(call: Call, real: faults.Real) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1 and call.path.startswith(step_path(root, 2)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), call.path)
        return real()

    def body(rank: int) -> None:
        model, optimizer = build(1)
        expected = state_of(model, optimizer)
        put(model, optimizer, 5)
        with tapped_for_all(root, unseen):
            resumed = checkpoint.load_newest(root, model, optimizer)
        assert resumed is not None and resumed.path == step_path(root, 1)
        assert list(resumed.refused) == [step_path(root, 2)]
        assert differences(state_of(model, optimizer), expected) == []

    run_in_threads(2, body)


class Big(nn.Module):
    """One parameter of more than one block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1_500_000))


def test_a_message_names_the_bytes_within_a_large_tensor(root: Path) -> None:
    def body(rank: int) -> None:
        with exclusive():
            model = Big()
        model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), plan="zero3")
        checkpoint.save(root / "big", model, optimizer, {})
        size = (root / "big" / FILES[2]).stat().st_size
        for offset, block in ((4096 + 4_200_000, (4096 + 4_194_304, size - 1)), (4096, (4096, 4096 + 4_194_303))):
            flipped(FILES[2], offset, 3)(root / "big")
            with pytest.raises(Damaged, match=f"bytes {block[0]} to {block[1]}, weight, weight"):
                checkpoint.load(root / "big", model, optimizer)
            flipped(FILES[2], offset, 3)(root / "big")
        checkpoint.load(root / "big", model, optimizer)

    run_in_threads(1, body)
