"""Muon, measured on a CPU: a step and its memory beside torch's Muon in DDP, and losses beside AdamW.

    python -m benchmarks.muon steps     # on 2 and on 4 ranks: contenders step in turn
    python -m benchmarks.muon losses    # of the quickstart's task, three seeds each

In DDP each rank updates every matrix; behind `tz.shard` each is updated on one rank. Both have the same losses. Losses
beside AdamW are those of `benchmarks.states`, with AdamW's rate for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from torch import nn

import terrazzo as tz
from benchmarks import states
from benchmarks.cpu.cases import CASES
from benchmarks.cpu.compare import Effort, take_turns
from benchmarks.cpu.outcome import Outcome, disagreements

CASE, PEER, OWN = "muon", "ddp-muon", ("terrazzo-zero1-muon", "terrazzo-zero3-muon")
SEEDS = (0, 1, 2)
LOSS_TOLERANCE = 1e-4


def steps_table(outcomes: Mapping[int, Sequence[Outcome]]) -> str:
    """As Markdown: medians over turns, of the slowest rank; ratios are medians within turns.

    Args:
        outcomes: by the number of ranks.
    """
    rows = [
        "| ranks | | step ms | × DDP | CPU ms of a rank | peak MB of a rank | × DDP | sent MB |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for ranks, group in outcomes.items():
        peer = next(each for each in group if each.contender == PEER)
        for own in group:
            ratio = median(a / b for a, b in zip(own.round_s(), peer.round_s(), strict=True))
            cells = [
                str(ranks),
                own.contender.removeprefix("terrazzo-").removesuffix("-muon"),
                f"{1e3 * median(own.round_s()):.0f}",
                f"{ratio:.2f}",
                f"{1e3 * own.cpu_s():.0f}",
                f"{own.training_peak_bytes / 1e6:.0f}",
                f"{own.training_peak_bytes / peer.training_peak_bytes:.2f}",
                f"{own.sent_bytes / 1e6:.1f}" if own is not peer else "",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def losses_table(losses: Mapping[str, Sequence[float]]) -> str:
    """As Markdown: held-out losses after the last step, by optimizer and seed, and their mean."""
    rows = [f"| | {' | '.join(f'seed {seed}' for seed in SEEDS)} | mean |", f"|---|{'--:|' * (len(SEEDS) + 1)}"]
    rows += [
        f"| {name} | {' | '.join(f'{each:.4f}' for each in found)} | {mean(found):.4f} |"
        for name, found in losses.items()
    ]
    return "\n".join(rows)


def _muon(model: nn.Module) -> tuple[nn.Module, Any]:
    settings = {key: states.SETTINGS[key] for key in ("lr", "weight_decay")}
    matrices, others = tz.optim.hidden_matrices(model)
    kind = {**settings, "adjust_lr_fn": "match_rms_adamw"}
    return model, tz.optim.Muon(matrices, others, **kind, adamw={**states.SETTINGS, "fused": True})


def main() -> None:
    """As the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["steps", "losses"])
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.verb == "losses":
        built = {"AdamW": states.CONTENDERS["torch"], "Muon": _muon}
        trained = {name: [states.train(build, seed) for seed in SEEDS] for name, build in built.items()}
        last = {name: [found["losses"][states.STEPS] for found in runs] for name, runs in trained.items()}
        print(losses_table(last))
        return
    outcomes = {ranks: take_turns(CASE, [PEER, *OWN], Effort(rounds=arguments.turns, ranks=ranks)) for ranks in (2, 4)}
    print(f"{CASES[CASE].describe()}.\n\n{steps_table(outcomes)}")
    for ranks, group in outcomes.items():
        for words in disagreements(group, LOSS_TOLERANCE):
            print(f"{ranks} ranks: {words}")


if __name__ == "__main__":
    main()
