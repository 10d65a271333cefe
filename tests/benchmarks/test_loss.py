"""What the table of losses beside all logits says, and that the contenders have the same loss."""

from __future__ import annotations

import pytest
import torch

from benchmarks.loss import installed, measure, table


def test_ratios_are_medians_within_turns() -> None:
    turns = [
        {"all logits": {"cpu_s": 1.0, "peak_mb": 300.0}, "here": {"cpu_s": 0.5, "peak_mb": 30.0}},
        {"all logits": {"cpu_s": 4.0, "peak_mb": 300.0}, "here": {"cpu_s": 3.0, "peak_mb": 15.0}},
        {"all logits": {"cpu_s": 2.0, "peak_mb": 300.0}, "here": {"cpu_s": 2.0, "peak_mb": 30.0}},
    ]
    assert table(turns, (1024, 64, 2048)) == [
        "| 1,024 × 64 × 2,048 | all logits | 2.00 | 1.00 | 300 | 1.000 |",
        "| 1,024 × 64 × 2,048 | here | 2.00 | 0.75 | 30 | 0.100 |",
    ]


def test_what_is_installed_has_one_loss() -> None:
    losses = [measure(name, (256, 16, 300), torch.float32)["loss"] for name in installed()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
