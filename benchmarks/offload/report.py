"""What `benchmarks.offload` measured, as Markdown, with every target beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.offload.nvme import floor
from benchmarks.offload.turns import Turns, ratio

FIO = "fio, large pages"


class Target(NamedTuple):
    """A ratio that should be at most or at least `limit`; `value` is None where it was not measured."""

    name: str
    limit: float
    value: float | None
    at_least: bool = False

    def row(self) -> str:
        """Of the table of targets."""
        wanted = f"{'≥' if self.at_least else '≤'} {self.limit:.2f}"
        if self.value is None:
            return f"| {self.name} | {wanted} | not measured | |"
        shown = round(self.value, 2)
        met = shown >= self.limit if self.at_least else shown <= self.limit
        return f"| {self.name} | {wanted} | {shown:.2f} | {'met' if met else '**missed**'} |"


def targets(record: dict[str, Any]) -> list[Target]:
    """Those of the parts that were run."""
    found = {"adam": _adam_targets, "drive": _drive_targets, "nvme": _nvme_targets, "training": _training_targets}
    return [target for part, of in found.items() if part in record for target in of(record[part])]


def _adam_targets(part: dict[str, Any]) -> Iterator[Target]:
    for count, turns in part["turns"].items():
        threads = f"{count} thread{'' if count == '1' else 's'}"
        name = f"AdamW step, {threads}: its speed / "
        own, copied = turns["terrazzo"], turns["terrazzo, copies"]
        yield Target(f"{name}that of memory", 0.85, _over(turns, "bandwidth", own), True)
        yield Target(f"{name}DeepSpeedCPUAdam's", 1.0, _over(turns, "deepspeed", own), True)
        yield Target(f"{name}torchao's way, both with copies", 1.3, _over(turns, "torchao, copies", copied), True)


def _drive_targets(part: dict[str, Any]) -> Iterator[Target]:
    turns = part["turns"]
    for kind in ("read", "write"):
        value = _over(turns, f"{FIO} {kind}", turns[f"terrazzo {kind}"])
        yield Target(f"swap file, {kind}: its speed / fio's", 0.9, value, True)


def _nvme_targets(part: dict[str, Any]) -> Iterator[Target]:
    turns = part["turns"]
    own = turns["terrazzo"]
    yield Target("step from drives / the longer of transfers and AdamW", 1.15, ratio(own, floor(turns)))
    for name, label in (("deepspeed, tuned", "tuned"), ("deepspeed", "its defaults")):
        value = ratio(own, turns[name]) if name in turns else None
        yield Target(f"step from drives / ZeRO-Infinity, {label}", 0.6, value)


def _training_targets(parts: dict[str, Any]) -> Iterator[Target]:
    for name, part in parts.items():
        turns = part["turns"]
        if name.startswith("normal"):
            yield Target(f"{name}: `zero3@cpu` / `zero3`", 1.02, ratio(turns["cpu, overlapped"], turns["device"]))


def _over(turns: Turns, other: str, own: Sequence[float]) -> float | None:
    """How many times as fast `own` is."""
    return ratio(turns[other], own) if other in turns else None


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    found = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        "# Offload\n",
        f"{record['date']}, {record['processor']}, {record['disk']}; {found}. `{record['command']}`.\n",
        "| target | limit | measured | |",
        "|---|--:|--:|---|",
        *(target.row() for target in targets(record)),
        "",
        HOW,
    ]
    sections = {"adam": _adam, "drive": _drive, "nvme": _nvme, "training": _training}
    for part, section in sections.items():
        if part in record:
            lines += ["", *section(record[part])]
    return "\n".join(lines) + "\n"


HOW = """Contenders take turns in random order. Times are medians, ratios are medians of the ratios within each round.
The machine is a shared one: rounds in which other processes take more than 0.15 of a core are repeated, and the
quietest are kept."""


def _adam(part: dict[str, Any]) -> Iterator[str]:
    yield "## AdamW on the CPU\n"
    yield (
        f"{part['numel'] / 1e6:.1f} M fp32 elements, {28 * part['numel'] / 2**20:,.0f} MiB moved by a step. Bandwidth"
        " is that of reading 16 and writing 12 bytes per element in place with one addition or change of sign each."
        " torchao's own class refuses a machine without a GPU; its way is one optimizer per tensor, whose gradient is"
        " copied in before and whose weight is copied out after."
    )
    yield from _notes(part)
    yield from ("", "| threads | | ms | min to max | Gparam/s | GB/s | speed / bandwidth |", "|---|---|" + "--:|" * 5)
    for count, turns in part["turns"].items():
        for name, taken in turns.items():
            middle = median(taken)
            moved = "" if "copies" in name else f"{28e-9 * part['numel'] / middle:.0f}"
            share = ratio(turns["bandwidth"], taken)
            rate = f"{part['numel'] / middle / 1e9:.2f} | {moved} | {share:.2f}"
            yield f"| {count} | {name} | {1e3 * middle:.1f} | {_spread(taken, 1e3, 1)} | {rate} |"


def _drive(part: dict[str, Any]) -> Iterator[str]:
    size = part["effort"]["size_bytes"]
    way = "past the page cache (O_DIRECT)" if part["direct"] else "through the page cache: O_DIRECT was refused"
    yield "## Swap files\n"
    yield (
        f"{size >> 20} MiB at a time, {part['depth']} blocks of {part['block_bytes'] >> 20} MiB in flight, {way}, all"
        " on one file. fio uses libaio; with large pages its memory is like the engine's."
    )
    yield from _notes(part)
    yield from ("", "| | GB/s | min to max | Terrazzo's speed / its |", "|---|--:|--:|--:|")
    for name, taken in part["turns"].items():
        rates = [size / second / 1e9 for second in taken]
        own = ratio(taken, part["turns"][f"terrazzo {name.split()[-1]}"])
        yield f"| {name} | {median(rates):.2f} | {_spread(rates, 1, 2)} | {own:.2f} |"


def _nvme(part: dict[str, Any]) -> Iterator[str]:
    turns, numel = part["turns"], part["numel"]
    read, written = (count / numel for count in part["step_device_bytes"])
    yield "## Step from drives\n"
    yield (
        f"{part['about']}; master weights and moments in files, gradients in memory, one rank with"
        f" {part['effort']['threads']} threads. By the kernel's count a step of Terrazzo reads {read:.1f} bytes per"
        f" parameter from the disk and writes {written:.1f}: nothing comes from the page cache. DeepSpeed also keeps"
        " gradients in files. A step is the whole of `optimizer.step()`."
    )
    yield from _notes(part)
    yield from ("", "| | ms | min to max | Terrazzo's time / its |", "|---|--:|--:|--:|")
    for name, taken in {**turns, "transfers or AdamW": floor(turns)}.items():
        own = ratio(turns["terrazzo"], taken)
        yield f"| {name} | {1e3 * median(taken):.0f} | {_spread(taken, 1e3, 0)} | {own:.2f} |"


def _training(parts: dict[str, Any]) -> Iterator[str]:
    yield "## Whole steps\n"
    yield (
        "gloo ranks of one thread each, the update on a second thread of the same process; steps in the steady state,"
        " where an update left for the next forward is part of the next step. `per tensor` is torchao's way."
    )
    yield from ("", "| | | ms | min to max | / device |", "|---|---|--:|--:|--:|")
    for name, part in parts.items():
        turns = part["turns"]
        for contender, taken in turns.items():
            own = ratio(taken, turns["device"])
            middle = f"{1e3 * median(taken):.0f} | {_spread(taken, 1e3, 0)} | {own:.2f}"
            yield f"| {name} | {contender} | {middle} |"
    yield ""
    for name, part in parts.items():
        yield f"- {name}: {part['about']}; {part['rounds']} turns, others on up to {max(part['others']):.2f} cores."


def _notes(part: dict[str, Any]) -> Iterator[str]:
    yield f"Other processes took up to {max(part['others']):.2f} cores in a round."
    yield from (f"\nNot run: {name} ({why})." for name, why in part["missing"].items())


def _spread(values: Sequence[float], scale: float, digits: int) -> str:
    return f"{scale * min(values):.{digits}f} to {scale * max(values):.{digits}f}"
