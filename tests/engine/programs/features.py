"""What may be in a program: how to see it, how to leave it out, and whether the engine may refuse it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from tests.engine.programs.grammar import EDITS, Node, Program, nodes

KNOWN_FAILING: frozenset[str] = frozenset()
"""Features that the engine gets wrong now. The default test leaves them out; this is to become empty."""


@dataclass(frozen=True)
class Feature:
    """One thing that a program has or has not.

    Attributes:
        present: whether a program has it.
        without: the program without it.
        refusable: whether a `TerrazzoError` that names the unit or parameter is an answer to it.
    """

    present: Callable[[Program], bool]
    without: Callable[[Program], Program]
    refusable: bool = False


def _nodes(field: str, value: Any, plain: Any, refusable: bool = False) -> Feature:
    """Some node has this value of a field."""

    def cleared(node: Node) -> Node:
        children = tuple(cleared(child) for child in node.children)
        changes = {field: plain} if getattr(node, field) == value else {}
        return replace(node, children=children, **changes)

    return Feature(
        lambda program: any(getattr(node, field) == value for _, node in nodes(program.tree)),
        lambda program: replace(program, tree=cleared(program.tree)),
        refusable,
    )


def _is(field: str, value: Any, plain: Any, refusable: bool = False) -> Feature:
    return Feature(
        lambda program: getattr(program, field) == value,
        lambda program: replace(program, **{field: plain}),
        refusable,
    )


def _edited(kind: str) -> Feature:
    return Feature(
        lambda program: any(edit.kind == kind for edit in program.edits),
        lambda program: replace(program, edits=tuple(edit for edit in program.edits if edit.kind != kind)),
        refusable=kind not in ("write", "load"),
    )


def _optimizers(present: Callable[[Program], bool], **changes: Any) -> Feature:
    def without(program: Program) -> Program:
        return replace(program, optimizers=tuple(replace(optim, **changes) for optim in program.optimizers))

    return Feature(present, without)


def _aliased(what: str) -> Feature:
    return Feature(
        lambda program: any(tie[2] == what for tie in program.ties), lambda program: replace(program, ties=())
    )


FEATURES: dict[str, Feature] = {
    **{f"returns {kind}": _nodes("returns", kind, "tensor") for kind in ("view", "slice", "pair", "dict")},
    **{f"returns {kind}": _nodes("returns", kind, "tensor") for kind in ("record", "object", "box")},
    **{f"output edited: {kind}": _nodes("edit", kind, "") for kind in ("add", "mul", "rows")},
    "view edited": Feature(
        lambda program: any(node.edit and node.returns in ("view", "slice") for _, node in nodes(program.tree)),
        lambda program: replace(program, tree=_unedited_views(program.tree)),
    ),
    **{f"auxiliary loss by {way}": _nodes("aux", way, "") for way in ("output", "attribute", "tape")},
    "called by checkpoint": _nodes("call", "checkpoint", "plain"),
    "called by reentrant checkpoint": _nodes("call", "reentrant", "plain"),
    "frozen": _nodes("frozen", True, False),
    "experts": _nodes("kind", "experts", "stack"),
    "nested unit": Feature(
        lambda program: any(node.unit and node.children for _, node in nodes(program.tree)),
        lambda program: replace(program, tree=_outer_units_off(program.tree)),
    ),
    **{f"route {kind}": _nodes("route", kind, "all") for kind in ("drop", "drop together", "exit", "later", "inside")},
    **{f"route {kind}": _nodes("route", kind, "all") for kind in ("repeat", "repeat together", "shuffle together")},
    "route shuffle": _nodes("route", "shuffle", "all", refusable=True),
    "tied matrix": _aliased("weight"),
    "shared module": _aliased("module"),
    "tied head": _is("tied_head", True, False),
    **{f"model returns {kind}": _is("output", kind, "tensor") for kind in ("dict", "loss", "none")},
    **{f"penalty {where}": _is("penalty", where, "", refusable=True) for where in ("inside", "outside")},
    "several optimizers": Feature(
        lambda program: len(program.optimizers) > 1,
        lambda program: replace(program, optimizers=program.optimizers[:1]),
    ),
    "several optimizers, offloaded": Feature(
        lambda program: len(program.optimizers) > 1 and program.tier != "device",
        lambda program: replace(program, optimizers=program.optimizers[:1]),
        refusable=True,
    ),
    "param groups": _optimizers(lambda program: any(optim.groups > 1 for optim in program.optimizers), groups=1),
    "an optimizer pauses": _optimizers(lambda program: any(optim.every > 1 for optim in program.optimizers), every=1),
    "not plain SGD": Feature(
        lambda program: any(optim.kind != "sgd" for optim in program.optimizers),
        lambda program: replace(program, optimizers=tuple(replace(o, kind="sgd") for o in program.optimizers)),
    ),
    "left out": _is("left_out", True, False, refusable=True),
    **{f"clipped by {who}": _is("clip", who, "") for who in ("terrazzo", "torch")},
    **{f"clipped by {who}": _is("clip", who, "", refusable=True) for who in ("torch value", "hand")},
    **{f"zeroed by {way}": _is("zero", way, "none") for way in ("model", "zeros", "never")},
    **{f"edit {kind}": _edited(kind) for kind in EDITS},
    "evaluation between": _is("beside", "evaluate", ""),
    "discarded forward": _is("beside", "discard", ""),
    "two forwards": _is("forwards", 2, 1),
    "micro-batches": Feature(lambda program: program.micro_batches > 1, lambda p: replace(p, micro_batches=1)),
    "recompute full": _is("recompute", "full", "none"),
    "recompute selective": _is("recompute", "selective", "none"),
    "None recomputed": Feature(
        lambda p: p.recompute != "none" and any(node.returns == "box" for _, node in nodes(p.tree)),
        lambda p: replace(p, recompute="none"),
        refusable=True,
    ),
    "unannounced loss recomputed": Feature(
        lambda p: p.recompute != "none" and any(node.aux == "tape" for _, node in nodes(p.tree)),
        lambda p: replace(p, recompute="none"),
        refusable=True,
    ),
    "bf16": _is("precision", "bf16", "fp32"),
    "two axes": Feature(
        lambda program: program.replicas is not None,
        lambda program: replace(program, replicas=None, plan=_ONE_AXIS.get(program.plan, program.plan)),
    ),
    "offloaded": Feature(lambda program: program.tier != "device", lambda program: replace(program, tier="device")),
    "offload step backward": _is("offload_step", "backward", "overlapped", refusable=True),
    "offload step synchronous": _is("offload_step", "synchronous", "overlapped"),
}
_ONE_AXIS = {"hybrid_shard": "zero3", "hybrid_shard_zero2": "shard_grad_op", "hfsdp": "zero3", "hpz": "zero3"}


def _outer_units_off(node: Node) -> Node:
    children = tuple(_outer_units_off(child) for child in node.children)
    return replace(node, children=children, unit=node.unit and not children)


def _unedited_views(node: Node) -> Node:
    children = tuple(_unedited_views(child) for child in node.children)
    return replace(node, children=children, edit="" if node.returns in ("view", "slice") else node.edit)


def features_of(program: Program) -> list[str]:
    return [name for name, feature in FEATURES.items() if feature.present(program)]


def without(program: Program, names: Collection[str]) -> Program:
    for name in names:
        if FEATURES[name].present(program):
            program = FEATURES[name].without(program)
    return program


def refusable(program: Program) -> bool:
    """Whether the engine may answer with an error."""
    return any(feature.refusable and feature.present(program) for feature in FEATURES.values())
