"""What bounds the step of a run, in one sentence, with the number and the edit that would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from terrazzo.telemetry.log.records import mean_of, mean_over_steps, of_these_ranks
from terrazzo.telemetry.log.step_record import StepRecord
from terrazzo.telemetry.steps.step_recorder import CAUSE_OF_KIND, PHASES
from terrazzo.telemetry.verdict.bounds import BOUNDS
from terrazzo.telemetry.verdict.edits import Admits, Advice, edit_for

__all__ = ["Verdict", "verdict_of"]

LEAST_SHARE = 0.05
"""A cause with a smaller share of the step is not said to bound it."""

MUCH = 0.15
"""A cause with a smaller share is only the largest beside compute, which is most of the step, and is called so."""

SPREADS = 3
"""A cause must take at least so many times its own median deviation over records, or it is too uneven to be named."""

ENOUGH = 4
"""Records from which a median deviation is known."""

FEW_STEPS = 10
"""Within fewer steps an evaluation or a save says nothing about a run: it may be the one that every run ends with."""

ONE_RANK = 0.8
"""A rank is named if it explains this share of the waits for late ranks, and is last in this share of the records."""

STARVED = 0.8
"""A device that has nothing to do at this share of the looks at it waits for the host."""

_ACTIVATIONS = ("tp", "cp", "ep", "pp")
"""Axes along which activations are exchanged."""

_BETWEEN = tuple(name for name, row in BOUNDS.items() if row.kind == "between")
"""Causes between steps. If they were gone, so would be what ranks wait for each other in them."""

_PERIOD_OF = {"evaluate": ("train", "eval_every"), "save": ("checkpoint", "every")}
"""The setting of how often it comes, where null is: only at the end."""

_PARTS = (*(name for name, row in BOUNDS.items() if row.kind == "part"), *_BETWEEN)
"""Causes that records have as one number each, not by axis or by rank."""


@dataclass(frozen=True)
class Verdict:
    """What bounds a step.

    Attributes:
        bound: a cause in step records; `late_rank` for one rank that all others wait for; on CUDA, where compute and
            exchanges are not told apart, `device`, or `host` if the device mostly has nothing to do.
        name: the bound in words.
        seconds: of a step that would be saved if the bound took no time; for `compute`, `device` and `host`, what it
            takes.
        step_s: mean seconds of a step.
        evidence: what was measured, in words.
        edit: what would help.
        steps: how many steps were looked at.
        axis: of the exchange; empty if the bound is none.
        rank: the one that all others wait for, if the bound is `late_rank`.
    """

    bound: str
    name: str
    seconds: float
    step_s: float
    evidence: str
    edit: Advice
    steps: int
    axis: str = ""
    rank: int | None = None

    @property
    def share(self) -> float:
        """`seconds` of `step_s`, from 0 to 1."""
        return self.seconds / self.step_s

    def __str__(self) -> str:
        amount = f"{_seconds(self.seconds)} of {_seconds(self.step_s)} s ({self.share:.0%})"
        most = "" if BOUNDS[self.bound].kind == "rest" else f", by {self.share:.0%} at most"
        bounds = "bounds the step" if most == "" or self.share >= MUCH else "is the first thing to look at in a step"
        return f"{self.name} {bounds}: {amount} {self.evidence}. {self.edit.sentence}{most}."

    def as_dict(self) -> dict[str, Any]:
        """Every attribute by name, with the share and the sentence; the edit as text."""
        return {**asdict(self), "edit": self.edit.text, "share": self.share, "sentence": str(self)}


class _Cause(NamedTuple):
    """What one cause takes of a step: mean `seconds`, and seconds in `each` record.

    Attributes:
        rank: the one waited for.
        known: what else is known of it, in words that follow the evidence of its row.
    """

    name: str
    seconds: float
    each: Sequence[float]
    axis: str = ""
    rank: int | None = None
    known: str = ""


def verdict_of(
    records: Sequence[StepRecord], settings: Mapping[str, Any] | None = None, admits: Admits = lambda _: True
) -> Verdict | None:
    """What bounds the step, by the newest records with the present number of ranks; None if there is nothing of it.

    It is the largest cause other than compute that takes at least 5 % of a step and three times its own median
    deviation; else compute. Evaluations and saves that only came at the end, or in a few steps, are taken out of the
    step. One rank is named if it alone explains four fifths of the waits for late ranks and is the last in four of five
    records.

    Args:
        records: of kind `step`, as `steps_of` returns them.
        settings: of the run, as in its `config.json`; None for a loop that has no configuration.
        admits: is asked about a `section.key=value` before it is named.
    """
    if not records:
        return None
    records = of_these_ranks(records)
    knows_causes = "cause_s" in records[-1]
    causes = _causes(records) if knows_causes else _on_the_host(records)
    once = [cause for cause in causes if cause.name in _BETWEEN and not _comes_again(cause, records, settings)]
    if once and (others := _without(once, records)):  # with them goes what ranks exchange and wait for in them
        records, step_s = others, mean_of(others, "step_s")
        causes = _causes(records) if knows_causes else _on_the_host(records)
    else:
        step_s = mean_of(records, "step_s") - sum(cause.seconds for cause in once)
        causes = [cause._replace(seconds=_outside(cause, once, records)) for cause in causes]
    if step_s <= 0:
        return None
    left_out = {cause.name for cause in once}
    causes = [cause for cause in causes if cause.name not in left_out and cause.seconds >= LEAST_SHARE * step_s]
    causes = [cause for cause in causes if cause.name != "update" or _has_setting(cause, settings, admits)]
    clear = [cause for cause in causes if _is_steady(cause)]
    uneven = [cause for cause in causes if cause not in clear]
    largest = max(clear, key=lambda cause: cause.seconds, default=None)
    if largest is None:
        largest = _rest(records, knows_causes, step_s, uneven)
    return Verdict(
        bound=largest.name,
        name=_title(largest),
        seconds=largest.seconds,
        step_s=step_s,
        evidence=BOUNDS[largest.name].evidence + largest.known + _left_out(once, step_s),
        edit=edit_for(largest.name, largest.axis, settings, admits),
        steps=sum(record["steps"] for record in records),
        axis=largest.axis,
        rank=largest.rank,
    )


def _causes(records: Sequence[StepRecord]) -> list[_Cause]:
    """All causes but compute, for records that tell them apart; exchanges by axis."""
    causes = [_of(records, name, "phase_s" if name in _BETWEEN else "cause_s", name) for name in _PARTS]
    exchanges: dict[tuple[str, str], list[str]] = {}
    for key in sorted({key for record in records for key in record.get("comm", {})}):
        axis, _, kind = key.rpartition(" ")
        if kind != "control":
            cause = "exchange" if axis in _ACTIVATIONS else CAUSE_OF_KIND.get(kind, "exchange")
            cause = "stages" if axis == "pp" and kind == "send" else cause
            exchanges.setdefault((cause, axis), []).append(key)
    for (cause, axis), keys in exchanges.items():
        each = [sum(_exposed(record, key) for key in keys) for record in records]
        known = _busiest(records) if cause == "stages" else ""
        causes.append(_Cause(cause, mean_over_steps(records, each), each, axis, known=known))
    return [*causes, _late(records)]


def _on_the_host(records: Sequence[StepRecord]) -> list[_Cause]:
    """Causes in CUDA records: the phases in which the host queues no work."""
    return [_of(records, name, "phase_s", name) for name in ("input", *_BETWEEN)]


def _rest(records: Sequence[StepRecord], knows_causes: bool, step_s: float, uneven: Sequence[_Cause]) -> _Cause:
    """What is left where nothing else bounds the step. `uneven`: causes that are large in the mean, but vary too much
    to be named.
    """
    if knows_causes:
        seconds = mean_of(records, "cause_s", "compute") + mean_of(records, "cause_s", "update")
        return _Cause("compute", seconds, [], known=f", and {_beside(uneven, step_s)}")
    rest = mean_of(records, "step_s") - sum(cause.seconds for cause in _on_the_host(records))
    return _Cause("host" if mean_of(records, "starved") >= STARVED else "device", rest, [])


def _of(records: Sequence[StepRecord], name: str, *names: str) -> _Cause:
    return _Cause(name, mean_of(records, *names), [mean_of([record], *names) for record in records])


def _exposed(record: StepRecord, key: str) -> float:
    row = record.get("comm", {}).get(key, {})
    return max(0.0, row.get("exposed_s", 0.0) - row.get("late_s", 0.0))


def _busiest(records: Sequence[StepRecord]) -> str:
    """The rank that computes longest, in words; empty where records do not have it."""
    tables = [record.get("skew", {}).get("compute_s", []) for record in records]
    if min(map(len, tables)) < 2:
        return ""
    ranks = [mean_over_steps(records, column) for column in zip(*tables, strict=True)]
    return f"; rank {ranks.index(max(ranks))} computes longest, {_seconds(max(ranks))} s beside {_seconds(min(ranks))}"


def _late(records: Sequence[StepRecord]) -> _Cause:
    """The waits for late ranks: for the one rank that all others wait for, if there is one; else the mean of all."""
    tables = [_late_of_ranks(record) for record in records]
    if min(map(len, tables)) < 2:  # where `attach` has written, rank 0 alone has measured
        own = _of(records, "late_peer", "cause_s", "late_peer")
        return own._replace(known=", and which rank is the last is not recorded")
    ranks = [mean_over_steps(records, column) for column in zip(*tables, strict=True)]
    last = ranks.index(min(ranks))
    others = median(ranks[:last] + ranks[last + 1 :])
    alike = sum(row[last] == min(row) for row in tables)
    if len(tables) > 1 and alike >= ONE_RANK * len(tables) and others - ranks[last] >= ONE_RANK * others:
        each = [median(row[:last] + row[last + 1 :]) - row[last] for row in tables]
        return _Cause("late_rank", mean_over_steps(records, each), each, rank=last, known=_why(records, last))
    each = [sum(row) / len(row) for row in tables]
    known = ", and no one rank is always the last"
    return _Cause("late_peer", mean_over_steps(records, each), each, known=known)


def _late_of_ranks(record: StepRecord) -> list[float]:
    """Seconds that each rank waited for others, scaled to the record's `step_s`: ranks do not begin to count at the
    same moment. Older records have no `step_s` of each rank; there a wait is at most the record's.
    """
    skew, step_s = record.get("skew", {}), record["step_s"]
    waits = skew.get("late_peer_s") or []
    steps = skew.get("step_s") or [step_s] * len(waits)
    return [step_s * min(1.0, wait / own) if own else 0.0 for wait, own in zip(waits, steps, strict=True)]


def _is_steady(cause: _Cause) -> bool:
    if len(cause.each) < ENOUGH or cause.name in _BETWEEN:  # these come every so many records
        return True
    middle = median(cause.each)
    return cause.seconds >= SPREADS * median(abs(value - middle) for value in cause.each)


def _comes_again(cause: _Cause, records: Sequence[StepRecord], settings: Mapping[str, Any] | None) -> bool:
    """Whether it has come before an end of the run: no setting makes the one at the end rarer. A run that was continued
    has had several ends; where settings have it there alone, it comes again if most records have it all the same.
    """
    section, key = _PERIOD_OF.get(cause.name, ("", ""))
    known = {} if settings is None else settings.get(section, {})  # another version's may lack it
    at_ends = key in known and known[key] is None
    if at_ends and 2 * sum(map(bool, cause.each)) <= len(records):
        return False
    only_last = len(records) > 1 and not any(cause.each[:-1])
    return not only_last and sum(record["steps"] for record in records) >= FEW_STEPS


def _without(once: Sequence[_Cause], records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records in which none of these causes came."""
    return [record for place, record in enumerate(records) if not any(cause.each[place] for cause in once)]


def _outside(cause: _Cause, once: Sequence[_Cause], records: Sequence[StepRecord]) -> float:
    """Seconds of a cause that surely are of steps, where every record has what is left out too.

    A phase that is a cause has no part in another. Of waits and exchanges as much may have been there as this rank
    waited in all, and of waits for late ranks, which all ranks have told, as much as it took.
    """
    if cause.name in PHASES:
        return cause.seconds
    whole = BOUNDS[cause.name].kind == "late"
    there = sum(each.seconds - (0.0 if whole else mean_of(records, "cause_s", each.name)) for each in once)
    return max(0.0, cause.seconds - there)


def _has_setting(cause: _Cause, settings: Mapping[str, Any] | None, admits: Admits) -> bool:
    """Whether a setting helps against it: an update that is divided already counts as compute."""
    return edit_for(cause.name, cause.axis, settings, admits).is_code


def _title(cause: _Cause) -> str:
    along = f" along {cause.axis}" if BOUNDS[cause.name].kind == "exchange" and cause.axis else ""
    return BOUNDS[cause.name].title.format(rank=cause.rank) + along


def _beside(uneven: Sequence[_Cause], step_s: float) -> str:
    if not uneven:
        return f"nothing else takes {LEAST_SHARE * 100:.0f} %"
    most = max(uneven, key=lambda cause: cause.seconds)
    return f"{_title(most)} takes {most.seconds / step_s:.0%} in the mean, and far more in some records than in others"


def _left_out(once: Sequence[_Cause], step_s: float) -> str:
    """What has been taken out of the step, if it is much."""
    much = [_title(cause) for cause in once if cause.seconds >= LEAST_SHARE * step_s]
    return f", leaving out {' and '.join(much)}, too seldom to be counted" if much else ""


def _why(records: Sequence[StepRecord], rank: int) -> str:
    """What the rank spends more time on than the others, if that is known."""
    longer = []
    for name, verb in (("compute_s", "computes"), ("input_s", "waits for its data")):
        tables = [record.get("skew", {}).get(name) or [] for record in records]
        if min(map(len, tables)) > rank:
            ranks = [mean_over_steps(records, column) for column in zip(*tables, strict=True)]
            longer.append((ranks[rank] - median(ranks[:rank] + ranks[rank + 1 :]), verb))
    more, verb = max(longer, default=(0.0, ""))
    return f", and it {verb} {_seconds(more)} s longer" if more > 0 else ""


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
