"""What was promised of a run beside what was measured, at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.engine import engine_of
from terrazzo.planner import Estimate
from terrazzo.planner.traffic.volumes import expected_rows_bytes
from terrazzo.train.planning.run_estimate import estimate_run, exchanges_of
from terrazzo.train.session.session import Session

__all__ = ["Pace", "SentBytes", "bytes_line", "summarize", "summary_lines", "utilisation"]

MIB, GB = 2**20, 1e9
TRAFFIC = ("read_bytes", "written_bytes", "read_s", "write_s")
UPDATES = ("stepped_numel", "step_s")
"""Keys of `Store.usage`, counted since the start: what drives have moved, and what was updated on the CPU."""

ROUTED = "ep all_to_all"
NOT_PROMISED = ("control", ROUTED)
"""Kinds of traffic that are not known before: a few bytes of flags and norms, and rows for other ranks' experts."""
EXCHANGES = ("tp", "cp", "send")
"""How the names begin of what `exchanges_of` has: along tp and cp, and from stage to stage. Not promised where it is
None."""

WHOLE = 0.995
"""From this share of places learnt, a run counts as learning all: the last sequence of an epoch may be short."""


@dataclass
class Pace:
    """Steps, tokens over all ranks, and seconds of log steps. The first log step counts only while it is the only one.

    It includes what is done once: memory is allocated, and kernels are chosen or compiled.

    Attributes:
        seconds_in_all: of all log steps, the first included.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    seconds_in_all: float = 0.0
    _alone: bool = True

    def add(self, steps: int, tokens: int, seconds: float) -> None:
        """One more log step."""
        self.seconds_in_all += seconds
        if self._alone and self.steps:
            self.steps, self.tokens, self.seconds, self._alone = 0, 0, 0.0, False
        self.steps, self.tokens, self.seconds = self.steps + steps, self.tokens + tokens, self.seconds + seconds


class SentBytes:
    """Bytes that this rank has sent, as `Traffic.by_name`. Without groups that train by themselves a round is a step.

    Attributes:
        step, round: in the newest step, and in the newest round that has ended.
    """

    def __init__(self) -> None:
        self.step: Mapping[str, int] = {}
        self.round: Mapping[str, int] = {}
        self._begun = Counter[str]()

    def add(self, sent: Mapping[str, int], *, ends_round: bool) -> None:
        """One more step."""
        self.step = sent
        self._begun.update(sent)
        if ends_round:
            self.round, self._begun = self._begun, Counter()


def summarize(
    session: Session, sent: SentBytes, pace: Pace, peak_bytes: int, peak_flops: float | None
) -> dict[str, Any]:
    """Promised and measured, on this rank; None where something is not known. Traffic is that of the newest step, and
    of the newest round of `round_steps`.

    Args:
        peak_bytes: the highest memory use, as `PeakMemory` has it.
        peak_flops: of the device, for MFU.
    """
    engine = engine_of(session.model)
    bill = engine.promise.memory(session.micro_batches)
    promise, round_steps = engine.promise, engine.promise.round_steps
    in_step = Counter(promise.traffic(session.micro_batches, ends_round=True).bytes)
    in_round = Counter(promise.round_traffic(session.micro_batches).bytes)
    usage = engine.store.usage()
    estimate, why = _promise(session)
    exchanges = exchanges_of(session.config, estimate.setup, session.ranks.rank) if estimate else None
    for kind, count in (exchanges or {}).items():
        in_step[kind] += count
        in_round[kind] += count * round_steps
    kinds = [kind for kind in in_round | Counter(sent.round) | Counter(sent.step) if kind not in NOT_PROMISED]

    def promised(counts: Counter[str]) -> dict[str, int | None]:
        unknown = EXCHANGES if exchanges is None else ()
        return {kind: None if kind.partition(" ")[0] in unknown else counts[kind] for kind in kinds}

    return {
        "state_bytes_promised": bill.total_bytes - bill.grad_bytes - bill.transient_bytes,
        "state_bytes_measured": engine.state_bytes(),
        "transient_bytes_promised": bill.transient_bytes,
        "transient_bytes_measured": engine.peak_transient_bytes,
        "host_bytes_promised": bill.host_bytes,
        "host_bytes_measured": usage["host_bytes"],
        "disk_bytes_promised": bill.disk_bytes,
        "disk_bytes_measured": usage["disk_bytes"],
        "pinned_bytes": usage["pinned_bytes"],
        "offload": {name: usage[name] for name in (*TRAFFIC, *UPDATES)},
        "traffic_bytes_promised": promised(in_step),
        "traffic_bytes_measured": {kind: sent.step.get(kind, 0) for kind in kinds},
        "round_steps": round_steps,
        "round_traffic_bytes_promised": promised(in_round),
        "round_traffic_bytes_measured": {kind: sent.round.get(kind, 0) for kind in kinds},
        "routed_bytes_if_even": expected_rows_bytes(estimate.setup) if estimate else None,
        "routed_bytes_measured": sent.step.get(ROUTED, 0),
        "peak_memory_bytes_promised": round(estimate.memory.near_bytes) if estimate else None,
        "peak_memory_bytes_measured": max(0, peak_bytes - session.base_bytes),
        "base_memory_bytes": session.base_bytes,
        **_promised_pace(estimate, session.ranks.world_size),
        **_measured_pace(session, pace, peak_flops),
        "no_promise": why,
    }


def _promise(session: Session) -> tuple[Estimate | None, str]:
    """The planner's estimate, or why there is none."""
    try:
        estimate = estimate_run(session.config, session.ranks.world_size)
    except Exception as error:  # anything: a promise that cannot be made must not end a run that has been made
        return None, f"no promise: {' '.join(str(error).split()) or type(error).__name__}"
    return estimate, estimate.no_time


def _promised_pace(estimate: Estimate | None, world_size: int) -> dict[str, Any]:
    time = estimate.time if estimate else None
    return {
        "step_s_promised": time.step_s if time else None,
        "tokens_per_s_promised": time.tokens_per_s_per_gpu * world_size if time else None,
        "mfu_promised": time.mfu if time else None,
        "calibrated": bool(time and time.calibrated),
    }


def _measured_pace(session: Session, pace: Pace, peak_flops: float | None) -> dict[str, Any]:
    if not pace.steps:
        return dict.fromkeys(("step_s_measured", "tokens_per_s_measured", "mfu_measured", "learnt_share"))
    return {
        "step_s_measured": pace.seconds / pace.steps,
        "tokens_per_s_measured": pace.tokens / pace.seconds,
        "mfu_measured": utilisation(session.flops_per_s(pace.steps, pace.seconds), None, peak_flops)["mfu"],
        "learnt_share": pace.tokens / (pace.steps * session.places_per_step(empty=False)),
    }


def utilisation(flops_per_s: float, executed: float | None, peak_flops: float | None) -> dict[str, float | None]:
    """Shares of a device's peak from 0 to 1, None where they are not known: `mfu` of the model's own FLOPs, and `hfu`.

    Args:
        executed: what is computed in their place, recomputation included, as a multiple.
    """
    mfu = flops_per_s / peak_flops if flops_per_s and peak_flops else None
    return {"mfu": mfu, "hfu": mfu * executed if mfu and executed else None}


def bytes_line(summary: Mapping[str, Any]) -> str:
    """The measured bytes of all that is promised to the byte, with the promise where it differs."""
    keys = {"states": "state_bytes", "transient": "transient_bytes", "host": "host_bytes", "files": "disk_bytes"}
    pairs = {name: (summary[f"{key}_promised"], summary[f"{key}_measured"]) for name, key in keys.items()}
    for name, sent in _sent(summary).items():
        known = [(promised, measured) for promised, measured in sent.values() if promised is not None]
        pairs[f"sent {name}"] = tuple(sum(counts) for counts in zip((0, 0), *known, strict=True))
    parts, is_as_promised = [], True
    for name, (promised, measured) in pairs.items():
        if promised or measured or name == "states":
            is_as_promised = is_as_promised and promised == measured
            other = "" if promised == measured else f" (promised {_mib(promised)})"
            parts.append(f"{name} {_mib(measured)}{other}")
    return f"{', '.join(parts).replace(' MiB,', ',')}{', as promised' if is_as_promised else ''}"


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary as lines to read."""
    lines = [_both(summary, "states", "state_bytes"), _both(summary, "transient peak", "transient_bytes")]
    lines += _offload_lines(summary)
    for name, sent in _sent(summary).items():
        for kind, (promised, measured) in sent.items():
            lines.append(f"{kind.replace('_', '-')} {name}: promised {_mib(promised)}, measured {_mib(measured)}")
    if summary["routed_bytes_measured"]:
        even, routed = (_mib(summary[f"routed_bytes_{which}"]) for which in ("if_even", "measured"))
        lines.append(f"to experts of other ranks and back per step: {even} if all were as busy, measured {routed}")
    return [*lines, _peak_line(summary), _pace_line(summary)]


def _sent(summary: Mapping[str, Any]) -> dict[str, dict[str, tuple[float | None, float]]]:
    """Bytes promised, None: not known, and measured, by kind: per step, or on average and where groups meet."""
    steps = summary["round_steps"]

    def by_kind(key: str, share: int) -> dict[str, tuple[float | None, float]]:
        promised, measured = (summary[f"{key}_{which}"] for which in ("promised", "measured"))
        return {
            kind: (None if sent is None else sent / share, measured[kind] / share) for kind, sent in promised.items()
        }

    in_step = by_kind("traffic_bytes", 1)
    if steps == 1:
        return {"per step": in_step}
    return {"per step on average": by_kind("round_traffic_bytes", steps), "where groups meet": in_step}


def _offload_lines(summary: Mapping[str, Any]) -> list[str]:
    """Lines on offload: host memory and swap files, the speed of drives, and of updates on the CPU."""
    usage, lines = summary["offload"], []
    if summary["host_bytes_promised"]:
        lines.append(_both(summary, "host memory", "host_bytes"))
    if summary["disk_bytes_promised"]:
        lines.append(_both(summary, "swap files, of this rank", "disk_bytes"))
        moved = [("read", "read_bytes", "read_s"), ("wrote", "written_bytes", "write_s")]
        rates = [f"{verb} {usage[n] / GB:.2f} GB at {_rate_text(usage[n], usage[s])} GB/s" for verb, n, s in moved]
        lines.append(f"disk, of this rank: {', '.join(rates)}")
    if usage["stepped_numel"]:
        rate = _rate_text(usage["stepped_numel"], usage["step_s"])
        lines.append(f"optimizer step on the CPU: {rate} G parameters/s")
    return lines


def _rate_text(amount: float, seconds: float) -> str:
    """A rate in 1e9 per second; n/a if nothing was counted."""
    return f"{amount / seconds / GB:.2f}" if seconds else "n/a"


def _both(summary: Mapping[str, Any], name: str, key: str) -> str:
    return f"{name}: promised {_mib(summary[f'{key}_promised'])}, measured {_mib(summary[f'{key}_measured'])}"


def _peak_line(summary: Mapping[str, Any]) -> str:
    line = _both(summary, "peak memory", "peak_memory_bytes")
    if summary["base_memory_bytes"]:  # on a CPU
        line += (
            f" beyond the {_mib(summary['base_memory_bytes'])} of the program itself; the promise counts tensors,"
            " what is measured also what libraries and malloc keep"
        )
    return line


def _pace_line(summary: Mapping[str, Any]) -> str:
    promised, measured = (_pace(summary, which) for which in ("promised", "measured"))
    if summary["calibrated"]:
        promised += " (calibrated)"
    elif summary["step_s_promised"] is None:
        promised = f"n/a ({summary['no_promise'] or 'not known'})"
    share = summary["learnt_share"]
    if share is not None and share < WHOLE:
        measured += f" (tokens learnt; {share:.0%} of the positions in sequences, which the promise counts)"
    return f"pace: promised {promised}, measured {measured}"


def _pace(summary: Mapping[str, Any], which: str) -> str:
    step_s, tokens, mfu = (summary[f"{name}_{which}"] for name in ("step_s", "tokens_per_s", "mfu"))
    if step_s is None:
        return "n/a"
    return f"{step_s:.3g} s per step, {tokens:,.0f} tok/s, MFU {f'{mfu:.1%}' if mfu is not None else 'n/a'}"


def _mib(count_bytes: float | None) -> str:
    return "n/a" if count_bytes is None else f"{count_bytes / MIB:.2f} MiB"
