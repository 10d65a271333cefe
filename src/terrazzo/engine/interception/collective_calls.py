"""Calls that are of all ranks, under names which plain PyTorch lets one rank alone call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from terrazzo.engine.buckets.unit_layout import weights_are_split
from terrazzo.engine.comm.transfer import Moves, Transfer
from terrazzo.engine.labels.label import Label, collective_call, labelled
from terrazzo.engine.model.engine import Engine
from terrazzo.errors import ConnectionLost, RanksApart, TimedOut

__all__ = ["giving_states", "on_every_rank", "taking_states"]


def giving_states(call: str) -> Label:
    """Declare a call that gives states, such as `model.state_dict()`."""
    how = f"'state = {call}' and then 'if dist.get_rank() == 0: torch.save(state, path)'"
    return _of_all(call, f"and leave to the first alone what is done with the result, as in {how}")


def taking_states(call: str) -> Label:
    """Declare a call that takes states, such as `model.load_state_dict(state)`."""
    return _of_all(call, "with the same state dict")


def _of_all(call: str, how: str) -> Label:
    return collective_call(call, f"{call} is of all ranks: call it on every rank, {how}.")


@contextlib.contextmanager
def on_every_rank(engine: Engine, call: Label) -> Iterator[None]:
    """All ranks meet here, each about to make `call`. What is raised where one is not says that it is of all.

    A rank that has gone on is at the first exchange of a step: a gather where weights are split, else a sum. Ranks meet
    in one of that kind, whose messages say what they are for.

    Raises:
        RanksApart: where others are elsewhere, here or inside.
        ConnectionLost: where one of them has ended.
        TimedOut: where one does not come.
    """
    axes, gathers = engine.axes, weights_are_split(engine.units)
    try:
        for axis in axes.live(axes.within_replica):
            links = axes.along(axis)
            numbers = torch.zeros(links.size, device=axes.device)
            moves: Moves[Tensor] = (
                links.all_gather(numbers) if gathers else links.reduce_scatter(numbers, numbers.dtype)
            )
            Transfer(moves, call).finish()
        with labelled(call):
            yield
    except (RanksApart, ConnectionLost, TimedOut) as error:
        if call.edit in str(error):
            raise
        told = type(error)(f"{call.edit} {error}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from None
