"""Starts `launch.ranks` processes on this machine, and again after failures if configured.

Each local rank runs `python -m terrazzo train ...` with the environment that torchrun would set, so that ranks begin in
one way only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from terrazzo.engine.runtime.topology import cpus_of_a_rank
from terrazzo.exit_codes import PREEMPTED, STALLED
from terrazzo.launch.launcher.local_ranks import LaunchSpec, LocalRanks
from terrazzo.launch.launcher.restart_policy import RestartPolicy
from terrazzo.launch.launcher.run_end import RanksAtEnd, RunEnd, report_end
from terrazzo.launch.launcher_pipe import Milestone
from terrazzo.launch.stopping.notices import Notices, say_now
from terrazzo.launch.stopping.received_signals import ReceivedSignals
from terrazzo.telemetry.watchdog.evidence import keep_evidence
from terrazzo.telemetry.watchdog.watchdog import Patience

__all__ = ["environment_of", "launch_ranks"]


def environment_of(ranks: int) -> dict[str, str]:
    """Default environment variables of ranks, which the user's own override; `library_settings` each sets itself."""
    return {"OMP_NUM_THREADS": str(max(1, cpus_of_a_rank(1) // ranks))}


def launch_ranks(
    start: LaunchSpec,
    *,
    defaults: Callable[[int], Mapping[str, str]] = environment_of,
    labelled: bool = False,
    notices: Notices | None = None,
    patience: Patience | None = None,
    restarts: RestartPolicy | None = None,
) -> int:
    """Run local ranks until they have ended for good; returns the exit code for this process.

    Prints the first failing rank's message or traceback as the last thing on screen.

    Args:
        start: what to start.
        defaults: returns default environment variables for a number of ranks.
        labelled: as for `LocalRanks`.
        notices: what to say when a signal comes.
        patience: with several ranks that stand still; None does not watch them.
        restarts: decides whether ranks are started again after a failure; None does not restart them.
    """
    signals, has_claimed = ReceivedSignals(), False
    try:
        while True:
            looked_after = patience if start.ranks > 1 else None
            ranks = LocalRanks(start, defaults(start.ranks), labelled=labelled, patience=looked_after)
            end, has_claimed = _run(ranks, signals, notices, has_claimed)
            may_restart = restarts is not None and end.code not in (0, PREEMPTED) and not signals.received
            following = restarts.after(start, end) if restarts is not None and may_restart else None
            if following is None:
                return _exit_code(end, notices)
            start = following
            if has_claimed and notices is not None:
                notices.on_restart()
    finally:
        signals.restore()


def _run(
    ranks: LocalRanks, signals: ReceivedSignals, notices: Notices | None, has_claimed: bool
) -> tuple[RunEnd, bool]:
    """Wait until ranks have ended, and say how. Also returns whether the run has claimed its folders.

    Args:
        has_claimed: whether an earlier start of the run has.
    """
    with ranks as started:
        kill_signal = started.wait(signals, lambda: _say_stopping(started, notices))
        evidence = keep_evidence(started.suspects, started.stall) if started.stall is not None else ""
    started.await_output(signals)  # what is said of the end comes behind it, unless nobody reads
    stop_signal = next(iter(signals.received), None)
    oom_kills = started.oom_kills
    at_end = RanksAtEnd(started.ranks, stop_signal, kill_signal, started.stall, evidence, oom_kills, notices)
    end = report_end(at_end)
    started.await_output(signals, at_last=True)
    has_claimed = has_claimed or started.any_reached(Milestone.CLAIMED)
    if notices is not None and has_claimed and started.stall is None:  # the note of a stall is kept with its evidence
        notices.on_end(end.note)
    return end, has_claimed


def _say_stopping(started: LocalRanks, notices: Notices | None) -> None:
    if notices is not None:
        say_now(notices.asked(started.any_reached(Milestone.TRAINING)))


def _exit_code(end: RunEnd, notices: Notices | None) -> int:
    """The exit code of a run that is over."""
    if end.code == STALLED and notices is not None:
        say_now(notices.cut_short())
    return end.code
