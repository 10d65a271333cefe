"""The walk of one key that the package's docstring describes: each stop is where it says, and gives what it says."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from terrazzo.dialects.core.description import Setting
from terrazzo.dialects.formats.deepspeed.keys import KEYS
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import convert
from terrazzo.dialects.verbs.emit import to_text
from terrazzo.dialects.verbs.understand import understand


def test_a_key_goes_from_deepspeed_to_terrazzo_and_on_to_torchtitan(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}))
    row = KEYS["gradient_clipping"]
    assert (row.default, row.meaning) == (1.0, "largest global gradient norm; 0: no clipping")

    read = understand(file)
    assert read.dialect.name == "deepspeed"
    assert read.description["training.clip"] == Setting(0.5, "file", "gradient_clipping")
    (verdict,) = (each for each in read.reading.verdicts if each.key == "gradient_clipping")
    assert (verdict.kind, verdict.target) == ("applied", "training.clip")

    conversion = convert(read, dialect("terrazzo"))
    text = to_text(conversion.document, "yaml", read.loaded, conversion.verdicts)
    assert yaml.safe_load(text)["train"]["clip"] == 0.5
    (verdict,) = (each for each in conversion.verdicts if each.key == "gradient_clipping")
    assert (verdict.kind, verdict.target) == ("renamed", "train.clip")

    hub = tmp_path / "train.yaml"
    hub.write_text(text)
    again = understand(hub)
    assert again.description["training.clip"] == Setting(0.5, "file", "train.clip")
    assert convert(again, dialect("torchtitan")).document["training"]["max_norm"] == 0.5
