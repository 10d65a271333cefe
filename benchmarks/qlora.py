"""Adapters on a base in 32 bits and in 4: held-out losses over seeds, and the time of a step, on a CPU.

    python -m benchmarks.qlora pretrain    # once: a base on Python's standard library, in /tmp
    python -m benchmarks.qlora run 0       # one seed, each form of the base: lines of the record
    python -m benchmarks.qlora time        # a step of wider layers: a line of the record
    python -m benchmarks.qlora report      # the table, from the record

The base is trained on code, and adapters on this project's documentation, of which every eighth page is held out.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from benchmarks.environment import processor, versions
from benchmarks.states import BATCH, LENGTH, STEPS, _batches, _loss, _text
from terrazzo.train.model.decoder import Decoder, DecoderConfig

FOLDER = Path(__file__).parent / "results" / "qlora"
RECORD, REPORT = FOLDER / "record.jsonl", FOLDER / "report.md"
BASE = Path(tempfile.gettempdir()) / "terrazzo-qlora-base.pt"
FORMS = {"fp32": None, "nf4": "nf4", "nf4-double": "nf4-double"}
RANK, ADAPTED = 8, 80
"""Of the adapters, and the steps that these are trained for."""


class Adapted(nn.Module):
    """A frozen linear layer and a product of two small matrices beside it, which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        beside: Tensor = self.up(self.down(x))
        base: Tensor = self.base(x)
        return base + 2 * beside


def adapted(model: nn.Module) -> nn.Module:
    """With adapters beside the linear layers of all blocks, and all else frozen."""
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                    setattr(module, name, Adapted(child))
    return model


def sharded(model: nn.Module, form: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On one rank, under zero3."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    precision = tz.Precision(frozen=form)  # type: ignore[arg-type]
    return tz.shard(model, optimizer, "zero3", precision=precision)


def pretrain() -> None:
    """Train the base in fp32, and keep it."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(256, 256, 4, 4, 2, 688, LENGTH, tie_embeddings=False))
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True), _batches(_text(), BATCH, 0)
    for _ in range(STEPS):
        _loss(model, next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model, BASE)


def run(seed: int) -> list[dict[str, Any]]:
    """Adapters on each form of the base; held-out losses before and after."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    learnt, held_out = (
        torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in part)), dtype=torch.uint8)
        for part in ([page for place, page in enumerate(pages) if place % 8], pages[::8])
    )
    held, lines = next(_batches(held_out, 64, -1)), []
    for name, form in FORMS.items():
        torch.manual_seed(seed)
        model, optimizer = sharded(adapted(torch.load(BASE, weights_only=False)), form)
        batches, losses = _batches(learnt, BATCH, seed), {}
        for step in range(ADAPTED + 1):
            if step in (0, ADAPTED):
                with torch.no_grad():
                    losses[step] = _loss(model, held).item()
            if step < ADAPTED:
                _loss(model, next(batches)).backward()
                optimizer.step()
                optimizer.zero_grad()
        lines.append({"kind": "loss", "name": name, "seed": seed, "before": losses[0], "after": losses[ADAPTED]})
    return lines


def timed(tokens: int, width: int = 1024, steps: int = 3) -> list[dict[str, Any]]:
    """Seconds of a step, the quickest of some, in layers of that width."""
    base = Decoder(DecoderConfig(256, width, 2, 8, 8, 2752, 256, tie_embeddings=False))
    parts = {name: sharded(adapted(copy.deepcopy(base)), form) for name, form in FORMS.items()}
    batch, took = torch.randint(0, 256, (tokens // 256, 257)), {name: list[float]() for name in FORMS}
    for _ in range(steps):
        for name, (model, optimizer) in parts.items():
            started = time.perf_counter()
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            took[name].append(time.perf_counter() - started)
    return [
        {"kind": "time", "name": name, "tokens": tokens, "width": width, "step_s": min(each)}
        for name, each in took.items()
    ]


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Losses by seed and their mean, and the time of a step against that of a base in fp32."""
    losses = [line for line in lines if line["kind"] == "loss"]
    seeds = sorted({line["seed"] for line in losses})
    rows = [
        f"| base | before | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        "|---|" + "--:|" * (len(seeds) + 2),
    ]
    for name in FORMS:
        runs = {line["seed"]: line for line in losses if line["name"] == name}
        after = [runs[seed]["after"] for seed in seeds]
        cells = [f"{mean(run['before'] for run in runs.values()):.4f}", *(f"{each:.4f}" for each in after)]
        rows.append(f"| {name} | {' | '.join(cells)} | {mean(after):.4f} |")
    rows += ["", "| base | tokens of a step | width | step, s | of fp32's |", "|---|--:|--:|--:|--:|"]
    times = {(line["tokens"], line["name"]): line for line in lines if line["kind"] == "time"}
    for (tokens, name), line in sorted(times.items()):
        share = line["step_s"] / times[tokens, "fp32"]["step_s"]
        rows.append(f"| {name} | {tokens:,} | {line['width']} | {line['step_s']:.2f} | {share:.2f} |")
    where = ", ".join(f"{key} {value}" for key, value in lines[-1]["versions"].items())
    return "\n".join([*rows, "", f"{lines[-1]['processor']}, one thread; {where}.", ""])


def main() -> None:
    """As the command line asks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("pretrain", help="train the base")
    verbs.add_parser("run", help="adapters with one seed").add_argument("seed", type=int)
    verbs.add_parser("time", help="time of a step")
    verbs.add_parser("report", help="write the table of the record")
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if asked.verb == "pretrain":
        pretrain()
        return
    if asked.verb == "report":
        REPORT.write_text(report([json.loads(line) for line in RECORD.read_text().splitlines()]))
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    lines = run(asked.seed) if asked.verb == "run" else [*timed(256), *timed(2048)]
    with RECORD.open("a") as file:
        file.writelines(
            json.dumps({**line, "versions": versions("torch"), "processor": processor()}) + "\n" for line in lines
        )


if __name__ == "__main__":
    main()
