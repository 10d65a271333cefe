"""What stages of a pipeline send each other: activations to the next one, and their gradients back."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.collectives import Collectives, MessageRoute
from terrazzo.engine.comm.tags import ACTIVATIONS
from terrazzo.engine.comm.transfer import Handle
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput
from terrazzo.parallel.pipeline.failures import LostRank
from terrazzo.parallel.pipeline.schedules import Action, ActionKind

__all__ = ["Form", "Messages", "NothingSent", "form_of"]

Form = tuple[Any, ...]
"""Shapes and dtypes of a micro-batch's inputs, and autocast's: those of equal form make activations of equal shapes."""


def form_of(inputs: Any, trains: bool) -> Form:
    """The form of a micro-batch's inputs."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    computes_in = tuple(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return (trains, computes_in, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves))


Receive = Callable[..., Tensor]
"""Waits for a message and returns it, maybe only so many seconds."""


class NothingSent(Exception):
    """The stage before has failed, and sends nothing."""


class Messages:
    """The messages of one rank.

    The first activations of a form are preceded by a message with their shape, so that later ones can be received
    into memory that is there. All ranks along the pipeline have the same micro-batches, so both sides of a message know
    whether its form is new.

    Args:
        collectives: along the axis of stages.
        stages: how many stages the whole model has.
        device: that of activations.
        sharing: for each parameter that several ranks have, which these are.

    Attributes:
        given_up: how many steps were abandoned. Messages of these are never taken for later ones.
        values_compared: whether the values of inputs have been compared along the pipeline once.
    """

    def __init__(
        self, collectives: Collectives, stages: int, device: torch.device, sharing: Sequence[Sequence[int]] = ()
    ) -> None:
        self._collectives, self._stages = collectives, stages
        self._device = device
        self.size, self.rank = collectives.size, collectives.rank
        if device.type == "cuda":
            routes = dict.fromkeys(each for stage in range(stages - 1) for each in self._between(stage))
            pairs = (pair for ranks in sharing for pair in itertools.permutations(ranks, 2))
            routes |= dict.fromkeys(MessageRoute("tied", source, to) for source, to in pairs)
            collectives.open_routes([*routes], device)
        self.given_up = self._begun = 0
        self.values_compared = False
        self._known: dict[tuple[int, Form], tuple[tuple[int, ...], torch.dtype]] = {}
        self._sent: dict[tuple[Action, bool], Handle] = {}
        self._receiving: dict[Action, Receive] = {}

    def ask_for(self, action: Action, like: Tensor | Form) -> None:
        """Start receiving the input of an action, if that has not begun.

        Args:
            like: for activations the form of the micro-batch; for a gradient the activations that it is of.
        """
        if action in self._receiving:
            return
        if isinstance(like, Tensor):
            self._receiving[action] = self._receive(action, tuple(like.shape), like.dtype)
        elif (known := self._known.get((action.stage, like))) is not None:
            self._receiving[action] = self._receive(action, *known)
        else:
            self._receiving[action] = functools.partial(self._receive_new, action, like)

    def take(self, action: Action) -> Tensor:
        """Wait for the input of an action. A gradient shows that the activations that it is of have arrived."""
        values = self._receiving.pop(action)()
        if action.kind is ActionKind.BACKWARD:
            following = Action(action.stage + 1, ActionKind.FORWARD, action.micro_batch)
            for header in (False, True):
                if (sent := self._sent.pop((following, header), None)) is not None:
                    self._wait(sent, following.stage)
        return values

    def pass_over(self, action: Action, form: Form, patience_s: float | None) -> None:
        """Receive and drop the input of an action, in a step that has failed."""
        if action not in self._receiving:
            if action.kind is ActionKind.FORWARD:
                self.ask_for(action, form)
            elif (known := self._known.get((action.stage + 1, form))) is not None:
                self._receiving[action] = self._receive(action, *known)
            else:  # the forward had nothing to send either
                return
        with contextlib.suppress(NothingSent):
            self._receiving.pop(action)(patience_s)

    def send_nothing(self, action: Action, form: Form) -> None:
        """Send zeros in the place of an action's input, in a step that has failed, so that no rank waits for ever.

        Where the shape of activations is not known yet, the message with the shape says that nothing comes.
        """
        forward = action.kind is ActionKind.FORWARD
        if (known := self._known.get((action.stage if forward else action.stage + 1, form))) is not None:
            shape, dtype = known
            self.send(action, torch.zeros(shape, dtype=dtype, device=self._device))
        elif forward:
            header = torch.full((_HEADER,), _NOTHING, device=HOST)
            self._start_sending(action, header, header=True)

    def send(self, action: Action, values: Tensor, form: Form | None = None) -> None:
        """Start sending the input of an action of another rank. It is kept until it has arrived.

        Args:
            form: for activations, that of the micro-batch.
        """
        values = values.contiguous()
        if form is not None:
            sent = tuple(values.shape), values.dtype
            if (known := self._known.get((action.stage, form))) is None:
                self._known[action.stage, form] = sent
                self._start_sending(action, _written(*sent), header=True)
            elif known != sent:
                raise BadInput(
                    f"A stage of the pipeline returned activations of shape {list(sent[0])} and {sent[1]}, and before, "
                    f"for inputs of the same shapes, {list(known[0])} and {known[1]}: the next stage expects those. "
                    "Have shapes and dtypes inside of the model follow from those of its inputs, and not from values."
                )
        self._start_sending(action, values)

    def finish(self, patience_s: float | None = None) -> None:
        """Wait until all messages have been sent."""
        for (action, _), handle in self._sent.items():
            self._wait(handle, action.stage, patience_s)
        self._sent.clear()

    def abandon(self) -> None:
        """Drop the messages of a step that was abandoned."""
        self.given_up += 1
        self._sent.clear()
        self._receiving.clear()

    def begin(self, given_up: int) -> None:
        """Begin a step.

        Args:
            given_up: the most steps that any rank along the pipeline has abandoned. If it has grown, shapes are sent
                again, since other ranks may not have received them.
        """
        if given_up != self._begun:
            self._begun = self.given_up = given_up
            self._known.clear()

    def _start_sending(self, action: Action, values: Tensor, header: bool = False) -> None:
        with self._exchanged_with(action.stage):
            self._sent[action, header] = self._collectives.send(
                values, self._route_of(action), self._tag(action, header)
            )

    def _start_receiving(self, action: Action, into: Tensor, header: bool = False) -> Handle:
        with self._exchanged_with(self._source_of(action)):
            return self._collectives.receive(into, self._route_of(action), self._tag(action, header))

    def _receive(self, action: Action, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        into = torch.empty(shape, dtype=dtype, device=self._device)
        handle = self._start_receiving(action, into)

        def arrived(patience_s: float | None = None) -> Tensor:
            self._wait(handle, self._source_of(action), patience_s)
            return into

        return arrived

    def _receive_new(self, action: Action, form: Form, patience_s: float | None = None) -> Tensor:
        header = torch.empty(_HEADER, dtype=torch.int64, device=HOST)
        self._wait(self._start_receiving(action, header, header=True), self._source_of(action), patience_s)
        if header[0] == _NOTHING:
            raise NothingSent
        known = self._known[action.stage, form] = _read(header.tolist())
        return self._receive(action, *known)(patience_s)

    def _route_of(self, action: Action) -> MessageRoute:
        """The route of an action's input."""
        return MessageRoute(action.kind.value, self._source_of(action) % self.size, action.stage % self.size)

    def _source_of(self, action: Action) -> int:
        """The stage that an action's input comes from."""
        return action.stage + (-1 if action.kind is ActionKind.FORWARD else 1)

    def _between(self, stage: int) -> tuple[MessageRoute, MessageRoute]:
        """The routes of activations and of gradients between a stage and the next one."""
        return self._route_of(Action(stage + 1, ActionKind.FORWARD, 0)), self._route_of(
            Action(stage, ActionKind.BACKWARD, 0)
        )

    def _wait(self, handle: Handle, stage: int, patience_s: float | None = None) -> None:
        with self._exchanged_with(stage):
            handle.wait(patience_s)

    @contextlib.contextmanager
    def _exchanged_with(self, stage: int) -> Iterator[None]:
        """Names the rank of a stage where a message from it, or to it, finds that its process has ended."""
        try:
            yield
        except RuntimeError as error:
            rank = dist.get_global_rank(self._collectives.group, stage % self.size)
            raise LostRank(
                f"Rank {rank}, with whose stage a message was exchanged, has ended without a word, killed perhaps: see "
                "who ends processes there, and start all ranks again."
            ) from error

    def _tag(self, action: Action, header: bool = False) -> int:
        """A number that is unique among the messages of a step and of steps that were abandoned."""
        what = _HEADERS if header else _GRADIENTS if action.kind is ActionKind.BACKWARD else _ACTIVATIONS
        first = _OF_A_STEP * (self._begun % (len(ACTIVATIONS) // _OF_A_STEP))
        return ACTIVATIONS[first + _WHATS * (action.micro_batch * self._stages + action.stage) + what]


_OF_A_STEP = 2**20
"""Tags of a step; those of a step behind one that was given up are others."""
_ACTIVATIONS, _GRADIENTS, _HEADERS = range(_WHATS := 3)
"""What a message of one stage and micro-batch has."""


_HEADER, _DIMS, _NOTHING = 10, 8, -1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _written(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A shape and a dtype as numbers."""
    if dtype not in _DTYPES or len(shape) > _DIMS:
        raise BadInput(
            f"A stage of the pipeline returned a tensor of {dtype} with {len(shape)} dims: stages hand on floating-"
            f"point numbers of at most {_DIMS} dims. Let the pipeline be cut elsewhere, by tz.Pipeline(split=[...])."
        )
    return torch.tensor([len(shape), _DTYPES.index(dtype), *shape, *[0] * (_DIMS - len(shape))], device=HOST)


def _read(header: Sequence[int]) -> tuple[tuple[int, ...], torch.dtype]:
    """The reverse of `_written`."""
    dims, dtype, *sizes = header
    return tuple(sizes[:dims]), _DTYPES[dtype]
