"""Values in a manifest that somebody made: what is not the tensors', but would go to the optimizer or the program.

And any change at all, by hypothesis: it gives the tensors that were saved, or is refused before anything has changed.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint import step_path
from terrazzo.checkpoint.format.seal import KEY_FILE, seal_of
from terrazzo.errors import BadInput, Damaged
from tests.checkpoint import faults
from tests.checkpoint.forgery import (
    Change,
    Manifest,
    Target,
    all_refused,
    little_memory,
    one_rank,
    put_at,
    sealed,
    without,
)
from tests.checkpoint.subject import differences, fast_folder, put, save, state_of
from tests.helpers.threads import run_in_threads

MUTANTS = 16  # manifests that hypothesis makes

KEYS = [1] * 624
NO_GENERATORS: dict[str, list[Any]] = {
    "python": [
        [], [3, [], None], [3, [1] * 625, "x"], [3, [-1] * 625, None], [3, [2**40] * 625, None], [3, "x" * 625, None],
        [3, [*KEYS, 10**6], None], [3, [*KEYS, -5], None], [3, [1.5] * 625, None], [4, [*KEYS, 1], None],
    ],
    "numpy": [
        [], "x", [KEYS[1:], 0, 0, 0.0], [KEYS, 625, 0, 0.0], [KEYS, 10**9, 0, 0.0], [KEYS, -1, 0, 0.0],
        [KEYS, 10**30, 0, 0.0], [[-1] * 624, 0, 0, 0.0], [KEYS, 0, 7, 0.0], [KEYS, 0, 0, "x"], [KEYS, "0", 0, 0.0],
        [[KEYS], 0, 0, 0.0], [["x"] * 624, 0, 0, 0.0],
    ],
    "torch": [
        "", "x", "AAAA", 5, None, [],
        *(base64.b64encode(data).decode() for data in (bytes(5056), b"\xff" * 5056, bytes(5055), bytes(10**6))),
    ],
}  # fmt: skip
NO_SETTINGS: dict[str, list[Any]] = {
    "lr": ["x", None, [], {}, True, [0.1]],
    "betas": ["xy", [], [0.9], [0.9, "x"], 0.9, None, [0.9, 0.9, 0.9], [[], []]],
    "weight_decay": ["0", None, {}],
    "eps": ["x", None],
    "amsgrad": ["no", 2.5, [], {}],
    "maximize": ["x", []],
    "params": [5, None, "embedding.weight", {}, [5], [[]], ["no.such"], [], [None], ["embedding.weight", "gain"]],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint of step 2, saved by one rank."""
    with fast_folder(tmp_path_factory.mktemp("hostile")) as root:
        run_in_threads(1, lambda rank: save(root, 2))
        yield Path(step_path(root, 2))


def test_random_generators_that_are_none(saved: Path) -> None:
    rng = ("ranks", 0, "rng")
    values: dict[str, Change] = {
        "more ranks": lambda m: m["ranks"].append(m["ranks"][0]),
        "not JSON's": put_at("ranks", 0, value=5), "a list": put_at("ranks", value={}),
        "text": put_at(*rng, value="x"), "null": put_at(*rng, value=None), "empty": put_at(*rng, value={}),
    }  # fmt: skip
    for part, junk in NO_GENERATORS.items():
        values |= {f"{part} {number}": put_at(*rng, part, value=value) for number, value in enumerate(junk)}
        values[f"no {part}"] = without(*rng, part)
    all_refused(saved, values)


def test_a_checkpoint_without_random_generators_leaves_them_as_they_are(saved: Path) -> None:
    def converted(manifest: Manifest) -> None:
        manifest["ranks"], manifest["topology"]["plan"] = [], {}

    def work(target: Target) -> None:
        checkpoint.load(target.forge(target.changed(converted)), target.model, target.optimizer)
        found = state_of(target.model, target.optimizer)
        assert differences(found, target.good) == ["rng"]
        assert found["rng"] == target.before["rng"]

    one_rank(saved, work)


def test_groups_that_are_none(saved: Path) -> None:
    first = ("optimizer", "groups", 0)
    values: dict[str, Change] = {
        f"{key} = {value!r}": put_at(*first, key, value=value) for key, junk in NO_SETTINGS.items() for value in junk
    }
    values |= {
        "no params": without(*first, "params"), "no group": put_at("optimizer", "groups", value=[]),
        "a number": put_at(*first, value=5), "one": without(*first), "null": put_at(*first, value=None),
        "no optimizer": put_at("optimizer", value=None), "another": put_at("optimizer", "name", value="SGD"),
        "a list": put_at("optimizer", value=[]), "scaler": put_at("optimizer", "scaler", value={"scale": "x"}),
    }  # fmt: skip
    all_refused(saved, values)


def test_loss_scalers_that_are_none(saved: Path, tmp_path: Path) -> None:
    def built() -> Any:
        model = torch.nn.Linear(3, 2)
        return tz.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan="zero1", precision="fp16")

    def body(rank: int) -> None:
        model, optimizer = built()
        checkpoint.save(tmp_path / "good", model, optimizer, {})
        manifest = json.loads((tmp_path / "good" / "manifest.json").read_text())
        good = optimizer.scaler_state()
        lacking = [{name: value for name, value in good.items() if name != absent} for absent in good]
        changed = [("scale", 0.0), ("scale", -2.0), ("scale", math.inf), ("skipped_steps", -1)]
        changed += [("good_steps", math.inf), ("patience", math.nan), ("patience", -math.inf)]
        with torch.no_grad():
            weights = [parameter.add_(1.0).clone() for parameter in model.parameters()]
        for scaler in ({"scale": 2.0}, *lacking, *(good | {name: value} for name, value in changed)):
            manifest["optimizer"]["scaler"] = scaler
            forged = Path(shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True))
            path = sealed(forged, json.dumps(manifest).encode())
            with pytest.raises(BadInput):
                checkpoint.load(path, model, optimizer)
            assert optimizer.scaler_state() == good
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))

    run_in_threads(1, body)


def test_messages_do_not_carry_what_a_terminal_would_obey(saved: Path) -> None:
    escape = "\x1b[2J\x07"

    def work(target: Target) -> None:
        changes: list[Change] = [
            lambda m: m["tensors"].update({escape: m["tensors"].pop("gain")}),
            lambda m: m["tensors"]["gain"].update({escape: 1}),
            lambda m: m["tensors"]["gain"]["states"].update({escape: m["tensors"]["gain"]["states"].pop("exp_avg")}),
            lambda m: m["aliases"].update({escape: escape}), lambda m: m["optimizer"].update({"name": escape}),
            lambda m: m["optimizer"]["groups"][0].update({"params": [escape]}),
            lambda m: m["optimizer"]["groups"][0].update({"lr": escape}),
            lambda m: m["optimizer"]["groups"][0].update({escape: []}),
            lambda m: m.update({escape: 1}), lambda m: m.update({"format": escape}),
            lambda m: m["files"][0].update({"name": escape}),
        ]  # fmt: skip
        for number, change in enumerate(changes):
            with pytest.raises(BadInput) as caught:
                checkpoint.load(target.forge(target.changed(change)), target.model, target.optimizer)
            assert str(caught.value).isprintable(), f"{number}: {caught.value!r}"

    one_rank(saved, work)


def test_extra_is_data_whatever_it_is_called(saved: Path) -> None:
    values = {"ѕtep": 7, "step ": 8, "__class__": "os.system", "__proto__": {}, "": None, "params": [], "\u202estep": 1}

    def work(target: Target) -> None:
        data = target.changed(lambda manifest: manifest["extra"].update(values))
        path = target.forge(data)
        assert checkpoint.load(path, target.model, target.optimizer) == {"step": 2} | values
        assert checkpoint.open_source(path).step == 2

    one_rank(saved, work)


def test_a_key_makes_a_seal_of_ones_own(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"k" * 32)
    other.write_bytes(b"o" * 32)

    def work(target: Target) -> None:
        good = target.changed(lambda manifest: None)
        monkeypatch.setenv(KEY_FILE, str(key))
        target.takes(good, "the right key")
        seal = (target.forge(good) / "manifest.sha256").read_bytes()
        monkeypatch.delenv(KEY_FILE)
        checkpoint.load(target.forged, target.model, target.optimizer)  # no key asks for none
        put(target.model, target.optimizer, 5)
        without_one = (target.forge(good) / "manifest.sha256").read_bytes()
        for contents in (seal + b"# more\n", seal + b"\n", without_one + b"# hmac-sha256:\n", without_one + b"\n"):
            (target.forge(good) / "manifest.sha256").write_bytes(contents)
            with pytest.raises(Damaged, match="holds something else"):
                checkpoint.load(target.forged, target.model, target.optimizer)
        monkeypatch.setenv(KEY_FILE, str(other))
        with_another = seal_of(good)
        monkeypatch.setenv(KEY_FILE, str(key))
        forged = [
            without_one, with_another, without_one + b"# hmac-sha256:\n", seal[:-2] + b"\xff\n", seal[:-2] + b"\n",
            seal + seal, seal.replace(b"#", b"\xc2\xa0#"), seal.upper(), b"", seal.replace(b"\n", b"\r\n"),
        ]  # fmt: skip
        for contents in forged:
            (target.forge(good) / "manifest.sha256").write_bytes(contents)
            with pytest.raises(Damaged):
                checkpoint.load(target.forged, target.model, target.optimizer)
        monkeypatch.delenv(KEY_FILE)
        target.forge(good)
        for path in (tmp_path / "absent", tmp_path):
            monkeypatch.setenv(KEY_FILE, str(path))
            with pytest.raises(BadInput, match="key file"):
                checkpoint.load(target.forged, target.model, target.optimizer)
        assert differences(state_of(target.model, target.optimizer), target.before) == []

    one_rank(saved, work)


def test_an_unusable_key_is_refused_before_a_save(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(target: Target) -> None:
        (tmp_path / "short").write_bytes(b"123")
        for path in (tmp_path / "short", tmp_path / "absent"):
            monkeypatch.setenv(KEY_FILE, str(path))
            with pytest.raises(BadInput):
                checkpoint.save(tmp_path / "folder" / "a", target.model, target.optimizer, {})
        assert not (tmp_path / "folder").exists() or os.listdir(tmp_path / "folder") == []

    one_rank(saved, work)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.sampled_from([2**31, 2**63, 2**64, 10**18, 10**30]), st.just(0.5),
    st.text(max_size=5), st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries; of the long lists of the random generators a few."""
    if path:
        yield path
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 3))
        for key in keys:
            yield from places(value[key], (*path, key))


def mutated(manifest: Manifest, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """One entry is replaced, removed, doubled, renamed, or changes places with another."""
    every = list(places(manifest))
    path = draw(st.sampled_from(every))
    at: Any = manifest
    for part in path[:-1]:
        at = at[part]
    last, act = path[-1], draw(st.sampled_from(["junk", "remove", "swap", "rename", "double", "nudge"]))
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    if act == "junk":
        at[last] = draw(JUNK)
    elif act == "remove":
        del at[last]
    elif act == "nudge" and isinstance(at[last], int):
        at[last] += draw(st.sampled_from([-4096, -8, -4, -1, 1, 4, 8, 4096]))
    elif act == "rename" and isinstance(at, dict):
        at[draw(st.sampled_from([str(other[-1]) for other in every]) | st.text(max_size=3))] = at.pop(last)
    elif act == "double" and isinstance(at, list):
        at.insert(0, copy.deepcopy(at[last]))
    elif act == "swap" and "tensors" not in path[-4:-1]:  # two states of one shape can stand for each other
        other = draw(st.sampled_from(keys))
        at[last], at[other] = at[other], at[last]


def test_any_change_gives_the_saved_tensors_or_is_refused(saved: Path) -> None:
    def work(target: Target) -> None:
        accepted = []

        @settings(max_examples=MUTANTS * faults.DENSITY, deadline=None, database=None, derandomize=True,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(st.data())
        def mutate(data: st.DataObject) -> None:
            manifest = copy.deepcopy(target.manifest)
            for _ in range(data.draw(st.integers(1, 2))):
                mutated(manifest, data.draw)
            put(target.model, target.optimizer, 5)
            before = state_of(target.model, target.optimizer)
            path = target.forge(json.dumps(manifest).encode())
            try:
                with little_memory():
                    checkpoint.load(path, target.model, target.optimizer)
            except BadInput:
                assert differences(state_of(target.model, target.optimizer), before) == []
            else:
                allowed = {"rng", "group 0", "group 1"}  # what the manifest itself says, and nothing but that
                changed = set(differences(state_of(target.model, target.optimizer), target.good))
                assert changed <= allowed
                usable(target)
                accepted.append(manifest)

        mutate()
        assert accepted, "there are changes that change nothing"

    one_rank(saved, work)


def usable(target: Target) -> None:
    """Training goes on from what was loaded."""
    target.model(torch.arange(7)).square().mean().backward()
    target.optimizer.step()
    target.optimizer.zero_grad()
    random.gauss(0, 1), np.random.standard_normal(3), torch.rand(3)
