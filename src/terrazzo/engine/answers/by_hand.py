"""What is said of a `.grad` that users have set, and that the engine cannot take."""

from __future__ import annotations

from terrazzo.engine.partition import Member
from terrazzo.errors import Misuse

__all__ = ["put_back", "set_before", "set_by_hand"]


def set_by_hand(member: Member) -> Misuse:
    """Behind a backward, where it would change nothing."""
    return Misuse(
        f"The .grad of {member.name!r} was replaced by a tensor, by hand or before tz.shard, and no step would use it: "
        "the gradients of a sharded model are in memory of the engine, where backward() puts them. Change those in "
        "place (mul_, div_, zero_), or before backward with parameter.register_hook; optimizer.zero_grad() forgets "
        "this one."
    )


def set_before(member: Member) -> Misuse:
    """Before a backward that adds to it what has been multiplied."""
    return Misuse(
        f"The .grad of {member.name!r} was set to a tensor before backward, which adds to it: the sum would be divided "
        "by fp16's loss scale, or by what set_gradient_denominator was given. Add that term to the loss, inside the "
        "model's forward, and call optimizer.zero_grad(); or train in bf16 without a denominator."
    )


def put_back(member: Member) -> Misuse:
    """A stand-in that has been kept, whose gradient is gone."""
    return Misuse(
        f"The .grad of {member.name!r} was put back after its gradient had been forgotten, by zero_grad() say: it "
        "stands for what the engine holds, and holds no values itself. Run backward again, or leave zero_grad() out "
        "until behind optimizer.step()."
    )
