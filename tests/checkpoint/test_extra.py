"""`extra` comes back as it was given, or is refused on every rank before a byte is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.saving import job
from terrazzo.errors import BadInput, RanksApart, SaveFailed
from tests.helpers.threads import exclusive, run_in_threads


def built() -> tuple[nn.Module, Any]:
    with exclusive():
        model = nn.Linear(5, 3)
    return tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE

REFUSED: list[tuple[Any, str]] = [
    ({"h": {1: 2.0, "1": 3}}, r"extra\['h'\] has the key 1; JSON has text as keys alone: give '1'\."),
    ({1: 2.0}, r"extra has the key 1;"),
    ({"t": [0, (1, 2)]}, r"extra\['t'\]\[1\] is a tuple; give a list\."),
    ({"x": math.nan}, r"extra\['x'\] is nan; leave it out"),
    ({"x": {1, 2}}, r"extra\['x'\] is a set; give a list"),
    ({"x": torch.ones(2)}, r"extra\['x'\] is a Tensor; give its item\(\) or tolist\(\)"),
    ({"x": np.int64(1)}, r"extra\['x'\] is a int64; give numbers"),
    ({"x": "\ud800"}, r"extra\['x'\] is '\\ud800', and half a character"),
    ({"x": {"\udfff": 1}}, r"extra\['x'\] has a key that is '\\udfff'"),
    ({"x": nested(100)}, r"nested deeper than 100 levels"),
    (CYCLE, r"or holds itself; make it flat"),
    ({"x": 10**5000}, r"thousands|digits"),
    ({"x": [0] * 2_000_000}, r"too many small values"),
    ({"x": "é" * 40_000_000}, r"extra is 80,000,008 bytes of JSON, and may be 67,108,864"),
    ({"step": True}, r"extra\['step'\] is True: give a whole number"),
    ({"step": -1}, r"extra\['step'\] is -1"),
    ([1], r"extra is a list: give a dict"),
]


def test_what_would_not_come_back_is_refused_on_every_rank_before_anything_is_written(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = built()
        for extra, words in REFUSED:
            with pytest.raises(BadInput, match=words):
                checkpoint.save(tmp_path / "a", model, optimizer, extra if rank == 1 else {})
        for run in (5, "\ud800"):
            with pytest.raises(BadInput, match="run is"):
                checkpoint.save(tmp_path / "a", model, optimizer, {}, run=run)  # type: ignore[arg-type]
        optimizer.param_groups[0]["note"] = "\ud800"
        with pytest.raises(BadInput, match="hyper-parameter that JSON cannot hold"):
            checkpoint.save(tmp_path / "a", model, optimizer, {})

    run_in_threads(2, body)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_give_other_values_are_refused_by_key_and_the_first_may_give_them_alone(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = built()
        for given in ({"step": 1, "cursor": rank}, {"step": 1} | ({"cursor": 0} if rank else {})):
            with pytest.raises(RanksApart, match=r"other values on other ranks, of 'cursor', .*all_gather_object"):
                checkpoint.save(tmp_path / "a", model, optimizer, given)
            with checkpoint.Saver(model, optimizer) as saver, pytest.raises(RanksApart, match="'cursor'"):
                saver.save(tmp_path / "a", given)
        with pytest.raises(RanksApart, match="'step'"):
            checkpoint.save(tmp_path / "a", model, optimizer, {"step": 1} if rank else None)
        assert not (tmp_path / "a").exists()
        checkpoint.save(tmp_path / "a", model, optimizer, None if rank else {"step": 1, "cursor": 7})
        assert checkpoint.load(tmp_path / "a", model, optimizer) == {"step": 1, "cursor": 7}

    run_in_threads(2, body)


def test_ranks_that_ask_for_other_saves_are_refused_before_they_go_different_ways(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = built()
        for path, given, run, words in (
            ("a", None if rank else optimizer, "", "optimizer is given on rank 0 and None on rank 1"),
            ("a", optimizer, str(rank), "run is '0' on rank 0 and '1' on rank 1"),
            (str(rank), optimizer, "", "the checkpoint's name is '0' on rank 0 and '1' on rank 1"),
        ):
            with pytest.raises(RanksApart, match=words):
                checkpoint.save(tmp_path / path, model, given, run=run)
            with checkpoint.Saver(model, given, run=run) as saver, pytest.raises(RanksApart, match=words):
                saver.save(tmp_path / path, {})
        with pytest.raises(BadInput, match=r"path of a checkpoint, .* is the int 3: give text"):
            checkpoint.save(3, model, optimizer)  # type: ignore[arg-type]

    run_in_threads(2, body)
    assert list(tmp_path.iterdir()) == []


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    given = {
        "step": 7,
        "": [None, True, False, 2**70, -0.0, 5e-324, 1e308, "", 'é\u0000"\\ 𝄞', []],
        "keys": {"1": 1, "ключ": {}, "NaN": "NaN"},
        "metric": np.float64(0.1),
        "deep": nested(98),
    }

    def body(rank: int) -> dict[str, Any]:
        model, optimizer = built()
        checkpoint.save(tmp_path / "a", model, optimizer, given)
        return checkpoint.load(tmp_path / "a", model, optimizer)

    assert run_in_threads(2, body) == [given, given]


def test_a_manifest_that_no_load_would_read_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        model, optimizer = built()
        with pytest.raises(SaveFailed, match=r"'.*/a' was not saved: Its manifest is [0-9,]+ bytes, and at most 2,000"):
            checkpoint.save(tmp_path / "a", model, optimizer, {})

    monkeypatch.setattr(job, "MAX_MANIFEST_BYTES", 2000)
    run_in_threads(2, body)
    assert list(tmp_path.iterdir()) == []
