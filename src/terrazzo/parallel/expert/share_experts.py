"""Gives each rank along `ep` its share of a model's experts: of modules with methods for it, and of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from terrazzo.engine import Box, Family, Record, leave_record, record_of, stages_of
from terrazzo.engine.consensus.equal_values import synchronize
from terrazzo.engine.mesh.axes import Axes
from terrazzo.errors import BadInput, Misuse
from terrazzo.marks import SHARES_EXPERTS
from terrazzo.messages import listed
from terrazzo.parallel.expert.dispatch import ExpertRanks, Experts
from terrazzo.parallel.expert.transformers_experts import looks_like_experts, stacked_experts
from terrazzo.parallel.local_parameters import check_replaceable, replaced_by_part, watch_states
from terrazzo.parallel.peft_adapters import adapted
from terrazzo.parallel.sharing_rules import shares_experts

__all__ = ["SharesExperts", "check_experts", "experts_of", "share_experts"]


@runtime_checkable
class SharesExperts(Protocol):
    """A module of experts that ranks can share."""

    def use_experts(self, experts: Experts) -> None:
        """Compute with this rank's experts from now on, on rows that `experts` brings."""

    def stacked(self) -> Sequence[str]:
        """Names of its own parameters `[experts, ...]`."""


def experts_of(model: nn.Module) -> dict[str, SharesExperts]:
    """The modules of experts of a model that ranks can share, by name."""
    by_name = {name: _sharing(module) for name, module in model.named_modules()}
    return {name: sharing for name, sharing in by_name.items() if sharing is not None}


def _sharing(module: nn.Module) -> SharesExperts | None:
    return module if isinstance(module, SharesExperts) else stacked_experts(module)


def check_experts(model: nn.Module, size: int) -> dict[str, int]:
    """How many experts each module has that ranks can share, by name.

    Raises:
        BadInput: a model without experts, or with some that ranks cannot share; with adapters; a number of them that
            `size` ranks do not divide; parameters that cannot be cut.
    """
    modules = experts_of(model)
    others = {name: each for name, each in model.named_modules() if looks_like_experts(each) and name not in modules}
    if others:
        classes = ", ".join(sorted({type(each).__name__ for each in others.values()}))
        raise BadInput(
            f"The mesh has ep {size}, and ranks cannot share the experts of {listed([*others])} ({classes}), "
            "which have neither the methods use_experts and stacked, nor are stacks of matrices [experts, ...], and "
            "nothing else, under transformers' use_experts_implementation. Leave ep out of the mesh."
        )
    if not modules:
        raise BadInput(
            f"The mesh has ep {size}, and {type(model).__name__} has no module of experts that ranks can share: one "
            "has the methods use_experts and stacked, as those of the built-in decoder (model.experts), or is one of "
            "transformers under use_experts_implementation. Leave ep out of the mesh."
        )
    if layers := adapted(model):
        raise BadInput(
            f"{listed(layers)}: adapters of peft, and ranks along ep {size} have not been tried with experts that are "
            "frozen beside them. Leave ep out of the mesh, or train without adapters."
        )
    counts: dict[str, int] = {}
    for name, sharing in modules.items():
        module = model.get_submodule(name)
        for attribute in sharing.stacked():
            if (record := record_of(module, attribute)) is not None and record.family is Family.EXPERT:
                raise Misuse(
                    f"'{name}.{attribute}' is shared by ranks along ep already: call tz.parallelize once, on a model "
                    "that is whole."
                )
            check_replaceable(name, module, attribute)
            count = getattr(module, attribute).shape[0]
            if counts.setdefault(name, count) != count or not shares_experts(count, size):
                raise BadInput(
                    f"'{name}.{attribute}' has {count} experts, of which {size} ranks (ep) cannot have as many each. "
                    f"Choose ep so that it divides {counts[name]}."
                )
    return counts


def share_experts(model: nn.Module, axes: Axes, counts: Mapping[str, int]) -> None:
    """Give each rank along `ep` its run of the experts of every module, in a model in stages of its own. Collective.

    Args:
        counts: from `check_experts`.
    """
    stages, modules = stages_of(model), experts_of(model)
    counts = {name: count for name, count in counts.items() if stages is None or stages.chunks_of(name)}
    ranks = ExpertRanks(axes, counts)
    for number, (name, sharing) in enumerate((name, modules[name]) for name in counts):
        module = model.get_submodule(name)
        stacked = {attribute: getattr(module, attribute) for attribute in sharing.stacked()}
        synchronize([each for each in stacked.values() if not each.is_meta], ranks.axes, ("ep",))
        experts = Experts(ranks, number, counts[name])
        run = (experts.local.start, experts.local.stop)
        for attribute, whole in stacked.items():
            record = Record(Family.EXPERT, Box.cut(whole.shape, 0, [run]))
            leave_record(module, attribute, record)
            module._parameters[attribute] = replaced_by_part(whole, record)
        watch_states(module, name)
        sharing.use_experts(experts)
    SHARES_EXPERTS.leave(model, ranks)
