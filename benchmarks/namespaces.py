"""Two nodes on one machine: network namespaces, a slow link between them, and processes inside.

Needs Linux and root, for `ip netns` and `tc`. The rate is tbf's; the delay is netem's, where the kernel has it. Where
it has not, packets that are to take `WIRED_MS` and more go through a process (`wire`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.wire import open_tunnel

NODES = 2
LINK = "slow"
"""The name of the link's end on either node."""
WIRED_MS = 5.0
"""Milliseconds each way. Links with less are fast ones: the process would take cores for their packets."""
ADDRESSES = ("198.18.0.1", "198.18.0.2")  # of a range reserved for benchmarks (RFC 2544)


class Impossible(Exception):
    """This machine cannot stand for two nodes; the text says why."""


@dataclass(frozen=True)
class Nodes:
    """Their names, and how the link between them is slowed down."""

    names: tuple[str, ...]
    shaping: str


@contextmanager
def two_nodes(rate_mbit: int, delay_ms: float) -> Iterator[Nodes]:
    """Two namespaces with a link between them. They are gone afterwards, whatever happens.

    Args:
        rate_mbit: megabits per second, each way.
        delay_ms: milliseconds, each way.

    Raises: `Impossible`.
    """
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise Impossible("Making network namespaces takes Linux, root, and the programs ip and tc.")
    names = tuple(f"terrazzo-{os.getpid()}-{node}" for node in range(NODES))
    try:
        for name in names:
            _command("ip", "netns", "add", name)
        _command(*("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", LINK, "netns", names[1]))
        shaping = [_slow_down(name, rate_mbit, delay_ms) for name in names]
        if None in shaping and delay_ms >= WIRED_MS:
            _command("ip", "-n", names[0], "link", "delete", LINK)
            with _wire(names, rate_mbit, delay_ms):
                _bring_up(names)
                yield Nodes(names, f"{rate_mbit} Mbit/s and {delay_ms} ms each way, by a process between two tunnels")
            return
        _bring_up(names)
        bare = f"{rate_mbit} Mbit/s each way by tbf, no delay added (the kernel has no netem)"
        yield Nodes(names, shaping[0] or bare)
    finally:
        for name in names:
            with suppress(Impossible):  # it may not have come to be
                _command("ip", "netns", "delete", name)


def _bring_up(names: Sequence[str]) -> None:
    for name, address in zip(names, ADDRESSES, strict=True):
        _command("ip", "-n", name, "address", "add", f"{address}/30", "dev", LINK)
        for device in ("lo", LINK):
            _command("ip", "-n", name, "link", "set", device, "up")


@contextmanager
def _wire(names: Sequence[str], rate_mbit: int, delay_ms: float) -> Iterator[None]:
    """A tunnel's end in each namespace, and the process between them."""
    devices = [f"tz{os.getpid()}{end}" for end in "ab"]  # 15 characters at most
    tunnels: list[int] = []
    try:
        for name, device in zip(names, devices, strict=True):
            tunnels.append(_tunnel(device))
            _command("ip", "link", "set", device, "netns", name, "name", LINK)
        words = [
            sys.executable,
            "-m",
            "benchmarks.wire",
            *map(str, tunnels),
            str(rate_mbit * 1e6 / 8),
            str(delay_ms / 1e3),
        ]
        process = subprocess.Popen(words, cwd=Path(__file__).parents[1], pass_fds=tunnels, process_group=0)
    finally:
        for tunnel in tunnels:
            os.close(tunnel)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _tunnel(device: str) -> int:
    try:
        return open_tunnel(device)
    except OSError as error:
        raise Impossible(f"No netem in the kernel, and no tunnel devices for a delay without it: {error}") from error


def _slow_down(name: str, rate_mbit: int, delay_ms: float) -> str | None:
    """Limit what a node's end of the link sends; returns what is in effect, None where the delay is not."""
    queue = ("tc", "-n", name, "qdisc", "add", "dev", LINK)
    bucket = ("tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "50ms")
    try:
        _command(*queue, "root", "handle", "1:", "netem", "delay", f"{delay_ms}ms", "limit", "10000")
    except Impossible:
        _command(*queue, "root", *bucket)
        return None
    _command(*queue, "parent", "1:1", "handle", "10:", *bucket)
    return f"{rate_mbit} Mbit/s by tbf and {delay_ms} ms by netem, each way"


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Impossible(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def run_ranks(nodes: Nodes, per_node: int, arguments: Callable[[Path], Sequence[str]], limit_s: float) -> list[str]:
    """Run a Python program as every rank; what each wrote into its report, in rank order. No process outlives the call.

    Args:
        arguments: of the interpreter, for a rank that is to write its report to this path.
        limit_s: seconds for all of it.

    Raises: `RuntimeError` if a rank fails or time runs out.
    """
    ranks = range(per_node * len(nodes.names))
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="terrazzo-network-") as folder:
        reports = [Path(folder) / str(rank) for rank in ranks]
        try:
            for rank in ranks:
                words = ["ip", "netns", "exec", nodes.names[rank // per_node], sys.executable]
                processes.append(_start([*words, *arguments(reports[rank])], rank, len(ranks), reports[rank]))
            _wait(processes, reports, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [report.read_text() for report in reports]


def _start(words: Sequence[str], rank: int, world_size: int, report: Path) -> subprocess.Popen[bytes]:
    ours = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29500",  # free: the namespace is new
        "GLOO_SOCKET_IFNAME": LINK,  # ranks of one node reach its address through the loopback device
        "OMP_NUM_THREADS": "1",
    }
    root = Path(__file__).parents[1]
    with report.with_suffix(".log").open("wb") as log:
        # A process group of its own: Ctrl-C is for the parent, which ends the ranks.
        return subprocess.Popen(words, cwd=root, env=os.environ | ours, stdout=log, stderr=log, process_group=0)


def _wait(processes: Sequence[subprocess.Popen[bytes]], reports: Sequence[Path], limit_s: float) -> None:
    """Return once all have ended well."""
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [report for code, report in zip(codes, reports, strict=True) if code]
        if failed or time.monotonic() > deadline:
            late = [report for code, report in zip(codes, reports, strict=True) if code is None]
            log = (failed or late)[0].with_suffix(".log").read_text()[-2000:]
            what = "failed" if failed else f"took more than {limit_s:.0f} s"
            raise RuntimeError(f"Rank {(failed or late)[0].name} {what}:\n{log}")
        if None not in codes:
            return
        time.sleep(0.05)
