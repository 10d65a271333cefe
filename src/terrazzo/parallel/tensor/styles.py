"""How one module takes part in tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import BadInput, did_you_mean

__all__ = ["STYLES", "Column", "Embedding", "Enter", "Logits", "Row", "SplitSequence", "Style", "Uncut", "style_named"]


@dataclass(frozen=True)
class Column:
    """A linear map of which each rank has a part of the outputs.

    Attributes:
        heads: how many heads the outputs are of. A rank has whole heads. Where there are fewer heads than ranks, each
            rank has all weights, and computes the one head that its query heads look at.
        parts: the numbers of outputs of several matrices that are fused into this one, such as a gate and an up
            projection. A rank has a part of each; `heads` has one number for each then.
        gathered: all outputs are gathered, and every rank uses them in the same way.
    """

    heads: int | tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None
    gathered: bool = False


@dataclass(frozen=True)
class Row:
    """A linear map of which each rank has a part of the inputs; its outputs are summed.

    Attributes:
        splits: the input is whole on every rank, and a rank takes its channels of it.
    """

    splits: bool = False


@dataclass(frozen=True)
class Embedding:
    """A table of which each rank has a part of the rows. Outputs are summed, as one rank alone has each row."""


@dataclass(frozen=True)
class Logits:
    """A module that multiplies with the table of an embedding, of which ranks have parts.

    Attributes:
        numel: how many rows the whole table has.
        gathered: all logits are gathered. If not, each rank has those of its rows, for a `VocabularyLoss`.
    """

    numel: int
    gathered: bool = True


@dataclass(frozen=True)
class Enter:
    """A module that holds columns and rows. Its input is gathered once, for all columns inside of it.

    Attributes:
        changed: attributes of the module that have other numbers on a rank, such as of heads that share a key head.
    """

    changed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class SplitSequence:
    """A module that computes, on each rank, a part of each sequence, along dim -2. Several follow one another."""


@dataclass(frozen=True)
class Uncut:
    """A module that every rank has whole, and of which nothing is changed.

    Attributes:
        after_sum: inside of a module of style `enter`, it computes with what ranks have summed.
    """

    after_sum: bool = False


Style = Column | Row | Embedding | Logits | Enter | SplitSequence | Uncut

STYLES: dict[str, Style] = {
    "column": Column(),
    "column_gathered": Column(gathered=True),
    "row": Row(),
    "row_splits": Row(splits=True),
    "embedding": Embedding(),
    "enter": Enter(),
    "sequence": SplitSequence(),
    "uncut": Uncut(),
}
"""Names of styles in a plan."""


def style_named(name: object, glob: str) -> Style:
    """The style that a plan gives for `glob`.

    Raises:
        BadInput: one that is unknown.
    """
    if isinstance(name, Style):
        return name
    if not isinstance(name, str) or name not in STYLES:
        near = did_you_mean(name, STYLES) if isinstance(name, str) else ""
        raise BadInput(
            f"The tensor-parallel style of {glob!r} is {name!r}, which this version does not know.{near} Styles are "
            f"{', '.join(STYLES)}, and terrazzo.parallel.Column with heads or parts."
        )
    return STYLES[name]
