"""Examples that no test of an integration runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers import programs

pytestmark = pytest.mark.processes
IMAGES = str(Path(__file__).parents[1] / "examples" / "images.py")


def test_images_are_learnt_from_a_folder_and_training_goes_on(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    for index in range(16):
        pixels = np.full((20, 24, 3), drawn.integers(0, 256, 3), dtype=np.uint8)
        path = tmp_path / "images" / f"{index % 2}" / (f"{index}.png" if index % 3 else f"{index}.JPG")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    words = [IMAGES, "--batch", "2"]
    ranks = programs.on_ranks(2, *words, "--epochs", "4", cwd=tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    first = re.search(r"epoch 4 \| loss (\S+)$", "".join(rank.stdout for rank in ranks), re.MULTILINE)
    alone = programs.on_ranks(1, *words, "--epochs", "8", "--plan", "zero1", "--workers", "1", cwd=tmp_path)[0]
    assert alone.returncode == 0, alone.stderr
    second = re.search(r"\Aepoch 8 \| loss (\S+)$", alone.stdout, re.MULTILINE)
    assert first is not None and second is not None
    assert float(second[1]) < float(first[1]) < 2.5
    assert sorted(path.name for path in (tmp_path / "runs/images").glob("step-*")) == ["step-00000004", "step-00000008"]
    with Image.open(tmp_path / "runs/images/samples.png") as samples:
        assert samples.size == (8 * 16 * 4, 16 * 4)
        assert np.asarray(samples).std() > 1


def test_too_few_images_are_told(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "one.png")
    alone = programs.on_ranks(1, IMAGES, "--batch", "2", cwd=tmp_path)[0]
    assert (alone.returncode, alone.stdout) == (1, "")
    assert "images has 1 images, and a step takes more: give a smaller --batch." in alone.stderr
