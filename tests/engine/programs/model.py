"""The module of a program, and the data, routes and losses of each rank and step. Plain torch: both sides use it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.programs.grammar import VOCABULARY, Node, Program, leaves, nodes

ROWS = 6
AUX_WEIGHT, PENALTY_WEIGHT = 0.3, 0.01


@dataclass(frozen=True)
class When:
    """One forward of one rank."""

    rank: int
    step: int
    micro: int = 0
    forward: int = 0


@dataclass
class Moment:
    """What the modules are told of a forward.

    Attributes:
        routes: for each node with children, what to run: (child, whether it only hands its input on); or each row's
            child.
        tape: auxiliary losses of nodes that write them here.
    """

    routes: dict[str, Sequence[Any]]
    tape: list[Tensor] = field(default_factory=list)


def moment_of(program: Program, when: When) -> Moment:
    return Moment({path: route(program, path, node, when) for path, node in nodes(program.tree) if node.children})


def route(program: Program, path: str, node: Node, when: When) -> Sequence[Any]:
    """What runs of a node's children; random for each rank, unless "together", and for each forward."""
    who = -1 if node.route.endswith("together") else when.rank
    rng = random.Random(f"{program.seed} {path} {who} {when.step} {when.micro} {when.forward}")
    every = list(range(len(node.children)))
    if node.kind == "experts":
        return [rng.choice(every) for _ in range(ROWS)]
    if node.route.startswith("drop"):
        every = [child for child in every if rng.random() < 0.6]
    elif node.route == "exit":
        every = every[: rng.randint(0, len(every))]
    elif node.route == "later":
        every = every[::2] if when.step == 0 else [child for child in every if rng.random() < 0.8]
    elif node.route.startswith("shuffle"):
        rng.shuffle(every)
    elif node.route == "repeat":
        every = [child for child in every for _ in range(rng.randint(0, 3))]
    elif node.route == "repeat together":
        every = every * rng.randint(1, 2)
    return [(child, node.route == "inside" and rng.random() < 0.4) for child in every]


@dataclass
class Record:
    x: Tensor
    aux: Tensor | None


class Opaque:
    """An output of a kind that nobody knows how to look into."""

    def __init__(self, x: Tensor, aux: Tensor | None) -> None:
        self.hidden = (x, aux)


def wrap(returns: str, y: Tensor, aux: Tensor | None, box: dict[str, Any]) -> Any:
    """A node's output as the node returns it."""
    if returns == "view":
        return y.unsqueeze(0).view(y.shape)
    if returns == "slice":
        return torch.cat([y, y], 1)[:, : y.shape[1]]
    if returns == "tensor":
        return y if aux is None else (y, aux)
    if returns == "box":
        box["out"] = y
        return None
    kinds: dict[str, Any] = {"pair": lambda y, aux: (y, aux), "dict": lambda y, aux: {"x": y, "aux": aux}}
    kinds |= {"record": Record, "object": Opaque}
    return kinds[returns](y, aux)


def unwrap(output: Any, box: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The output and the auxiliary loss of what a node has returned."""
    if output is None:
        return box["out"], None
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, dict):
        return output["x"], output["aux"]
    if isinstance(output, Record):
        return output.x, output.aux
    return output.hidden if isinstance(output, Opaque) else output


class Part(nn.Module):
    """A node of the tree."""

    def __init__(self, node: Node, path: str) -> None:
        super().__init__()
        self.node, self.path = node, path
        self.said: Tensor | None = None

    def forward(self, x: Tensor | None, moment: Moment, box: dict[str, Any], idle: bool) -> Any:
        x = box["in"] if x is None else x
        y = x if idle else self.computed(x, moment)
        aux = y.square().mean() if self.node.aux and not idle else None
        if self.node.aux == "attribute":
            self.said, aux = aux, None
        elif self.node.aux == "tape" and aux is not None:
            moment.tape.append(aux)
            aux = None
        return wrap(self.node.returns, y, aux, box)

    def computed(self, x: Tensor, moment: Moment) -> Tensor:
        raise NotImplementedError


class Leaf(Part):
    """A residual block of odd sizes."""

    def __init__(self, node: Node, path: str, width: int) -> None:
        super().__init__(node, path)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.act = nn.PReLU() if node.kind == "prelu" else nn.ReLU()
        self.norm = nn.LayerNorm(width) if node.kind == "norm" else nn.Identity()
        self.up.weight.requires_grad_(not node.frozen)

    def computed(self, x: Tensor, moment: Moment) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Inner(Part):
    """A node with children: one after the other, or each for some of the rows."""

    def __init__(self, node: Node, path: str, width: int) -> None:
        super().__init__(node, path)
        self.parts = nn.ModuleList(part_of(child, f"{path}.parts.{i}", width) for i, child in enumerate(node.children))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width)) if node.own else None

    def computed(self, x: Tensor, moment: Moment) -> Tensor:
        x = x if self.scale is None else x * self.scale
        plan = moment.routes[self.path]
        if self.node.kind == "stack":
            for child, idle in plan:
                x = self.call(child, x, moment, idle)
            return x
        out, plan = x, plan[: len(x)]
        for child in sorted(set(plan)):
            rows = torch.tensor([row for row, chosen in enumerate(plan) if chosen == child])
            out = out.index_copy(0, rows, self.call(child, x[rows], moment, idle=False))
        return out

    def call(self, index: int, x: Tensor, moment: Moment, idle: bool) -> Tensor:
        child: Any = self.parts[index]
        node, box = child.node, {"in": x}
        argument = None if node.returns == "box" else x
        if node.call == "plain" or not torch.is_grad_enabled():
            output = child(argument, moment, box, idle)
        else:
            output = checkpoint(child, argument, moment, box, idle, use_reentrant=node.call == "reentrant")
        y, aux = unwrap(output, box)
        if aux is not None:
            moment.tape.append(aux)
        return y if y.data_ptr() == x.data_ptr() else edited(y, node.edit)  # an input stays as it is


def edited(y: Tensor, edit: str) -> Tensor:
    """`y`, changed in place by its reader."""
    if edit == "add":
        return y.add_(0.25)
    if edit == "mul":
        return y.mul_(0.75)
    if edit == "rows":
        y[:1] = 0.5
    return y


def part_of(node: Node, path: str, width: int) -> Part:
    return Inner(node, path, width) if node.children else Leaf(node, path, width)


class Net(nn.Module):
    """Embedding, the tree, a head. Takes token ids [ROWS]."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Embedding(VOCABULARY, program.width)
        self.tree = part_of(program.tree, "tree", program.width)
        self.head = nn.Linear(program.width, VOCABULARY)
        self.kept: Tensor | None = None
        if program.tied_head:
            self.head.weight = self.embed.weight
        paths = [path for path, _ in leaves(program.tree)]
        for first, second, what in program.ties:
            self._tie(paths[first], paths[second], what)

    def _tie(self, first: str, second: str, what: str) -> None:
        source = self.get_submodule(first)
        if what == "module":
            holder, _, name = second.rpartition(".")
            setattr(self.get_submodule(holder), name, source)
        else:
            self.get_submodule(second).up.weight = source.up.weight

    def forward(self, tokens: Tensor, moment: Moment) -> Any:
        box = {"in": self.embed(tokens)}
        x, aux = unwrap(self.tree(box["in"], moment, box, False), box)
        if aux is not None:
            moment.tape.append(aux)
        logits = self.head(x)
        if self.program.penalty == "inside":
            moment.tape.append(PENALTY_WEIGHT * penalty(self))
        if self.program.output == "loss":
            return token_loss(logits, tokens)
        if self.program.output == "none":
            self.kept = logits
            return None
        return logits if self.program.output == "tensor" else {"logits": logits, "nothing": None}


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([parameter.float().square().sum() for parameter in model.parameters()]).sum()


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), tokens.roll(-1))


def tokens_of(program: Program, when: When) -> Tensor:
    rng = random.Random(f"{program.seed} tokens {when}")
    return torch.tensor([rng.randrange(VOCABULARY) for _ in range(ROWS)])


def build(program: Program) -> Net:
    """The model before training; uses torch's default generator."""
    torch.manual_seed(program.seed)
    model = Net(program)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    return model


def loss_of(model: Any, program: Program, when: When) -> Tensor:
    """The loss of one micro-batch of one rank: of one or several forwards."""
    losses = [
        _one_loss(model, program, When(when.rank, when.step, when.micro, number)) for number in range(program.forwards)
    ]
    if program.penalty == "outside":
        losses.append(PENALTY_WEIGHT * penalty(model))
    return torch.stack(losses).sum()


def _one_loss(model: Any, program: Program, when: When) -> Tensor:
    tokens, moment = tokens_of(program, when), moment_of(program, when)
    parts = [part for part in model.modules() if isinstance(part, Part)]
    for part in parts:
        part.said = None  # recomputation in an earlier backward has said it again
    output = model(tokens, moment)
    if program.output == "none":
        output = model.kept
    elif program.output == "dict":
        output = output["logits"]
    loss = output if program.output == "loss" else token_loss(output, tokens)
    for aux in [*moment.tape, *(part.said for part in parts if part.said is not None)]:
        loss = loss + AUX_WEIGHT * aux.float()
    return loss
