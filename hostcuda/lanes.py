"""When collectives and messages run in virtual time: `Links` say how long they take, and `Lane`s which are in a row.

A collective begins when the last of its ranks has come to it, and a message when it has been sent and its receiver has
come to it. So each tells the others of its time, with what it exchanges. What is received is known once somebody waits
for it, and only then when: who sends it may not have come so far.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from hostcuda.library import native

__all__ = ["LINKS", "LISTENERS", "Carried", "Coming", "Lane", "Launched", "Links", "Moment"]


@dataclass
class Links:
    """What collectives take in virtual time: bytes per second of a rank among neighbours and among others, and seconds
    of each step of a ring. Ranks of a group are neighbours if their numbers follow one another.

    A ring of n ranks gathers or scatters S bytes in n - 1 steps of S / n, and sums them everywhere in twice as many
    (NVIDIA/nccl-tests, doc/PERFORMANCE.md; Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005, section 4). Of an exchange of all with all each message is a step.
    """

    near: float = 3e11
    far: float = 5e10
    hop_s: float = 0.0


LINKS = Links()


@dataclass(frozen=True)
class Carried:
    """A collective that has begun, and what it takes. `near`: among neighbours."""

    name: str
    near: bool
    seconds: float


LISTENERS: list[list[Carried]] = []
"""Each gets every collective that begins."""


class Moment(NamedTuple):
    """When a rank comes to an exchange, and how long that takes; of several ranks, the last and the longest."""

    ready_s: float
    seconds: float


class Launched(NamedTuple):
    """What a lane has begun: its number on the device, and its end."""

    number: int
    done: torch.cuda.Event


class Coming(Protocol):
    """What is received."""

    def arrive(self) -> None:
        """Wait for it, and `postpone` its end."""


class Lane:
    """One after the other: collectives of a communicator, or messages from or to one rank.

    Args:
        name: for the stream on which those run that the caller's stream does not wait for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._own: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None
        self._ended_s = 0.0
        self._coming: deque[Coming] = deque()

    def enter(self, asynchronous: bool) -> torch.cuda.Stream:
        """The stream for the next one, behind the one before and all that the caller's stream has queued."""
        stream = current = torch.cuda.current_stream()
        if asynchronous:
            stream = self._own = self._own or self._made()
            stream.wait_stream(current)
        if self._last is not None:
            stream.wait_event(self._last)
        return stream

    def _made(self) -> torch.cuda.Stream:
        made = torch.cuda.Stream()
        native.name_stream(made.device_index, made.stream_id, self._name.encode())
        return made

    def launch(self, stream: torch.cuda.Stream, begins: Moment) -> int:
        """Begin one on a stream that was entered. Its number."""
        number: int = native.launch(stream.device_index, stream.stream_id, begins.seconds, begins.ready_s)
        return number

    def leave(self, stream: torch.cuda.Stream, number: int) -> Launched:
        """All that it uses has been told."""
        self._last = stream.record_event()
        return Launched(number, self._last)

    def expect(self, coming: Coming) -> None:
        """The one that was launched last is a receive."""
        self._coming.append(coming)

    def arrive(self, coming: Coming) -> None:
        """Wait for what was expected, in order, if that has not been done."""
        while coming in self._coming:
            self._coming.popleft().arrive()

    def postpone(self, launched: Launched, sent: Moment) -> None:
        """A receive ends no earlier than what was sent, which takes as long behind the one before."""
        assert self._own is not None, "messages have a stream of their own"
        end_s = max(sent.ready_s, self._ended_s) + sent.seconds
        where = self._own.device_index, self._own.stream_id
        native.postpone(*where, launched.done.event_id, launched.number, end_s)
        self._ended_s = float(native.event_time_s(launched.done.event_id))
