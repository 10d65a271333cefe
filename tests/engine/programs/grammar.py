"""What a random program is, and how one is drawn from a seed.

Every field's default is its simplest value, so that a shrunk program prints as the few things that it still needs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

VOCABULARY = 11
TWO_AXES = ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")
PLANS = ("zero0", "zero1", "zero2", "zero3", "zero3", "zero3", "shard_grad_op", *TWO_AXES)
TIERS: dict[str, tuple[tuple[str, str], ...]] = {
    "device": (),
    "cpu": (("grad", "cpu"), ("optim", "cpu")),
    "cpu-all": (("weight", "cpu"), ("grad", "cpu"), ("optim", "cpu")),
    "nvme": (("grad", "cpu"), ("optim", "nvme")),
    "nvme-all": (("weight", "nvme"), ("grad", "cpu"), ("optim", "nvme")),
    "shares": (("weight", "cpu:0.5"), ("grad", "nvme:0.5"), ("optim", "nvme:0.25,cpu:0.5")),
}
RETURNS = ("tensor", "view", "slice", "pair", "dict", "record", "object", "box")
ROUTES = ("drop", "drop together", "exit", "later", "inside", "repeat", "repeat together", "shuffle together")
INPLACE = ("add", "mul", "rows")
EDITS = ("clamp", "scale", "write", "data", "through data", "to", "replace", "load", "freeze")


class _Short:
    """Prints only the fields that are not at their defaults; is never copied, since it never changes."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@dataclass(frozen=True, repr=False)
class Node(_Short):
    """One module of the tree: a leaf with parameters, or with children.

    Attributes:
        kind: of a leaf: mlp, prelu, norm; of a node with children: stack, or experts, which share out the rows.
        unit: whether it is gathered and reduced as one.
        returns: how its output comes back: see `model.wrap`. "box" returns None and writes into an argument.
        edit: how the caller changes its output in place.
        aux: where its auxiliary loss goes: output, attribute, tape (a list that the caller handed in).
        call: plain, or by torch.utils.checkpoint: checkpoint, reentrant.
        frozen: its first matrix is not trained.
        own: it has a parameter beside its children's.
        route: which children run, and in which order; see `model.route`.
    """

    kind: str = "mlp"
    unit: bool = True
    returns: str = "tensor"
    edit: str = ""
    aux: str = ""
    call: str = "plain"
    frozen: bool = False
    own: bool = False
    route: str = "all"
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, repr=False)
class Optim(_Short):
    """An optimizer. `every`: it steps in each so manyeth step only."""

    kind: str = "sgd"
    groups: int = 1
    every: int = 1


@dataclass(frozen=True, repr=False)
class Edit(_Short):
    """A change of the weights by hand, after a step (-1: before the first one) to one leaf's first matrix."""

    step: int = 0
    kind: str = "write"
    leaf: int = 0


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A training run.

    Attributes:
        replicas: of a mesh with two axes; None for one axis.
        ties: pairs of leaves: the second one has the first one's matrix, or is the same module ("module").
        output: of the model: tensor, dict, loss (computed inside), none (put aside in an attribute).
        penalty: a loss on the weights themselves: computed "inside" the model's forward, or "outside".
        forwards: of the model before one backward.
        clip: by whom: "", terrazzo, torch, torch value, hand (gradients scaled through `.grad`).
        norm_type: of the norm; 0 stands for the maximum.
        zero: how gradients are forgotten: none, model, zeros, never.
        left_out: parameters outside the tree are in no optimizer.
        beside: what happens between steps: evaluate, discard (a forward whose backward never comes).
    """

    seed: int = 0
    world: int = 2
    replicas: int | None = None
    plan: str = "zero3"
    tier: str = "device"
    offload_step: str = "overlapped"
    precision: str = "fp32"
    prefetch: int = 1
    recompute: str = "none"
    width: int = 5
    tree: Node = Node("stack", unit=False, children=(Node(),))
    ties: tuple[tuple[int, int, str], ...] = ()
    tied_head: bool = False
    output: str = "tensor"
    penalty: str = ""
    optimizers: tuple[Optim, ...] = (Optim(),)
    left_out: bool = False
    steps: int = 3
    micro_batches: int = 1
    local: bool | None = None
    forwards: int = 1
    clip: str = ""
    norm_type: float = 2.0
    zero: str = "none"
    edits: tuple[Edit, ...] = ()
    beside: str = ""


def nodes(node: Node, path: str = "tree") -> Iterator[tuple[str, Node]]:
    """Every node with the name of its module, outer ones first."""
    yield path, node
    for index, child in enumerate(node.children):
        yield from nodes(child, f"{path}.parts.{index}")


def leaves(node: Node) -> list[tuple[str, Node]]:
    return [(path, found) for path, found in nodes(node) if not found.children]


# -- drawing ---------------------------------------------------------------------------------------------------


def draw(seed: int, world: int | None = None) -> Program:
    """The program of a seed; `world` fixes the number of ranks."""
    rng = random.Random(seed)
    world = world or rng.choice((2, 2, 2, 2, 3, 4))
    plan, replicas = _placement(rng, world)
    tier = _rarely(rng, 0.4, tuple(TIERS)[1:], "device")
    tree = _tree(rng, depth=0)
    count = len(leaves(tree))
    clip = _rarely(rng, 0.4, ("terrazzo",) * 5 + ("torch",) * 3 + ("torch value", "hand"), "")
    left_out = rng.random() < 0.05 and not clip  # gradients that no optimizer forgets would count in the norm
    ties = _ties(rng, count)
    optimizers = tuple(_optimizer(rng) for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 3))))
    offload_step = rng.choice(("overlapped", "overlapped", "synchronous", "backward")) if tier != "device" else ""
    if offload_step == "backward" and (clip or any(optimizer.every > 1 for optimizer in optimizers)):
        offload_step = "overlapped"  # the former leaves no room for them
    whole = plan in ("zero0", "zero1")
    steps = rng.choice((2, 2, 3))
    return Program(
        seed=seed,
        world=world,
        replicas=replicas,
        plan=plan,
        tier=tier,
        offload_step=offload_step or "overlapped",
        precision=_rarely(rng, 0.25, ("bf16",), "fp32"),
        prefetch=rng.choice((0, 1, 1, 2)),
        recompute=_rarely(rng, 0.15, ("full", "selective"), "none"),
        width=rng.choice((4, 5, 7, 9)),
        tree=tree,
        ties=ties,
        tied_head=rng.random() < 0.2,
        output=_rarely(rng, 0.3, ("dict", "loss", "loss", "none"), "tensor"),
        penalty=_rarely(rng, 0.06, ("inside", "outside"), ""),
        optimizers=optimizers,
        left_out=left_out,
        steps=steps,
        micro_batches=rng.choice((1, 1, 1, 2)),
        local=rng.choice((None, True) if whole else (None, True, False)),
        forwards=_rarely(rng, 0.1, (2,), 1),
        clip=clip,
        norm_type=rng.choice((2.0, 2.0, 1.0, 0.0)),
        zero=_rarely(rng, 0.3, ("model", "zeros", "never"), "none"),
        edits=_edits(rng, steps, ties, count),
        beside=_rarely(rng, 0.3, ("evaluate", "evaluate", "discard"), ""),
    )


def _rarely(rng: random.Random, share: float, choices: Sequence[Any], usually: Any) -> Any:
    return rng.choice(choices) if rng.random() < share else usually


def _placement(rng: random.Random, world: int) -> tuple[str, int | None]:
    if world == 4:
        plan = rng.choice(PLANS)
        return plan, 2 if plan in TWO_AXES else _rarely(rng, 0.3, (2,), None)
    return rng.choice([plan for plan in PLANS if plan not in TWO_AXES]), None


def _tree(rng: random.Random, depth: int) -> Node:
    if depth == 3 or (depth > 0 and rng.random() < 0.75):
        return _leaf(rng)
    children = tuple(_tree(rng, depth + 1) for _ in range(rng.choice((1, 2, 3, 4) if depth == 0 else (1, 2, 2))))
    kind = _rarely(rng, 0.2, ("experts",), "stack") if len(children) > 1 else "stack"
    node = Node(kind, unit=depth > 0 and rng.random() < 0.4, children=children, own=rng.random() < 0.3)
    if depth:
        node = replace(node, returns=_rarely(rng, 0.2, RETURNS[1:], "tensor"), edit=_rarely(rng, 0.1, INPLACE, ""))
    return replace(
        node, route="all" if kind == "experts" else _rarely(rng, 0.5, (*ROUTES, *ROUTES, *ROUTES, "shuffle"), "all")
    )


def _leaf(rng: random.Random) -> Node:
    returns = _rarely(rng, 0.4, RETURNS[1:], "tensor")
    edit = _rarely(rng, 0.2, INPLACE, "")
    aux = "" if edit else _rarely(rng, 0.15, ("output", "attribute", "tape"), "")  # its square would need the output
    if aux == "output" and returns in ("view", "slice", "box"):
        aux = "tape"
    simple = returns in ("tensor", "view", "slice") and not aux
    calls = ("checkpoint", "reentrant") if simple else ("checkpoint",)
    return Node(
        kind=rng.choice(("mlp", "mlp", "prelu", "norm")),
        unit=rng.random() < 0.8,
        returns=returns,
        edit=edit,
        aux=aux,
        call=_rarely(rng, 0.1, calls, "plain") if returns != "box" and aux != "tape" else "plain",
        frozen=rng.random() < 0.08,
    )


def _optimizer(rng: random.Random) -> Optim:
    kind = rng.choice(("sgd", "sgd", "adamw", "adamw", "adagrad", "rmsprop"))
    return Optim(kind, groups=_rarely(rng, 0.2, (2,), 1), every=_rarely(rng, 0.1, (2,), 1))


def _ties(rng: random.Random, count: int) -> tuple[tuple[int, int, str], ...]:
    if count < 2 or rng.random() > 0.25:
        return ()
    first, second = sorted(rng.sample(range(count), 2))
    return ((first, second, rng.choice(("weight", "weight", "module"))),)


def _edits(rng: random.Random, steps: int, ties: Sequence[tuple[int, int, str]], count: int) -> tuple[Edit, ...]:
    if rng.random() > 0.2:
        return ()
    number = rng.choice((1, 1, 2))
    edits = [
        Edit(rng.randrange(-1, steps - 1), rng.choice((*EDITS, "write", "load")), rng.randrange(count))
        for _ in range(number)
    ]
    tied = {leaf for first, second, _ in ties for leaf in (first, second)}
    return tuple(
        replace(edit, kind="data") if edit.kind == "replace" and edit.leaf in tied else edit  # it would undo the tie
        for edit in edits
    )
