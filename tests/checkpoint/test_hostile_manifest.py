"""Manifests that somebody made: sealed anew after every change, so that only their contents can give them away.

Whatever a manifest says, loading it gives the state that its digests are of, or `BadInput` before anything has changed;
it takes neither long nor more memory than the files have bytes, follows no path and runs nothing.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo import checkpoint
from terrazzo.checkpoint import open_source, step_path
from terrazzo.checkpoint.format.parse import parse_manifest
from terrazzo.checkpoint.format.rank_layout import digest
from terrazzo.errors import BadInput, Damaged
from tests.checkpoint.forgery import (
    RANK_FILE,
    Change,
    Manifest,
    Target,
    all_refused,
    little_memory,
    one_rank,
    put_at,
    without,
)
from tests.checkpoint.subject import fast_folder, save
from tests.helpers.threads import run_in_threads

HUGE = 10**15
NO_COUNTS: list[Any] = [-1, HUGE, 10**30, 1.5, "3", None, True, [], {}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint of step 2, saved by one rank."""
    with fast_folder(tmp_path_factory.mktemp("hostile")) as root:
        run_in_threads(1, lambda rank: save(root, 2))
        yield Path(step_path(root, 2))


WEIGHT = ("tensors", "linear.weight", "states", "weight")
TILE = (*WEIGHT, "tiles", 0)
RANGE = (*TILE, "ranges", 0)
MOMENTS = ("tensors", "linear.weight", "states")


def test_the_good_one_is_taken(saved: Path) -> None:
    one_rank(saved, lambda target: target.takes(target.changed(lambda manifest: None), "as it was"))


MANY = 400_000


def _keys(item: str) -> str:
    return ", ".join(f'"number {n:010}": {item}' for n in range(MANY))


@pytest.mark.parametrize(
    "made",  # by the test alone: each is of megabytes
    [
        lambda: "[" + "[]," * MANY + "0]",
        lambda: '{"files": [' + "[]," * MANY + "0]}",
        lambda: '{"files": [' + "1," * 3 * MANY + "0]}",
        lambda: '{"tensors": {"a": {"shape": [], "states": {"w": {"tiles": [' + "{}," * MANY + "{}]}}}}}",
        lambda: "{" + _keys("0") + "}",
        lambda: '{"tensors": {' + _keys("0") + "}}",
        lambda: '{"aliases": {' + _keys("0.5") + "}}",
        lambda: '{"tensors": {"a": {"shape": [' + '"sixteen letters",' * MANY + "0]}}}",
        lambda: "[" * MANY,
        lambda: '{"a":' * MANY,
    ],
    ids=["lists", "no files", "numbers", "no ranges", "keys", "no tensors", "no aliases", "shape", "deep", "deeper"],
)
def test_manifests_of_many_small_things_take_neither_time_nor_memory(made: Callable[[], str]) -> None:
    """Each small thing was an error, described at length: a second for 60 kB."""
    text = made()
    before = time.process_time()
    with little_memory(), pytest.raises(Damaged):
        parse_manifest(text.encode(), "manifest.json")
    assert time.process_time() - before < 5


def test_a_manifest_larger_than_any_is_not_read(saved: Path) -> None:
    folder = saved.parent / "large"
    folder.mkdir()
    (folder / "manifest.json").touch()
    os.truncate(folder / "manifest.json", 900_000_000)
    with little_memory(), pytest.raises(Damaged, match="has 900000000 bytes, more than the"):
        open_source(folder)
    shutil.rmtree(folder)


def test_names_that_leave_the_folder(saved: Path) -> None:
    names = ["../x", "/etc/passwd", "..", "", "a/b", f"./{RANK_FILE}", f"{RANK_FILE}\n", f"{RANK_FILE}\0", "rank-0.pt",
             "rank-٠٠٠٠٠.safetensors", f"../{saved.name}/{RANK_FILE}", str(saved / RANK_FILE)]  # fmt: skip
    all_refused(saved, {name: put_at("files", 0, "name", value=name) for name in names}, Damaged)


def test_numbers_that_cannot_be(saved: Path) -> None:
    changes: dict[str, Change] = {}
    for value in NO_COUNTS:
        for path in ((*RANGE, "offset"), (*RANGE, "stop"), (*RANGE, "file"), (*WEIGHT, "numel"),
                     ("files", 0, "size_bytes"), ("files", 0, "header_bytes")):  # fmt: skip
            changes[f"{path[-1]} = {value!r}"] = put_at(*path, value=value)
        if not isinstance(value, int) or value < 0:
            changes[f"step = {value!r}"] = put_at("step", value=value)
            changes[f"world_size = {value!r}"] = put_at("topology", "world_size", value=value)
        changes[f"shape [{value!r}]"] = put_at("tensors", "linear.weight", "shape", value=[value, value])
    all_refused(saved, changes)


def test_shapes_that_claim_more_than_there_is(saved: Path) -> None:
    def everything_huge(manifest: Manifest) -> None:
        tensor = manifest["tensors"]["linear.weight"]
        tensor["shape"] = [HUGE]
        for state in tensor["states"].values():
            state["numel"] = HUGE
            state["tiles"][0] |= {"offsets": [0], "sizes": [HUGE]}
            state["tiles"][0]["ranges"][0]["stop"] = HUGE

    def file_huge(manifest: Manifest) -> None:
        everything_huge(manifest)
        manifest["files"][0]["size_bytes"] = 10**18

    def header_of_a_file_without_ranges(manifest: Manifest) -> None:
        entry = {"name": "rank-00001.safetensors", "size_bytes": 0, "header_bytes": HUGE, "header_digest": "0" * 32}
        manifest["files"].append(entry)

    def many_dims(manifest: Manifest) -> None:
        manifest["tensors"]["linear.weight"]["shape"] = [10**18] * 100_000

    def work(target: Target) -> None:
        for change in (everything_huge, file_huge, many_dims):
            target.refuses(target.changed(change), change.__name__)
        (target.saved / "rank-00001.safetensors").touch()
        target.refuses(target.changed(header_of_a_file_without_ranges), "a header larger than its file")
        (target.saved / "rank-00001.safetensors").unlink()

    one_rank(saved, work)


def test_ranges_that_overlap_or_have_gaps(saved: Path) -> None:
    def another_tensors_bytes(manifest: Manifest) -> None:
        states = manifest["tensors"]["linear.weight"]["states"]
        states["exp_avg"]["tiles"] = copy.deepcopy(states["weight"]["tiles"])

    def the_same_range_twice(manifest: Manifest) -> None:
        tile = manifest["tensors"]["linear.weight"]["states"]["weight"]["tiles"][0]
        tile["ranges"].append(copy.deepcopy(tile["ranges"][0]))

    all_refused(saved, {
        "another's": another_tensors_bytes, "twice": the_same_range_twice, "none": put_at(*TILE, "ranges", value=[]),
        "begins late": put_at(*RANGE, "start", value=1), "ends early": put_at(*RANGE, "stop", value=24),
        "empty": put_at(*RANGE, "stop", value=0), "in the header": put_at(*RANGE, "offset", value=0),
        "off by one": put_at(*RANGE, "offset", value=4097), "at the end": put_at(*RANGE, "offset", value=HUGE),
        "a file twice": lambda manifest: manifest["files"].append(manifest["files"][0]),
    })  # fmt: skip


def test_states_that_are_shorter_than_their_tensors(saved: Path) -> None:
    def short(kind: str, numel: int) -> Change:
        def change(manifest: Manifest) -> None:
            state = manifest["tensors"]["linear.weight"]["states"][kind]
            tile = state["tiles"][0]
            part = tile["ranges"][0]
            data = (saved / RANK_FILE).read_bytes()[part["offset"] : part["offset"] + 4 * numel]
            state["numel"] = part["stop"] = numel
            tile |= {"offsets": [0], "sizes": [numel]}
            part["digests"] = [digest(data)]
            if numel == 0:
                tile["ranges"] = []

        return change

    all_refused(
        saved, {f"{kind} {numel}": short(kind, numel) for kind in ("exp_avg", "exp_avg_sq") for numel in (2, 24, 0)}
    )
    all_refused(saved, {"step 0": short("step", 0)})


def test_states_under_other_names(saved: Path) -> None:
    def renamed(old: str, new: str) -> Change:
        return lambda manifest: manifest["tensors"]["linear.weight"]["states"].update(
            {new: manifest["tensors"]["linear.weight"]["states"].pop(old)}
        )

    others = {"buffer": "weight", "wеight": "weight", "exp_аvg": "exp_avg", "steps": "step", "x": "exp_avg_sq"}
    changes = {f"{old} as {new}": renamed(old, new) for new, old in others.items()}
    changes |= {f"no {kind}": without(*MOMENTS, kind) for kind in ("weight", "exp_avg", "exp_avg_sq", "step")}
    all_refused(saved, changes)


def test_names_of_tensors_that_look_alike(saved: Path) -> None:
    def renamed(manifest: Manifest) -> None:
        manifest["tensors"]["lіnear.weight"] = manifest["tensors"].pop("linear.weight")

    one_rank(saved, lambda target: target.refuses(target.changed(renamed), "a Cyrillic i", BadInput, "\\u0456"))


def test_dtypes_of_buffers_that_were_not_written(saved: Path) -> None:
    place = ("tensors", "norm.num_batches_tracked", "states", "buffer", "dtype")
    all_refused(saved, {dtype: put_at(*place, value=dtype) for dtype in ("float64", "uint8", "bool", "float32")})


def test_dtypes_that_were_not_written(saved: Path) -> None:
    dtypes = ("float31", "int32", "uint8", "bfloat16", "float16", "float64", "", "object", "float8_e4m3fn", None, 4)
    all_refused(saved, {str(dtype): put_at(*WEIGHT, "dtype", value=dtype) for dtype in dtypes})


def test_digests_and_blocks_that_do_not_fit(saved: Path) -> None:
    one = "0" * 32
    digests = {
        "none": [],
        "two": [one, one],
        "wrong": [one],
        "short": [one[1:]],
        "a number": [5],
        "capital": ["A" * 32],
    }
    changes = {what: put_at(*RANGE, "digests", value=value) for what, value in digests.items()}
    changes |= {f"blocks of {size!r}": put_at("block_bytes", value=size) for size in (0, -1, 1, 8, 1.0, "4", None)}
    changes["header"] = put_at("files", 0, "header_digest", value=one)
    all_refused(saved, changes, Damaged)
    one_rank(saved, lambda target: target.takes(target.changed(put_at("block_bytes", value=10**18)), "one block each"))


def test_a_file_without_a_header(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    (folder / "rank-00001.safetensors").touch()
    entry = {"name": "rank-00001.safetensors", "size_bytes": 0, "header_bytes": 0, "header_digest": digest(b"")}
    all_refused(folder, {"empty": lambda manifest: manifest["files"].append(entry)}, Damaged)


def test_blocks_of_one_byte(saved: Path) -> None:
    data = (saved / RANK_FILE).read_bytes()

    def change(manifest: Manifest) -> None:
        manifest["block_bytes"] = 1
        for tensor in manifest["tensors"].values():
            for state in tensor["states"].values():
                for part in (part for tile in state["tiles"] for part in tile["ranges"]):
                    count = (part["stop"] - part["start"]) * getattr(torch, state["dtype"]).itemsize
                    part["digests"] = [
                        digest(data[at : at + 1]) for at in range(part["offset"], part["offset"] + count)
                    ]

    one_rank(saved, lambda target: target.takes(target.changed(change), "a digest for each byte"))


def test_aliases_that_are_none(saved: Path) -> None:
    values: dict[str, Any] = {
        "nothing": {"a": "b"}, "itself": {"linear.weight": "linear.weight"}, "a number": {"a": 5}, "null": {"a": None},
        "a list": [], "a tensor's name": {"gain": "linear.weight"}, "of an alias": {"a": "b", "b": "a"},
    }  # fmt: skip
    all_refused(saved, {what: put_at("aliases", value=value) for what, value in values.items()}, Damaged)


def test_versions_and_formats_of_others(saved: Path) -> None:
    def work(target: Target) -> None:
        newest = target.manifest["version"]
        target.refuses(target.changed(put_at("version", value=newest + 1)), "newer", BadInput, "newer release")
        target.refuses(target.changed(put_at("version", value=1)), "older", BadInput, "release that wrote it")
        target.refuses(target.changed(put_at("version", value=2)), "tiles in version 2", Damaged)
        values: list[Any] = [0, -1, True, "2", 2.0, None, [], 10**400]
        for value in values:
            target.refuses(target.changed(put_at("version", value=value)), repr(value), BadInput)
        for key in ("format", "digest", "surprise"):
            target.refuses(target.changed(put_at(key, value="md5")), key)

    one_rank(saved, work)


def texts(good: str) -> Iterator[tuple[str, bytes]]:
    """What is no strict JSON, or far too much of it."""
    yield "nothing", b""
    yield "null", b"null"
    yield "a list", b"[]"
    yield "text", b'"manifest"'
    yield "bytes", bytes(range(256))
    yield "half", good[: len(good) // 2].encode()
    yield "two", (good + good).encode()
    yield "a mark", b"\xef\xbb\xbf" + good.encode()
    yield "16 bits", good.encode("utf-16")
    yield "Latin", good.replace('"run": ""', '"run": "é"').encode("latin-1")
    yield "a lone surrogate", good.replace('"run": ""', '"run": "\\ud800"').encode()
    yield "deep", b"[" * 100_000 + b"]" * 100_000
    yield "deep objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield "deep extra", good.replace('"extra": {', '"extra": {"x": ' + "[" * 100_000 + "]" * 100_000 + ", ").encode()
    for constant in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
        yield constant, good.replace('"extra": {', f'"extra": {{"x": {constant}, ').encode()
        yield f"lr {constant}", good.replace('"lr": 0.001953125', f'"lr": {constant}').encode()
    yield "a long number", good.replace('"extra": {', '"extra": {"x": ' + "9" * 100_000 + ", ").encode()
    yield "a key twice", good.replace('"run": ""', '"run": "", "run": "b"').encode()
    yield "a key twice deep down", good.replace('"numel": 25', '"numel": 25, "numel": 25', 1).encode()
    many = ",".join(f'"k{number}":0' for number in range(200_000))
    yield "a key twice of many", good.replace('"extra": {', f'"extra": {{"x": {{{many},"k199999":0}}, ').encode()
    yield "a pickle", pickle.dumps(json.loads(good))
    yield "a comment", good.replace("{", "{/* */", 1).encode()


def test_what_is_no_strict_json(saved: Path) -> None:
    def work(target: Target) -> None:
        good = json.dumps(target.manifest)
        for what, data in texts(good):
            assert data != good.encode(), f"{what} changes nothing"
            target.refuses(data, what)

    one_rank(saved, work)


def test_a_manifest_of_a_gigabyte_that_is_not_there(saved: Path) -> None:
    def work(target: Target) -> None:
        target.forge(b"{}")
        os.truncate(target.forged / "manifest.json", 3 << 30)
        with little_memory(), pytest.raises(Damaged, match="more than"):
            checkpoint.load(target.forged, target.model, target.optimizer)

    one_rank(saved, work)


class Payload:
    """What runs when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def test_payloads_are_never_run(saved: Path, tmp_path: Path) -> None:
    witness = tmp_path / "it ran"
    zipped = io.BytesIO()
    torch.save({"x": Payload(witness)}, zipped)
    plain = pickle.dumps(Payload(witness))
    pickle.loads(plain)  # noqa: S301 - the oracle: it would run
    witness.rmdir()

    def work(target: Target) -> None:
        for payload in (plain, zipped.getvalue()):
            text = base64.b64encode(payload).decode()
            for file in ("manifest.json", "manifest.sha256", RANK_FILE):
                target.forge(json.dumps(target.manifest).encode())
                (target.forged / file).write_bytes(payload)
                with pytest.raises(Damaged):
                    checkpoint.load(target.forged, target.model, target.optimizer)
            for path in (("ranks", 0, "rng", "torch"), ("ranks", 0, "rng", "python"), ("ranks", 0, "rng")):
                target.refuses(target.changed(put_at(*path, value=text)), "random generators")
            target.takes(target.changed(put_at("extra", "x", value=text)), "extra")

            def as_file(manifest: Manifest, payload: bytes = payload) -> None:
                entry = manifest["files"][0]
                entry["size_bytes"] = len(payload)
                entry["header_bytes"], entry["header_digest"] = len(payload), digest(payload)

            data = target.changed(as_file)
            target.forge(data)
            (target.forged / RANK_FILE).write_bytes(payload)
            with pytest.raises(Damaged):
                checkpoint.load(target.forged, target.model, target.optimizer)

    one_rank(saved, work)
    assert not witness.exists()
