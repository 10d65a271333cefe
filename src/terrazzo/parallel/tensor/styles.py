"""How one module takes part in tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import BadInput, did_you_mean

__all__ = ["STYLES", "Column", "Embedding", "Enter", "Logits", "Row", "SplitSequence", "Style", "Uncut", "style_named"]


@dataclass(frozen=True)
class Column:
    """A linear map of which each rank has a part of the outputs.

    Attributes:
        heads: into which the outputs fall: a rank has whole ones. Where there are fewer than ranks, each rank has all
            weights and computes the head that its part of the others needs.
        parts: numbers of outputs of matrices that are fused into this one, such as those of a gate and an up
            projection, of each of which a rank has a part; `heads` are then those of each.
        gathered: outputs are put together again, and used alike on every rank.
    """

    heads: int | tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None
    gathered: bool = False


@dataclass(frozen=True)
class Row:
    """A linear map of which each rank has a part of the inputs; its outputs are summed.

    Attributes:
        splits: inputs are whole, and a rank takes its part of them.
    """

    splits: bool = False


@dataclass(frozen=True)
class Embedding:
    """A table of which each rank has a part of the rows. Its outputs are summed: one rank has each of them."""


@dataclass(frozen=True)
class Logits:
    """A module that multiplies with the table of an embedding, of which ranks have parts.

    Attributes:
        numel: rows of the whole table, and channels of the outputs once they are put together.
        gathered: they are; else they stay apart, for a `VocabularyLoss`.
    """

    numel: int
    gathered: bool = True


@dataclass(frozen=True)
class Enter:
    """A module that computes with matrices of which ranks have parts: its input is put together once, as it enters.

    Attributes:
        changed: attributes of the module that are other numbers on a rank, such as heads that share a key head.
    """

    changed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class SplitSequence:
    """Modules that run one after the other, through which each rank takes a part of each sequence, dim -2."""


@dataclass(frozen=True)
class Uncut:
    """As it is, on every rank; what a plan says of modules that need nothing done to them.

    Attributes:
        after_sum: inside of a module of style `enter`, it computes with what the ranks' parts have been summed to.
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
