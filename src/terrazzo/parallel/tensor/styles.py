"""How one module takes part in tensor parallelism.

To add a style: its class here, with what the checks ask of it: a `ClassVar` where that is the same for every module of
the style, a property where its fields say so; the class in `_KINDS`; in `read_plan` which parameters it cuts, if any;
in `apply_plan` what its modules exchange; a name in `STYLES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count
from terrazzo.messages import did_you_mean

__all__ = [
    "STYLES",
    "Colwise",
    "Embedding",
    "Enter",
    "Logits",
    "Replicate",
    "Rowwise",
    "SplitSequence",
    "Style",
    "style_named",
]


Where = Literal["always", "alone", "never"]


class Style:
    """What a module's style says to the checks and to the exchanges, beside its own fields.

    Attributes:
        enters: where the module's input is put together, for each rank to use in its own way: always; alone, which is
            outside of a module that enters always; or never.
        completes: the output is summed or gathered: all ranks have all of it, and of its gradient.
        own_forward: a forward of the module's own class is called with a part of its weights.
        takes_part: of the input, which is whole on every rank, this rank takes its channels.
        wrong_where_split: what the module would do wrong with a part of each sequence; empty where that is nothing.
    """

    enters: ClassVar[Where] = "never"

    @property
    def completes(self) -> bool:
        return False

    @property
    def own_forward(self) -> bool:
        return False

    @property
    def takes_part(self) -> bool:
        return False

    @property
    def wrong_where_split(self) -> str:
        return ""


_COUNTS = {"heads": "of the heads, one for each part where there are parts", "parts": "a tuple of outputs"}


@dataclass(frozen=True)
class Colwise(Style):
    """A linear map of which each rank has a part of the outputs.

    Raises:
        BadInput: for heads or parts that are no whole numbers, each 1 or more.

    Attributes:
        heads: how many heads the outputs are of. A rank has whole heads. Where there are fewer heads than ranks, each
            rank has all weights, and computes the one head that its query heads look at.
        parts: the numbers of outputs of several matrices that are fused into this one, such as a gate and an up
            projection. A rank has a part of each; `heads` has one number for each then.
        gathered: all outputs are gathered, and every rank uses them in the same way; not of fewer heads than ranks.
        own_forward: the module's class may have a forward of its own, which computes each output from the input and
            the output's own row of weight and bias alone: so not one that normalizes the weight, or over outputs.
    """

    heads: int | tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None
    gathered: bool = False
    own_forward: bool = False

    enters: ClassVar[Where] = "alone"

    def __post_init__(self) -> None:
        given: dict[str, object] = {"heads": self.heads, "parts": self.parts}
        for name, value in given.items():
            if value is None or (name == "heads" and is_count(value)):
                continue
            if not isinstance(value, list | tuple) or not value or not all(map(is_count, value)):
                raise BadInput(f"Colwise: {name} is {value!r}; give whole numbers, each 1 or more: {_COUNTS[name]}.")
            object.__setattr__(self, name, tuple(value))

    @property
    def completes(self) -> bool:
        return self.gathered

    @property
    def wrong_where_split(self) -> str:
        wrong = "'colwise_gather_output' where sequences are split: it would hand on whole ones in the place of a part"
        return wrong if self.gathered else ""


@dataclass(frozen=True)
class Rowwise(Style):
    """A linear map of which each rank has a part of the inputs; its outputs are summed.

    Attributes:
        splits: the input is whole on every rank, and a rank takes its channels of it.
    """

    splits: bool = False

    completes: ClassVar[bool] = True

    @property
    def takes_part(self) -> bool:
        return self.splits

    @property
    def wrong_where_split(self) -> str:
        wrong = (
            "'rowwise_split_input' where sequences are split: it would add up channels of other positions of each rank"
        )
        return wrong if self.splits else ""


@dataclass(frozen=True)
class Embedding(Style):
    """A table of which each rank has a part of the rows. Outputs are summed, as one rank alone has each row.

    Attributes:
        own_forward: the module's class may have a forward of its own, which looks up the indices that it is given, as
            they are, and computes each token by itself.
    """

    own_forward: bool = False

    completes: ClassVar[bool] = True
    wrong_where_split: ClassVar[str] = (
        "'embedding_rowwise' where sequences are split: it would add up rows for other positions of each rank"
    )


@dataclass(frozen=True)
class Logits(Style):
    """A module that multiplies with the table of an embedding, of which ranks have parts.

    Attributes:
        numel: how many rows the whole table has.
        gathered: all logits are gathered. If not, each rank has those of its rows, for a `VocabularyLoss`.
    """

    numel: int
    gathered: bool = True

    enters: ClassVar[Where] = "alone"
    wrong_where_split: ClassVar[str] = (
        "logits where sequences are split: it would hand on whole ones in the place of a part"
    )

    @property
    def completes(self) -> bool:
        return self.gathered


@dataclass(frozen=True)
class Enter(Style):
    """A module that holds columns and rows. Its input is gathered once, for all columns inside of it.

    Attributes:
        changed: attributes of the module that have other numbers on a rank, such as of heads that share a key head.
    """

    changed: tuple[tuple[str, int], ...] = ()

    enters: ClassVar[Where] = "always"


@dataclass(frozen=True)
class SplitSequence(Style):
    """A block that computes, on each rank, a part of each sequence, along dim -2. Those of one module are a run."""


@dataclass(frozen=True)
class Replicate(Style):
    """A module that every rank has whole, and of which nothing is changed.

    Attributes:
        after_sum: inside of a module of style `enter`, it computes with what ranks have summed.
    """

    after_sum: bool = False


_KINDS = (Colwise, Rowwise, Embedding, Logits, Enter, SplitSequence, Replicate)

STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(gathered=True),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(splits=True),
    "embedding_rowwise": Embedding(),
    "replicate": Replicate(),
    "enter": Enter(),
    "sequence": SplitSequence(),
}
"""Names of styles in a plan: those of transformers' `base_model_tp_plan`, where it has them, and two of our own."""


def style_named(name: object, glob: str) -> Style:
    """The style that a plan gives for `glob`.

    Raises:
        BadInput: one that is unknown, or of another class: what is cut and exchanged goes by the classes here.
    """
    if isinstance(name, Style):
        if type(name) not in _KINDS:
            raise BadInput(
                f"The tensor-parallel style of {glob!r} is of the class {type(name).__name__}, which this version does "
                f"not know: give one of {', '.join(kind.__name__ for kind in _KINDS)} itself, and no class made of it."
            )
        return name
    if not isinstance(name, str) or name not in STYLES:
        near = did_you_mean(name, STYLES) if isinstance(name, str) else ""
        raise BadInput(
            f"The tensor-parallel style of {glob!r} is {name!r}, which this version does not know.{near} Styles are "
            f"{', '.join(STYLES)}, and terrazzo.parallel.Colwise with heads or parts."
        )
    return STYLES[name]
