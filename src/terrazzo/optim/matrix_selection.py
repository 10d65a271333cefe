"""Which parameters of a model are matrices for Muon, and why the others are not.

A matrix is a parameter that inputs are multiplied with. Its module says so, and not its shape: a table of positions has
two dims as well, and if its update were made orthogonal, all rows would move alike, whichever of them were looked up.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.messages import counted, did_you_mean, listed, warn
from terrazzo.name_globs import matches_any
from terrazzo.nn.routers import is_router

__all__ = ["HEADS", "Division", "divided", "hidden_matrices"]

HEADS = ("*lm_head*", "*embed_out*", "head.*", "model.head.*", "output.*", "model.output.*", "*classifier*", "score.*")
"""Names of heads, whose matrices have a row for each token or class.

Not of an `output` inside a layer, as in BERT, or of a `head` in one.
"""

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_PRODUCTS = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)

NamedParameter = tuple[str, nn.Parameter]


class Reason(enum.StrEnum):
    """Why a parameter is not for Muon, in words for several of them.

    Attributes:
        one: in words for a single one.
    """

    one: str

    TABLE = "tables that are looked up, and what is tied to them", "table that is looked up, and what is tied to it"
    CONVOLUTION = "convolutions", "convolution"
    HEAD = "heads", "head"
    NAMED = "named by `adamw`"
    VECTOR = "vectors and scalars", "vector or scalar"
    UNKNOWN = "in no module that is known to multiply with them"

    def __new__(cls, several: str, one: str = "") -> Reason:
        made = str.__new__(cls, several)
        made._value_, made.one = several, one or several
        return made


@dataclass(frozen=True)
class Division:
    """A model's trainable parameters, divided among Muon and AdamW. It unpacks as (matrices, others); `print` shows it.

    Attributes:
        matrices: those for Muon, with their names.
        others: those for AdamW, with their names.
        reasons: why each of the others is not for Muon, by name.
    """

    matrices: list[NamedParameter]
    others: list[NamedParameter]
    reasons: dict[str, Reason]

    def __iter__(self) -> Iterator[list[NamedParameter]]:
        return iter((self.matrices, self.others))

    @property
    def unknown(self) -> list[str]:
        """Names of parameters of two dims or more that go to AdamW since nobody has said what they are."""
        return [name for name, reason in self.reasons.items() if reason is Reason.UNKNOWN]

    def unknown_note(self, muon: str = "`muon`", adamw: str = "`adamw`") -> str:
        """A warning about the unknown parameters, with the edit: where names of the ones and the others are given."""
        count = len(self.unknown)
        return (
            f"{counted(count, 'parameter')} of two dims or more {'are' if count > 1 else 'is'} in no module that is "
            f"known to multiply with {'them' if count > 1 else 'it'}, and AdamW steps {'them' if count > 1 else 'it'}: "
            f"{listed(self.unknown, 8)}. Name those that are matrices in {muon}, the others in {adamw}."
        )

    def lines(self) -> list[str]:
        """A line for Muon, and one for each reason of the others."""
        lines = [_line("Muon", "matrix" if len(self.matrices) == 1 else "matrices", self.matrices)]
        by_reason: dict[Reason, list[NamedParameter]] = {}
        for name, parameter in self.others:
            by_reason.setdefault(self.reasons[name], []).append((name, parameter))
        for reason, named in by_reason.items():
            lines.append(_line("AdamW", reason.one if len(named) == 1 else reason, named))
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _line(algorithm: str, what: str, named: Sequence[NamedParameter]) -> str:
    rows: dict[str, int] = {}
    for name, _ in named:
        row = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        rows[row] = rows.get(row, 0) + 1
    shown = [f"{row} ({count})" if count > 1 else row for row, count in rows.items()]
    numel = sum(parameter.numel() for _, parameter in named)
    return f"{algorithm}: {len(named):,} {what}, {numel:,} elements: {listed(shown, 12)}"


def hidden_matrices(model: nn.Module, adamw: Sequence[str] = HEADS, muon: Sequence[str] = ()) -> Division:
    """Divide a model's trainable parameters among Muon and AdamW; `print` of it says what goes where, and why.

        matrices, others = tz.optim.hidden_matrices(model)

    Muon gets what is known to be multiplied with: weights of linear layers and of the projections in attention and
    recurrent layers, routers, and stacks of experts' matrices. AdamW gets vectors, weights of embeddings and what is
    tied to them, those of convolutions, what `get_output_embeddings()` gives where a module has it (as transformers'
    models do), what `adamw` names, and what no module known here multiplies with, such as a class token or a table of
    positions that is a parameter of its own: of the last it warns. A head by a name that `HEADS` has not, such as
    `decoder`, `out_proj` or the last place of an `nn.Sequential`, looks like any linear layer: name it in `adamw`.

    Args:
        adamw: globs over the names of parameters, a `*` for any part of one: by default of heads.
        muon: globs over the names of further matrices, whatever they would be else: of modules of your own. Of a model
            in stages each rank gives globs of its own stage.

    Raises:
        BadInput: for a glob that matches no parameter, but of the default ones; for one of `muon` that matches one of
            fewer than two dims.
    """
    division = divided(model, adamw, muon)
    if division.unknown:
        warn(f"hidden_matrices: {division.unknown_note()}")
    return division


def divided(model: nn.Module, adamw: Sequence[str] = HEADS, muon: Sequence[str] = ()) -> Division:
    """`hidden_matrices` without a warning."""
    for key, globs in (("adamw", adamw), ("muon", muon)):
        if isinstance(globs, str):  # which is a sequence, of globs of one letter
            raise BadInput(f"{key} is {globs!r}: give a list of globs, [{globs!r}].")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    _check(muon, named)
    if tuple(adamw) != HEADS:
        _matched_by_each("adamw", adamw, named)
    division = Division([], [], {})
    reasons = _reasons(model)
    for name, parameter in named:
        if matches_any(name, muon):
            reason = None
        elif parameter.ndim < 2:
            reason = Reason.VECTOR
        elif matches_any(name, adamw):
            reason = Reason.HEAD if tuple(adamw) == HEADS else Reason.NAMED
        else:
            reason = reasons.get(id(parameter), Reason.UNKNOWN)
        if reason is None:
            division.matrices.append((name, parameter))
        else:
            division.others.append((name, parameter))
            division.reasons[name] = reason
    return division


def _reasons(model: nn.Module) -> dict[int, Reason | None]:
    """Why a parameter is not for Muon, by its `id`; None for those that inputs are multiplied with."""
    reasons: dict[int, Reason | None] = {}
    for place, module, name, parameter in _owned_parameters(model):
        if isinstance(module, _TABLES):
            reasons[id(parameter)] = Reason.TABLE
        elif isinstance(module, _CONVOLUTIONS):
            reasons.setdefault(id(parameter), Reason.CONVOLUTION)
        elif _is_product(model, place, name, parameter):
            reasons.setdefault(id(parameter), None)
    methods = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    for head in (ask() for ask in methods if callable(ask)):
        for parameter in head.parameters() if isinstance(head, nn.Module) else ():
            if reasons.get(id(parameter)) is not Reason.TABLE:
                reasons[id(parameter)] = Reason.HEAD
    return reasons


def _is_product(model: nn.Module, place: str, name: str, parameter: nn.Parameter) -> bool:
    """Whether the module at `place` multiplies inputs with its own `parameter`, or with each matrix of experts."""
    module = model.get_submodule(place)
    kind = type(module).__name__
    if parameter.ndim == 3:
        return "expert" in f"{place}.{name}".lower() or "Expert" in kind
    multiplies = isinstance(module, _PRODUCTS) or kind == "Conv1D" or (name == "weight" and is_router(model, place))
    return parameter.ndim == 2 and multiplies


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Each parameter of each module, those of several modules as often: the module with its name, and its own in it."""
    for place, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield place, module, name, parameter


def _check(muon: Sequence[str], named: Sequence[NamedParameter]) -> None:
    for glob, matched in _matched_by_each("muon", muon, named).items():
        flat = [name for name, parameter in matched if parameter.ndim < 2]
        if flat:
            raise BadInput(
                f"muon has '{glob}', which matches {flat[0]}, a parameter of fewer than two dims: Muon updates "
                "matrices alone. Make it match those, such as with *.weight at its end."
            )


def _matched_by_each(
    key: str, globs: Sequence[str], named: Sequence[NamedParameter]
) -> dict[str, list[NamedParameter]]:
    """What each glob matches.

    Raises:
        BadInput: one matches nothing.
    """
    found = {glob: [each for each in named if matches_any(each[0], [glob])] for glob in globs}
    for glob, matched in found.items():
        if not matched:
            names = [name for name, _ in named]
            raise BadInput(
                f"{key} has '{glob}', which no trainable parameter's name matches.{did_you_mean(glob, names)} Names "
                f"are such as {', '.join(names[:3])}; * stands for any part of one. Correct it, or remove it."
            )
    return found
