"""Makes a failing program small: what can be left out while it fails in the same way is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.engine.programs.compare import Verdict
from tests.engine.programs.features import FEATURES, features_of
from tests.engine.programs.grammar import Node, Program, leaves

PLAIN = {"world": 2, "prefetch": 1, "width": 5, "plan": "zero3", "local": None, "norm_type": 2.0}


def shrink(
    program: Program, judge: Callable[[Program], Verdict], budget_s: float = 30.0, exact: bool = True
) -> tuple[Program, Verdict]:
    """The smallest program found that fails like this one, and its verdict.

    Args:
        exact: the label of the verdict must stay the same, not only its kind.
    """
    deadline = time.monotonic() + budget_s
    verdict = judge(program)
    tried = {program}
    found = True
    while found:
        found = False
        for smaller in simpler(program):
            if smaller in tried or time.monotonic() > deadline:
                continue
            tried.add(smaller)
            other = judge(smaller)
            if other.kind == verdict.kind and (not exact or other.label == verdict.label):
                program, verdict, found = smaller, other, True
                break
    return program, verdict


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    for tree in fewer(program.tree):
        if tree.children:
            yield from _with_tree(program, tree)
    for name in features_of(program):
        yield FEATURES[name].without(program)
    if program.steps > 1:
        steps = program.steps - 1
        yield replace(program, steps=steps, edits=tuple(edit for edit in program.edits if edit.step < steps))
    if len(program.edits) > 1:
        yield from (replace(program, edits=(edit,)) for edit in program.edits)
    if len(program.optimizers) > 1:
        yield replace(program, optimizers=program.optimizers[1:])
    for field, value in PLAIN.items():
        if getattr(program, field) != value and not (program.replicas and field in ("world", "plan")):
            yield replace(program, **{field: value})
    for name in ("own", "unit"):
        yield from _with_tree(program, _all(program.tree, name))


def fewer(node: Node) -> Iterator[Node]:
    """The tree without one of its nodes, or with one node's children in its place."""
    for index, child in enumerate(node.children):
        before, after = node.children[:index], node.children[index + 1 :]
        if before or after:
            yield replace(node, children=before + after)
        if child.children:
            yield replace(node, children=before + child.children + after)
        yield from (replace(node, children=(*before, smaller, *after)) for smaller in fewer(child))


def _with_tree(program: Program, tree: Node) -> Iterator[Program]:
    count = len(leaves(tree))
    yield replace(program, tree=tree, ties=tuple(tie for tie in program.ties if max(tie[:2]) < count))


def _all(node: Node, field: str) -> Node:
    """No node with a parameter of its own; or every leaf a unit, and nothing else."""
    children = tuple(_all(child, field) for child in node.children)
    return replace(node, children=children, **{field: field == "unit" and not children})
