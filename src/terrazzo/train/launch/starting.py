"""Starting ranks: join what torchrun or Slurm has started, else start `launch.ranks` processes on this machine.

Local ranks are processes that each run `python -m terrazzo train ...` with the environment that torchrun would have
given it, so there is one way in which a rank begins. They are started again where somebody has asked for that.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence

from terrazzo.config import Config
from terrazzo.engine.offload.topology import cpus_of_a_rank
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, PREEMPTED, STALLED
from terrazzo.telemetry.watchdog.evidence import keep_evidence
from terrazzo.telemetry.watchdog.watchdog import Patience
from terrazzo.train.launch.again import Again, Ended, Start
from terrazzo.train.launch.here import resolve_device
from terrazzo.train.launch.local_ranks import LocalRank, LocalRanks, Signals
from terrazzo.train.launch.places import Places
from terrazzo.train.launch.stop import Notices, say_now
from terrazzo.train.launch.telling import Failure, first_failure

__all__ = ["adopt_slurm", "first_host", "is_rank", "launch_ranks", "places_of", "ranks_to_start"]

_SEEN_LATE_NS = 200_000_000
"""By how much a death may be seen too late. The others' errors, of connections to the dead, come as soon as it."""
_KILL_SEEN_LATE_NS = 2_000_000_000
"""The same of a SIGKILL: no rank ends so because another has failed, and a busy machine lets the launcher wait."""
_REST = "; the other ranks were stopped."


def is_rank() -> bool:
    """Whether this process was started as one rank of a run by torchrun, Slurm or this module."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_to_start(config: Config) -> int:
    """How many ranks this command starts; raises `BadInput` for more CUDA ranks than devices."""
    count = devices.count() if resolve_device(config.launch) == "cuda" else None
    if not (numbers := config.rank_numbers):
        return count or 1
    fitting = [number for number in numbers if count is None or number <= count]
    if not fitting:
        raise BadInput(
            f"launch.ranks is {config.launch.ranks}, but this machine has {count} CUDA devices and each rank needs its"
            f" own: use launch.ranks={count}, or launch.device=cpu."
        )
    return fitting[-1]


def places_of(config: Config) -> Places | None:
    """Where ranks may be that may become fewer; None where their number is given."""
    if not isinstance(config.launch.ranks, str):
        return None
    cuda, numbers = resolve_device(config.launch) == "cuda", config.rank_numbers
    return Places(numbers, devices.count if cuda else lambda: numbers[-1], named=cuda)


def adopt_slurm() -> None:
    """Inside an `srun` task, set the variables that torchrun would have set. Elsewhere nothing happens."""
    env = os.environ
    if is_rank() or "SLURM_PROCID" not in env or not ({"SLURM_STEP_ID", "SLURM_STEPID"} & set(env)):
        return
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", "0")
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1")
    env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = env["SLURM_PROCID"], tasks, env.get("SLURM_LOCALID", "0")
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    env["LOCAL_WORLD_SIZE"] = str(per_node[int(env["SLURM_NODEID"])] if len(set(per_node)) > 1 else per_node[0])
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
    env.setdefault("MASTER_ADDR", first_host(nodes))
    env.setdefault("MASTER_PORT", str(_port(env.get("SLURM_JOB_ID", "0"), step)))


def _port(job: str, step: str) -> int:
    """One for each step of a job, below the ports that Linux gives to whoever asks for any (32768 and above)."""
    return 10_000 + (7 * int(job) + int(step)) % 20_000


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, node by node: `4(x2),1` → `[4, 4, 1]`."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list, where rank 0 runs: `gpu[003-007,9],login` → `gpu003`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def environment_of(ranks: int) -> dict[str, str]:
    """What ranks are started with where the user has not said otherwise.

    Gathered weights of units of several sizes come and go: segments that grow leave no gaps between them (PyTorch,
    "Memory management" in the notes on CUDA).
    """
    threads = {"OMP_NUM_THREADS": str(max(1, cpus_of_a_rank(1) // ranks))}
    chosen = not devices.count() or "PYTORCH_CUDA_ALLOC_CONF" in os.environ  # the older name of the same
    return threads if chosen else threads | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def launch_ranks(
    ranks: int,
    arguments: Sequence[str],
    defaults: Mapping[str, str] | None = None,
    *,
    labelled: bool = False,
    notices: Notices | None = None,
    patience: Patience | None = None,
) -> int:
    """Run `python ARGUMENTS` as `ranks` local ranks; returns the exit code for this process.

    Prints the first failing rank's message or traceback as the last thing on screen.

    Args:
        defaults: of their environment; by default `environment_of` the trainer's ranks.
        labelled, patience: as for `LocalRanks`.
        notices: what is said as soon as a signal comes.
    """
    signals, defaults = Signals(), environment_of(ranks) if defaults is None else defaults
    try:
        started = LocalRanks(ranks, arguments, defaults, labelled=labelled, patience=patience)
        return _left(_run(started, signals, notices), notices)
    finally:
        signals.restore()


def launch_again(start: Start, again: Again, notices: Notices, patience: Patience | None) -> int:
    """The same of the trainer's ranks, which are started again as `again` decides."""
    signals = Signals()
    try:
        while True:
            looked_after = patience if start.ranks > 1 else None
            defaults, environment = environment_of(start.ranks), start.environment
            ranks = LocalRanks(start.ranks, start.words, defaults, environment, patience=looked_after)
            ended = _run(ranks, signals, notices)
            failed = ended.code not in (0, PREEMPTED) and not signals.received
            following = again.after(start, ended) if failed else None
            if following is None:
                return _left(ended, notices)
            start = following
    finally:
        signals.restore()


def _run(ranks: LocalRanks, signals: Signals, notices: Notices | None) -> Ended:
    """Until they have ended, which is said."""
    with ranks as started:
        stopped_by = started.wait(signals, lambda: say_now(notices.asked) if notices is not None else None)
        kept = keep_evidence(started.suspects, started.stall) if started.stall is not None else ""
    ended = _told(started, stopped_by, kept, next(iter(signals.received), None), notices)
    if notices is not None and any(rank.claimed for rank in started.ranks):
        notices.ended(ended)
    return ended


def _left(ended: Ended, notices: Notices | None) -> int:
    """The exit code of a run that goes on no more."""
    if ended.code == STALLED and notices is not None:
        say_now(notices.cut_short())
    return ended.code


def _told(started: LocalRanks, stopped_by: int | None, kept: str, asked: int | None, notices: Notices | None) -> Ended:
    """How ranks have ended, once that is said."""
    if (stall := started.stall) is not None:
        print(f"{stall.text}\nAll ranks were ended. {kept}".rstrip(), file=sys.stderr)
        return Ended(
            STALLED, stall.text, any(rank.code is None for rank in started.ranks), rank=stall.rank, reason=stall.cause
        )
    if stopped_by is None:
        return _report(started.ranks, asked, started.oom_kills)
    if notices is not None:
        begun = any(rank.begun for rank in started.ranks)
        say_now(notices.cut_short() if begun else notices.unbegun)
    return Ended(128 + stopped_by)


def _report(ranks: Sequence[LocalRank], asked: int | None = None, oom_kills: int | None = None) -> Ended:
    """Say what ended the run, what came first last; how it has ended.

    Args:
        asked: the signal that was passed on to all ranks: that they died of it is no failure.
        oom_kills: how many processes the kernel has ended meanwhile for want of memory, if that is known.
    """
    first = first_failure(rank.failure for rank in ranks)
    silent = first_failure(_silent(rank, asked, oom_kills) for rank in ranks)
    if asked is not None and silent is None and (first is None or first.exit_code == INTERRUPTED):
        return Ended(_stopped(ranks, asked))
    if first is None and silent is None:
        return Ended(
            max((rank.code for rank in ranks if rank.code is not None and not rank.ended_by_us), default=FAILED)
        )
    if first is None or (silent is not None and silent.time_ns < first.time_ns):
        assert silent is not None
        if first is not None:
            print(f"Rank {first.rank} failed as well:\n{first.text}\n", file=sys.stderr)
        print(silent.text, file=sys.stderr)
        ended = _ended_by(silent, silent.text.removesuffix(_REST), ranks)
        return ended._replace(reason="killed") if (ranks[silent.rank].code or 0) < 0 else ended
    if silent is not None:
        print(f"{silent.text}\n", file=sys.stderr)
    if first.exit_code == BAD_INPUT:
        print(first.text, file=sys.stderr)
    else:
        print(f"Rank {first.rank} failed first:\n{first.text}", file=sys.stderr)
    for rank in ranks:
        if rank.stopped:
            print(f"\n{_stopped_rank(rank)}", file=sys.stderr)
    *trace, why = first.text.splitlines()
    if trace and not any(rank.stopped for rank in ranks):  # whoever looks at the end of a long output finds it there
        print(f"\nRank {first.rank} failed first{ranks[first.rank].at}: {why}", file=sys.stderr)
    return _ended_by(first, f"rank {first.rank} failed: {why}", ranks)


def _ended_by(failure: Failure, why: str, ranks: Sequence[LocalRank]) -> Ended:
    """What the system does not let go of still has its device and its files."""
    lasts, begun = failure.lasts or any(rank.code is None for rank in ranks), ranks[failure.rank].at
    step = ranks[failure.rank].step
    return Ended(failure.exit_code, why, lasts, None if begun else failure.rank, failure.rank, step)


def _stopped_rank(rank: LocalRank) -> str:
    """What stood still was there before what has waited for it failed, so this is said after that."""
    return (
        f"Rank {rank.rank} (process {rank.pid}) was stopped by a signal when that happened (SIGSTOP, Ctrl-Z or a"
        " debugger), so whoever waited for it waited in vain: see who stops processes here, and start the run again. A"
        " rank that `kill -CONT` wakes before launch.timeout_s is over goes on."
    )


def _stopped(ranks: Sequence[LocalRank], asked: int) -> int:
    """The exit code of ranks that have ended as they were asked to: their own, where they have one."""
    died = [rank.rank for rank in ranks if rank.code is None or rank.code < 0 or rank.failure is not None]
    if not died:
        return max(rank.code or 0 for rank in ranks)
    print(f"Stopped by {signal.Signals(asked).name}; all ranks have ended.", file=sys.stderr)
    return 128 + asked


def _silent(rank: LocalRank, asked: int | None, oom_kills: int | None) -> Failure | None:
    """How a rank ended without a word, and when at the earliest; None if it did not, was asked to, or ended well."""
    if rank.code in (None, 0, PREEMPTED) or rank.ended_by_us or rank.failure is not None:
        return None
    if rank.code > 0:
        said = f"Rank {rank.rank} ended with exit code {rank.code}{_REST}"
        return Failure(rank.rank, (rank.ended_ns or 0) - _SEEN_LATE_NS, rank.code, said)
    if asked is not None and rank.code == -asked:
        return None
    name = signal.Signals(-rank.code).name
    hint = _who_kills(oom_kills) if name == "SIGKILL" else ""
    said = f"Rank {rank.rank} was ended by {name}{hint}{rank.at}{_REST}"
    late_ns = _KILL_SEEN_LATE_NS if name == "SIGKILL" else _SEEN_LATE_NS
    return Failure(rank.rank, (rank.ended_ns or 0) - late_ns, FAILED, said)


def _who_kills(oom_kills: int | None) -> str:
    """What the kernel's count says of a SIGKILL."""
    if oom_kills is None:
        return " (often the kernel's out-of-memory killer, whose count cannot be read here)"
    if oom_kills:
        return f" (the kernel's out-of-memory killer, which has ended {oom_kills} here since the start)"
    return " (not by the kernel's out-of-memory killer, which has ended nothing here)"
