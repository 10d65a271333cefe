"""Mistakes in a configuration that the schema cannot see: each is refused before a process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.preflight import check

OPS = {"activation_checkpointing": "selective", "activation_checkpointing_ops": ["nope"]}
NARROW = {"name": "bf16-pure", "moments": "int8", "rounding": "stochastic"}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"optimizer": {"no_decay": ["*.bias", "haed.*"]}}, r"no_decay has '\*\.bias', which no parameter's"),
        ({"plan": {"units": ["Blcok"]}}, r"plan\.units: 'Blcok' matches no module.*Did you mean 'Block'\?"),
        ({"train": OPS}, "no operator 'nope'"),
        ({"data": {"too_long": "drop"}}, r"data\.too_long is 'drop', but with data\.packing 'stream'"),
        ({"precision": {"moments": "int8"}, "optimizer": {"name": "Muon"}}, "moments in int8, and Muon is not known"),
        ({"precision": NARROW, "optimizer": {"name": "SGD"}}, "SGD does not count steps. Use Adam,"),
        ({"guard": {"action": "rollback"}}, r"no checkpoint to go back to\. Set checkpoint\.every"),
        ({"data": {"cache": "/proc/tokens"}}, r"data\.cache is '/proc/tokens', but '/proc' cannot be written to"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_it_is_refused_with_the_edit(tmp_path: Path, raw: dict[str, Any], said: str) -> None:
    raw = {"log": {"folder": str(tmp_path / "run")}, "launch": {"device": "cpu"}, **raw}
    with pytest.raises(BadInput, match=said):
        check(config_from_dict(raw), 2)
    assert not any(tmp_path.iterdir())


def test_what_a_stage_of_a_pipeline_has_not_is_looked_up_in_the_whole_model(tmp_path: Path) -> None:
    mesh = {"units": ["blocks.*"], "mesh": {"pp": 2}}
    raw = {"log": {"folder": str(tmp_path)}, "launch": {"device": "cpu"}, "plan": mesh}
    check(config_from_dict({**raw, "optimizer": {"no_decay": ["blocks.0.attention.query.weight"]}}), 2)


def test_a_seed_is_one_that_generators_take() -> None:
    with pytest.raises(BadInput, match=r"train\.seed is 18446744073709551616, expected a number below 9"):
        config_from_dict({"train": {"seed": 2**64}})
