"""What a user may do with a sharded model, and when: one table. A test does each of it, and a page shows it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ACTS", "Answer", "Moment", "Plans"]


class Moment(enum.StrEnum):
    """When something is done."""

    BETWEEN = "between steps"
    BEFORE_BACKWARD = "between forward and backward"
    BEFORE_STEP = "between backward and step"
    BEHIND_STEP = "between step and the next forward"
    GATHERED = "in `tz.gathered(model)`"
    WRITING = "in `tz.gathered(model, write=True)`"


class Plans(enum.StrEnum):
    """Under which plans."""

    WHOLE = "weights whole (`zero0` to `zero2`)"
    SPLIT = "weights split (`zero3`)"


class Answer(enum.StrEnum):
    """What comes of it; by its letter in a row of the table."""

    DONE = "d"
    REFUSED = "r"
    LATER = "l"
    NEVER = "n"

    @property
    def text(self) -> str:
        """As the page has it."""
        return {"d": "as in PyTorch", "r": "raises", "l": "raises later", "n": "raises in PyTorch, too"}[self]


@dataclass(frozen=True)
class Act:
    """Something that is done to a model or its optimizer on every rank.

    Attributes:
        code: as a user writes it.
        whole, split: what comes of it under plans that keep weights whole and that split them: a letter for each
            moment, or one for all.
        updating: while weights are whole and `optim` is away from the device, between step and the next forward.
        by: the module that answers.
        note: what else is to be known.
    """

    code: str
    whole: str
    split: str
    by: str
    updating: Answer | None = None
    note: str = ""

    def answers(self, plans: Plans) -> Mapping[Moment, Answer]:
        """What comes of it at each moment."""
        letters = self.whole if plans is Plans.WHOLE else self.split
        each = letters * len(Moment) if len(letters) == 1 else letters
        return {moment: Answer(letter) for moment, letter in zip(Moment, each, strict=True)}

    @property
    def is_timeless(self) -> bool:
        """Whether the moment makes no difference."""
        return len(self.whole) == len(self.split) == 1


_REFUSED, _DONE = Answer.REFUSED, Answer.DONE
_WAITS = "`tz.Offload(step='synchronous')` lets it be done there, too."
_NO_TRACE = "What numpy or DLPack holds, and 16 bits seen as integers, leave no trace: write through the parameter."
_TRACED = "With `rounding='remainder'` it is `p.detach()`, and backward refuses what it needs and was written to."
_WHOLE = (
    "Whole on every rank; collective where weights are split, or kept in 16 bits beside masters, which then are in it."
)
_STATES = "States of whole parameters, as `torch.optim` has them. Collective."

ACTS: Mapping[str, Act] = {
    "measure": Act(
        "p.norm(), p.isnan().any()", "dddddd", "dddddd", "interception/measuring/measured", _REFUSED, "Collective."
    ),
    "read": Act("p.detach().clone(), p[0]", "dddddd", "rdrrdd", "buckets/parameters/at_rest", _REFUSED, _WAITS),
    "write": Act(
        "p.mul_(0.9) under torch.no_grad()", "dndddd", "rnrrld", "buckets/parameters/edits", _REFUSED, _NO_TRACE
    ),
    "write-data": Act("p.data.mul_(0.9)", "dddddd", "rlrrld", "buckets/parameters/edits", _REFUSED, _TRACED),
    "other-data": Act(
        "p.data = other",
        *("dddddd", "rlrrld", "buckets/parameters/edits", _REFUSED),
        "Views of what it had keep their values. Two parameters cannot be given one memory.",
    ),
    "groups": Act(
        "for group in optimizer.param_groups: group['params'][0].mul_(0.9)",
        *("dndddd", "rnrrld", "optim/driver", _REFUSED),
        "They are the model's parameters, but inside the optimizer's step.",
    ),
    "freeze": Act("p.requires_grad_(False)", "l", "l", "buckets/parameters/edits"),
    "replace": Act("module.weight = nn.Parameter(...)", "l", "l", "buckets/parameters/edits"),
    "register": Act("module.prompt = nn.Parameter(...)", "l", "l", "hooks/module_tree", note="On several ranks."),
    "add": Act(
        "model.block = nn.Sequential(model.block, adapter)",
        *("l", "l", "hooks/module_tree"),
        note="On several ranks. Modules that are moved or wrapped: a warning, since names in state dicts stay.",
    ),
    "give-grad": Act(
        "p.grad = tensor",
        *("ddlddd", "ddlddd", "interception/gradients/grad_edits", _DONE),
        "Before a backward, which adds to it, as in PyTorch; but in fp16, or with a gradient denominator, that raises.",
    ),
    "drop-grad": Act(
        "p.grad = None",
        *("d", "d", "interception/gradients/grad_edits"),
        note="On every rank: else the next backward raises `RanksApart`.",
    ),
    "change-grad": Act(
        "p.grad.mul_(0.5), p.grad.sign_(), p.grad.zero_()",
        *("d", "d", "interception/gradients/gradient_stand_in"),
        note="Finished ones, and on every rank: else the next backward raises `RanksApart`.",
    ),
    "take-grad": Act(
        "torch.autograd.grad(model(x).sum(), [p])",
        *("dddddd", "dddddr", "buckets/parameters/wanted_gradients"),
        updating=_DONE,
        note="This rank's own, whole, in the dtype that is computed in; in fp16 it raises. On every rank.",
    ),
    "wanted": Act(
        "model(x).sum().backward(inputs=[p])",
        *("dddddd", "dddddr", "buckets/parameters/wanted_gradients"),
        updating=_DONE,
        note="The mean over ranks, as `backward()` makes it of all: DDP would leave each its own. On every rank.",
    ),
    "clip": Act(
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "d", "d", "interception/gradients/gradient_stand_in"
    ),
    "states": Act(
        "for kept in optimizer.state.values(): kept['exp_avg'].zero_()",
        *("d", "d", "interception/sharded_optimizer"),
        note="On drives it raises. Ask for `optimizer.state` anew each time: that waits for updates under way.",
    ),
    "state-of": Act("optimizer.state[p]", "r", "r", "interception/sharded_optimizer"),
    "give-state": Act("optimizer.state[p] = kept", "r", "r", "interception/sharded_optimizer"),
    "state-dict": Act("model.state_dict()", "dddddd", "dddddd", "interception/sharded_module", _DONE, _WHOLE),
    "load": Act("model.load_state_dict(state)", "dndddd", "dndddr", "interception/sharded_module", _DONE),
    "save-optimizer": Act(
        "optimizer.state_dict()", "dddddd", "dddddd", "interception/sharded_optimizer", _DONE, _STATES
    ),
    "load-optimizer": Act(
        "optimizer.load_state_dict(state)", "dddddd", "dddddr", "interception/sharded_optimizer", _DONE, _STATES
    ),
    "copy-model": Act("copy.deepcopy(model)", "r", "r", "interception/sharded_module"),
    "copy-optimizer": Act(
        "copy.deepcopy(optimizer), torch.save(optimizer, file)", "r", "r", "interception/sharded_optimizer"
    ),
    "copy-module": Act(
        "copy.deepcopy(model.block)",
        *("dddddd", "rdrrdd", "hooks/forward_hooks", _REFUSED),
        "The copy is an ordinary module.",
    ),
    "buffer": Act("buffer.mul_(0.5)", "d", "d", "torch"),
    "forward": Act("model(x) under torch.no_grad()", "dddddd", "dddddr", "hooks/forward_hooks", _DONE),
}
