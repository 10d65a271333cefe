"""Losses of the quickstart's task with optimizer states of fewer bytes, beside other libraries' 8-bit AdamW, on a CPU.

    python -m benchmarks.states run terrazzo-int8 0    # one contender and seed: a line of the record
    python -m benchmarks.states report                 # the table and the figure, from the record

All contenders begin with the same weights and see the same batches; held-out losses are of the same sequences.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import terrazzo as tz
from benchmarks.environment import processor, versions
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from terrazzo.words import DTYPE_FIELDS

FOLDER = Path(__file__).parent / "results" / "states"
RECORD, REPORT, FIGURE = FOLDER / "record.jsonl", FOLDER / "report.md", FOLDER / "losses.svg"
STEPS, WARMUP, BATCH, LENGTH = 250, 25, 4, 128
SETTINGS: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
Parts = tuple[nn.Module, Any]


def _torch(model: nn.Module) -> Parts:
    return model, torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)


def _terrazzo(**dtypes: str) -> Callable[[nn.Module], Parts]:
    def build(model: nn.Module) -> Parts:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return tz.shard(model, _torch(model)[1], "zero1", precision=tz.Precision(**dtypes))  # type: ignore[arg-type]

    return build


def _bitsandbytes(model: nn.Module) -> Parts:
    import bitsandbytes  # type: ignore[import-not-found]

    return model, bitsandbytes.optim.AdamW8bit(model.parameters(), **SETTINGS)


def _torchao(model: nn.Module) -> Parts:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    return model, AdamW8bit(model.parameters(), **SETTINGS)


CONTENDERS: dict[str, Callable[[nn.Module], Parts]] = {
    "torch": _torch,
    "terrazzo-int8": _terrazzo(moments="int8"),
    "terrazzo-fp8": _terrazzo(moments="fp8"),
    "terrazzo-6-bytes": _terrazzo(**dict.fromkeys(DTYPE_FIELDS, "bf16") | {"moments": "int8"}, rounding="stochastic"),
    "terrazzo-8-bytes": _terrazzo(**dict.fromkeys(DTYPE_FIELDS, "bf16") | {"moments": "int8"}, rounding="remainder"),
    "bf16-pure": _terrazzo(**dict.fromkeys(DTYPE_FIELDS, "bf16")),
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def run(name: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train one contender; held-out losses by step."""
    return {"name": name, "seed": seed, **train(CONTENDERS[name], seed, steps)}


def train(build: Callable[[nn.Module], Parts], seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train the model and optimizer that `build` makes of a plain model; held-out losses by step, an update's time."""
    torch.manual_seed(seed)
    model: nn.Module = Decoder(DecoderConfig(256, 256, 4, 4, 2, 688, LENGTH, tie_embeddings=False))
    text, held_out = _text(), _batches(_text(held_out=True), 64, seed=-1)
    model, optimizer = build(model)
    schedule, losses, took = LambdaLR(optimizer, _rate), dict[int, float](), 0.0
    batches, held = _batches(text, BATCH, seed), next(held_out)
    for step in range(1, steps + 1):
        _loss(model, next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        started = time.perf_counter()
        optimizer.step()
        took += time.perf_counter() - started
        optimizer.zero_grad()
        schedule.step()
        if step % 25 == 0 or step == steps:
            with torch.no_grad():
                losses[step] = _loss(model, held).item()
    return {"losses": losses, "update_ms": took / steps * 1e3}


def _rate(step: int) -> float:
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def _text(held_out: bool = False) -> Tensor:
    """Bytes of Python's standard library: the first 4 MB, or what is held out, the next 200 kB."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
    text = torch.frombuffer(data, dtype=torch.uint8)
    return text[4_000_000:4_200_000] if held_out else text[:4_000_000]


def _batches(text: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    while True:
        starts = torch.randint(0, len(text) - LENGTH - 1, (size,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).long()


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


# -- the report ----------------------------------------------------------------------------------------------------


def report(lines: Sequence[dict[str, Any]]) -> str:
    """A table of the record: final losses by seed, their mean against torch's of the same seeds, an update's time."""
    of = {name: {each["seed"]: each for each in lines if each["name"] == name} for name in CONTENDERS}
    seeds = sorted(of["torch"])
    rows = [f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | mean against torch's | update, ms |"]
    rows.append(f"|---|{'---:|' * (len(seeds) + 2)}")
    for name, runs in of.items():
        cells = [f"{_final(runs[seed]):.4f}" if seed in runs else "not run" for seed in seeds]
        if runs:
            change = mean(map(_final, runs.values())) / mean(_final(of["torch"][seed]) for seed in runs) - 1
            timed = [each["update_ms"] for each in runs.values() if each["update_ms"] is not None]
            ms = f"{mean(timed):.0f}" if timed else "the machine was not idle"
            rows.append(f"| {name} | {' | '.join(cells)} | {change:+.2%} | {ms} |")
    installed = {key: value for line in lines for key, value in line["versions"].items() if value != "not installed"}
    where = ", ".join(f"{key} {value}" for key, value in installed.items())
    return "\n".join([*rows, "", f"{lines[-1]['processor']}, one thread; {where}.", ""])


def _final(line: dict[str, Any]) -> float:
    losses: dict[str, float] = line["losses"]
    return losses[str(STEPS)]


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean held-out losses over the steps; SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "terrazzo"  # the same bytes for the same record
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for name in CONTENDERS:
        runs = [each["losses"] for each in lines if each["name"] == name]
        if runs:
            steps = sorted(map(int, runs[0]))
            axes.plot(steps, [mean(each[str(step)] for each in runs) for step in steps], label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="held-out loss, nats per byte, mean of seeds")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """As the command line asks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run", help="train one contender with one seed, and add a line to the record")
    one.add_argument("name", choices=CONTENDERS)
    one.add_argument("seed", type=int)
    verbs.add_parser("report", help="write the table and the figure of the record")
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if asked.verb == "run":
        line = run(asked.name, asked.seed)
        line["versions"] = versions("torch", "bitsandbytes", "torchao")
        line["processor"] = processor()
        with RECORD.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    REPORT.write_text(report(lines))
    draw(lines, FIGURE)


if __name__ == "__main__":
    main()
