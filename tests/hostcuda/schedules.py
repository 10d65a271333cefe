"""Random programs of streams, events, collectives and frees, and an oracle that knows what is ordered in them.

The oracle keeps for every stream, event and the host the set of all that is over for it: no clocks, no blocks. A sound
program waits wherever it has to; another one waits where chance will have it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hostcuda.device import FAULTS, report

__all__ = ["Program", "written"]

HOST, NCCL = "host", "nccl"
STREAMS = ("a", "b", "c")
PARTS = {"all": slice(0, 64), "low": slice(0, 32), "high": slice(32, 64)}


class Use(NamedTuple):
    """A use of a part of a buffer; `bit` stands for it in sets of what is over."""

    bit: int
    by: str
    buffer: int
    part: str
    write: bool

    def meets(self, other: Use) -> bool:
        """Whether the order of both is of importance."""
        apart = self.buffer != other.buffer or {self.part, other.part} == {"low", "high"}
        return not apart and (self.write or other.write) and self.by != other.by


@dataclass
class Program:
    """What is done, in the host's order, and whether all of it is ordered.

    Attributes:
        lines: names of methods of `Run`, and their arguments.
    """

    lines: list[tuple[Any, ...]] = field(default_factory=list)
    faulty: bool = False

    def __str__(self) -> str:
        return "\n".join(f"{name}({', '.join(map(str, arguments))})" for name, *arguments in self.lines)


def written(seed: int, sound: bool, length: int = 40) -> Program:
    """A program of so many uses, and as many waits as it takes."""
    writer = _Writer(random.Random(seed), sound)
    for _ in range(length):
        writer.go_on()
    for index in range(len(writer.owners)):
        writer.free(index)
    for stream in STREAMS:
        writer.allocate(stream)
    return writer.program


class _Writer:
    """Writes a program, and knows what is over for whom."""

    def __init__(self, chance: random.Random, sound: bool) -> None:
        self.chance, self.sound, self.program = chance, sound, Program()
        self.over: dict[str, int] = dict.fromkeys((*STREAMS, HOST, NCCL), 0)
        self.events: list[int] = []
        self.works: list[int] = []
        self.uses: list[Use] = []
        self.owners: list[str | None] = []
        self.freed: dict[str, list[Use]] = {}
        self.bits = 0

    def go_on(self) -> None:
        live = [index for index, owner in enumerate(self.owners) if owner is not None]
        if len(live) < 2:
            self.allocate(self.chance.choice(STREAMS))
            return
        stream = self.chance.choice(STREAMS)
        what = self.chance.choices((self.use, self.collect, self.wait, self.mark), (5, 2, 3, 1))[0]
        what(stream, live) if what in (self.use, self.collect) else what(stream)  # type: ignore[call-arg, arg-type]
        if self.chance.random() < 0.05:
            self.free(self.chance.choice(live))

    def line(self, *parts: Any) -> None:
        self.program.lines.append(parts)

    def allocate(self, stream: str) -> None:
        """It may get what has been freed for this stream."""
        for old in self.freed.pop(stream, ()):
            if not (self.over[stream] | self.over[HOST]) & old.bit:
                if self.sound:
                    self.wait_for(stream, old)
                else:
                    self.program.faulty = True
        self.line("allocate", stream)
        self.owners.append(stream)
        self.work(stream, [(len(self.owners) - 1, "all", True)])

    def use(self, stream: str, live: list[int]) -> None:
        buffer, part, write = self.chance.choice(live), self.chance.choice(list(PARTS)), self.chance.random() < 0.5
        self.prepare(stream, [(buffer, part, write)])
        self.line("write" if write else "read", stream, buffer, part)
        self.work(stream, [(buffer, part, write)])

    def collect(self, stream: str, live: list[int]) -> None:
        """An asynchronous all-gather of one buffer into another."""
        source, target = self.chance.sample(live, 2)
        uses = [(source, "all", False), (target, "all", True)]
        self.prepare(stream, uses, NCCL)
        self.line("gather", stream, source, target)
        self.over[NCCL] |= self.over[stream]
        self.work(NCCL, uses)
        self.works.append(self.over[NCCL])

    def work(self, by: str, uses: list[tuple[int, str, bool]]) -> None:
        """`by` does something that uses all of these at once, after all that the host knows to be over."""
        self.over[by] |= self.over[HOST]
        bit = 1 << self.bits
        self.bits += 1
        fresh = [Use(bit, by, *use) for use in uses]
        self.program.faulty |= any(use.meets(old) and not self.over[by] & old.bit for use in fresh for old in self.uses)
        self.uses += fresh
        self.over[by] |= bit

    def prepare(self, stream: str, uses: list[tuple[int, str, bool]], by: str | None = None) -> None:
        """In a sound program, wait for what these uses must come after."""
        if not self.sound:
            return
        for use in (Use(0, by or stream, *use) for use in uses):
            for old in self.uses:
                known = self.over[stream] | self.over[HOST] | (self.over[NCCL] if by else 0)
                if use.meets(old) and not known & old.bit:
                    self.wait_for(stream, old)

    def wait_for(self, stream: str, old: Use) -> None:
        """In one of the ways that there are."""
        ways: list[tuple[Any, ...]] = [
            ("wait_event", stream, i) for i, over in enumerate(self.events) if over & old.bit
        ]
        ways += [("wait_work", stream, i) for i, over in enumerate(self.works) if over & old.bit]
        if old.by != NCCL:
            ways += [("wait_stream", stream, old.by), ("synchronize", old.by)]
        self.carry_out(self.chance.choice(ways))

    def wait(self, stream: str) -> None:
        ways: list[tuple[Any, ...]] = [("wait_stream", stream, other) for other in STREAMS if other != stream]
        ways += [("synchronize", stream)]
        ways += [("wait_event", stream, self.chance.randrange(len(self.events)))] if self.events else []
        ways += [("wait_work", stream, self.chance.randrange(len(self.works)))] if self.works else []
        self.carry_out(self.chance.choice(ways))

    def carry_out(self, way: tuple[Any, ...]) -> None:
        self.line(*way)
        name, stream, *rest = way
        if name == "synchronize":
            self.over[HOST] |= self.over[stream]
            return
        sources = {"wait_stream": self.over, "wait_event": self.events, "wait_work": self.works}
        self.over[stream] |= sources[name][rest[0]]  # type: ignore[index]

    def mark(self, stream: str) -> None:
        self.line("mark", stream)
        self.events.append(self.over[stream])

    def free(self, buffer: int) -> None:
        owner = self.owners[buffer]
        if owner is None:
            return
        self.freed.setdefault(owner, []).extend(old for old in self.uses if old.buffer == buffer and old.by != owner)
        self.line("free", buffer)
        self.owners[buffer] = None


class Run:
    """Carries a program out."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.streams = {name: torch.cuda.Stream() for name in STREAMS}
        self.scratch = {name: torch.empty(64, device="cuda") for name in STREAMS}
        torch.cuda.synchronize()
        self.buffers: list[torch.Tensor] = []
        self.events: list[torch.cuda.Event] = []
        self.works: list[Any] = []

    def allocate(self, stream: str) -> None:
        with torch.cuda.stream(self.streams[stream]):
            self.buffers.append(torch.ones(64, device="cuda"))

    def read(self, stream: str, buffer: int, part: str) -> None:
        with torch.cuda.stream(self.streams[stream]):
            values = self.buffers[buffer][PARTS[part]]
            torch.neg(values, out=self.scratch[stream][: len(values)])  # nothing is allocated

    def write(self, stream: str, buffer: int, part: str) -> None:
        with torch.cuda.stream(self.streams[stream]):
            self.buffers[buffer][PARTS[part]].zero_()

    def gather(self, stream: str, source: int, target: int) -> None:
        together: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with torch.cuda.stream(self.streams[stream]):
            self.works.append(together(self.buffers[target], self.buffers[source], async_op=True))

    def mark(self, stream: str) -> None:
        self.events.append(self.streams[stream].record_event())

    def wait_event(self, stream: str, event: int) -> None:
        self.streams[stream].wait_event(self.events[event])

    def wait_work(self, stream: str, work: int) -> None:
        with torch.cuda.stream(self.streams[stream]):
            # The values have gone elsewhere by then.
            torch.cuda.current_stream().wait_event(self.works[work]._launched.done)

    def wait_stream(self, stream: str, other: str) -> None:
        self.streams[stream].wait_stream(self.streams[other])

    def synchronize(self, stream: str) -> None:
        self.streams[stream].synchronize()

    def free(self, buffer: int) -> None:
        self.buffers[buffer].untyped_storage().resize_(0)


def found(program: Program) -> list[str]:
    """What the device says of it."""
    run = Run()
    report.take()
    for name, *arguments in program.lines:
        getattr(run, name)(*arguments)
    faults = [str(finding) for finding in report.take() if finding.kind in FAULTS]
    torch.cuda.synchronize()
    return faults


def disagreements(seeds: range, sound: bool) -> list[str]:
    """Programs of which the device and the oracle say different things, with what the device says."""
    told = []
    for seed in seeds:
        program = written(seed, sound)
        assert not (sound and program.faulty), "a sound program waits wherever it has to"
        faults = found(program)
        if bool(faults) != program.faulty:
            told.append(f"seed {seed}, faulty: {program.faulty}\n{program}\n" + "\n".join(faults))
    return told
