"""`terrazzo train` with Muon: what it updates whole and says so, what that takes, and that a run goes on anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terrazzo.checkpoint import latest, open_source
from terrazzo.config import Config, OptimizerConfig
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.planner.memory.matrices import matrix_updates
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.preflight import check
from terrazzo.train.session.build_session import _division_notes, open_session
from terrazzo.train.settings.optimizer import build_optimizer, check_names
from tests.helpers.threads import run_in_threads
from tests.train.test_session import StopAfter, config_in

MUON: dict[str, Any] = {"name": "Muon", "lr": 0.003, "muon": {"ns_steps": 3, "weight_decay": 0.2}}


def trained(config: Config, ranks: int, stop_after: int | None = None) -> list[str]:
    """Steps of a run; what it said of its optimizer, and as promised of what it sends and holds."""

    def body(rank: int) -> list[str]:
        session = open_session(config, Ranks(rank, ranks, torch.device("cpu")))
        trainer = TrainingLoop(session, StopAfter(stop_after))
        try:
            trainer.run()
            return [note for note in session.notes if note.startswith("optimizer")]
        finally:
            trainer.session.loader.close()
            trainer.report.leave()

    return run_in_threads(ranks, body)[0]


def state(folder: Path) -> dict[tuple[str, str], Tensor]:
    source = open_source(latest(folder / "run" / "checkpoints") or "")
    return {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


def test_a_run_goes_on_under_another_plan_and_number_of_ranks(tmp_path: Path) -> None:
    def config(folder: str, plan: str, steps: int = 4) -> Config:
        (tmp_path / folder).mkdir(exist_ok=True)
        batch = {"global_batch": 2, "micro_batch": 1, "sequence_length": 16}
        schedule = {"name": "constant"}
        sections = {"plan": {"name": plan}, "optimizer": MUON, "batch": batch, "schedule": schedule}
        return config_in(tmp_path / folder, train={"steps": steps, "sample_tokens": 0}, **sections)

    notes = trained(config("whole", "zero3"), 1)
    assert notes[0].startswith("optimizer: Muon: 7 matrices, ")
    assert notes[1].startswith("optimizer: AdamW: 1 table that is looked up, and what is tied to it, ")
    trained(config("parts", "zero1"), 1, stop_after=2)
    trained(config("parts", "zero3"), 1)
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert ("blocks.0.attention.query.weight", "momentum_buffer") in whole
    assert ("embedding.weight", "exp_avg_sq") in whole
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    trained(config("wider", "zero2"), 1, stop_after=2)
    trained(config("wider", "zero3"), 2)  # whose gradients are summed in another order
    wider = state(tmp_path / "wider")
    for key, value in whole.items():
        torch.testing.assert_close(wider[key], value, rtol=2e-2, atol=2e-4)


def test_where_there_are_two_rates_the_header_says_which_one_the_table_has(tmp_path: Path) -> None:
    both = config_in(tmp_path, optimizer={**MUON, "muon": {"lr": 0.02}})
    *_, line = _division_notes(both, nn.Linear(2, 2))
    assert line == "optimizer: the column lr is of Muon, up to 2.0e-02; AdamW's is 0.15 times that"
    assert "column" not in " ".join(_division_notes(config_in(tmp_path, optimizer=MUON), nn.Linear(2, 2)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(5, 6), nn.Linear(6, 9), nn.Linear(9, 5)
        self.mine = nn.Parameter(torch.randn(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.up(self.table(x)) @ self.mine)
        return out


def test_the_steps_are_those_of_torchs_muon_and_adamw() -> None:
    torch.manual_seed(0)
    ours, plain = Small(), Small()
    plain.load_state_dict(ours.state_dict())
    muon = {"lr": 0.02, "momentum": 0.9, "adjust_lr": "original", "matrices": ["mine"], "nesterov": False}
    config = OptimizerConfig(name="Muon", lr=0.01, weight_decay=0.1, muon=muon, options={"betas": [0.8, 0.9]})  # type: ignore[arg-type]
    optimizer = build_optimizer(config, ours)
    matrices, others = [plain.up.weight, plain.mine], [plain.table.weight, plain.head.weight]
    vectors = [plain.up.bias, plain.head.bias]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    two = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.9, nesterov=False, weight_decay=0.1),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    ]
    for step in range(3):
        tokens = torch.randint(0, 5, (4,), generator=torch.Generator().manual_seed(step))
        for model in (ours, plain):
            nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        for each in two:
            each.step()
            each.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("plan", ["zero3", "zero3@cpu"])
def test_what_is_promised_is_what_the_engine_counts(tmp_path: Path, plan: str) -> None:
    config = config_in(tmp_path, plan={"name": plan}, optimizer=MUON)
    setup = setup_of(config, 2)

    def body(rank: int) -> tuple[int, int]:
        session = open_session(config, Ranks(rank, 2, torch.device("cpu")))
        try:
            engine = engine_of(session.model)
            moments = engine.bill.host_bytes if "@" in plan else engine.bill.moments_bytes
            return engine.promise.traffic().bytes["all_to_all"], moments
        finally:
            session.loader.close()
            session.close()

    sent, moments = run_in_threads(2, body)[0]
    assert sum(each.sent_bytes for each in matrix_updates(setup, 0).exchanged) == sent > 0
    assert setup.optimizer.matrices.iterations == 3
    assert moments > 0


@pytest.mark.parametrize("key", ["matrices", "others"])
def test_a_name_that_nothing_has_is_refused(tmp_path: Path, key: str) -> None:
    config = config_in(tmp_path, optimizer={**MUON, "muon": {key: ["*.keys.weight"]}})
    with pytest.raises(BadInput, match=rf"optimizer\.muon\.{key} has '\*\.keys\.weight'"):
        check(config, 1)
    check_names(OptimizerConfig(name="Muon"), ["a"])
