"""Refuses plans of tensor parallelism by which sums would be missing, or gradients of parameters not known."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.messages import listed
from terrazzo.parallel.tensor.styles import Colwise, Embedding, Enter, Logits, Replicate, Rowwise, SplitSequence
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["check_regions"]


def check_regions(cuts: TensorCuts) -> None:
    """Refuse plans by which sums would be missing, or that split sequences where positions are mixed.

    Raises:
        BadInput: such a plan.
    """
    _check_entered(cuts)
    _check_between(cuts)
    _check_split(cuts)


def _check_entered(cuts: TensorCuts) -> None:
    """Check the modules of style `enter`."""
    for name, _, _ in cuts.named(Enter):
        inner = {each: style for each, style in cuts.styles.items() if each.startswith(f"{name}.")}
        if not all(any(isinstance(style, kind) for style in inner.values()) for kind in (Colwise, Rowwise)):
            raise BadInput(
                f"The tensor-parallel plan has {name!r} as 'enter', but no 'colwise' and 'rowwise' inside of it: its "
                "ranks' parts would never be summed. Give the matrices inside their styles."
            )
        whole = [each for each, style in inner.items() if isinstance(style, Colwise) and style.gathered]
        with_parameters = _with_parameters(cuts.model, name)
        uncut = [each for each in with_parameters if not isinstance(cuts.styles.get(each), Colwise | Rowwise)]
        if whole and uncut:
            raise BadInput(
                f"The tensor-parallel plan puts the outputs of {whole[0]!r} together again inside of {name!r}: whether "
                f"{listed(uncut)} there gets a part of its gradient on each rank, or all of it, is not known. Give its "
                "matrices 'colwise' and 'rowwise', or give none inside of that module a style."
            )


def _check_between(cuts: TensorCuts) -> None:
    """Check matrices outside of `enter`: parameters between a column and a row see other activations on each rank."""
    outside = [
        (name, style)
        for name, _, style in cuts.named(Colwise, Rowwise)
        if not cuts.inside(name, Enter) and cuts.block_of(name) is None
    ]
    columns = [name for name, style in outside if isinstance(style, Colwise) and not style.completes]
    rows = [name for name, style in outside if isinstance(style, Rowwise) and not style.takes_part]
    for region in dict.fromkeys(_around(row, columns) for row in rows if columns):
        unknown = [
            name
            for name in _with_parameters(cuts.model, region)
            if not isinstance(cuts.styles.get(name), Colwise | Rowwise | Embedding | Logits | Replicate)
            and not cuts.inside(name, Enter)
        ]
        if unknown:
            where = f"in {region!r}" if region else "in the model itself"
            raise BadInput(
                f"The tensor-parallel plan has a 'colwise' and a 'rowwise' {where}, outside of a module of style "
                f"'enter', and does not say where {listed([name or type(cuts.model).__name__ for name in unknown])} "
                "computes: between the two each rank would have a part of its gradient, elsewhere all of it. Put what "
                "computes between into one module with these matrices and give that the style 'enter'; and what has "
                "parameters and computes before the one or behind the other the style 'replicate'."
            )


def _around(row: str, columns: Sequence[str]) -> str:
    """The name of the innermost module that has a column beside a row; the model's, which is empty, where none has."""
    parts = row.split(".")
    names = (".".join(parts[:end]) for end in reversed(range(1, len(parts))))
    return next((name for name in names if any(column.startswith(f"{name}.") for column in columns)), "")


def _check_split(cuts: TensorCuts) -> None:
    """Check the modules in which sequences are split."""
    for name, _, _ in cuts.named(SplitSequence) if cuts.split else ():
        if (around := cuts.block_of(name)) not in (name, None):
            raise BadInput(
                f"The tensor-parallel plan has {name!r} as 'sequence' inside of {around!r}, which is so too: it would "
                "take a part of a part. Give the one or the other that style."
            )
    for name, _, style in cuts.named():
        if cuts.block_of(name) is None or cuts.inside(name, Enter):
            continue
        if wrong := style.wrong_where_split:
            raise BadInput(
                f"The tensor-parallel plan has {name!r} as {wrong}. Give it no part of its own ('replicate'), or the "
                "module around it, with a 'colwise' and a 'rowwise' inside, the style 'enter'; or pass sequence=False "
                "to tz.parallelize."
            )
    for name, module in cuts.model.named_modules():
        if cuts.block_of(name) is None or cuts.inside(name, Enter) or name in cuts.styles:
            continue
        if _may_mix_positions(module):
            raise BadInput(
                f"{name!r}, a {type(module).__name__}, is neither cut nor inside of a module of style 'enter', but "
                "would see a part of each sequence alone. Give it a style ('replicate', if it computes each position "
                "by itself, as a norm over channels does), or pass sequence=False to tz.parallelize."
            )


_TOKENWISE = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_TOKENWISE_NAMES = ("LayerNorm", "RMSNorm")
_WITHOUT_PARAMETERS = {f"torch.nn.modules.{each}" for each in ("pooling", "batchnorm", "instancenorm", "normalization")}
"""Of torch, with modules that compute over positions, or may be given these where others are given channels."""


def _may_mix_positions(module: nn.Module) -> bool:
    """Whether a module that nobody has given a style may compute a position from others, for all that its class says.

    Norms of other names than those two compute over whatever dim they like: over groups of channels and all positions.
    """
    kind = type(module)
    if kind.forward in _TOKENWISE or kind.__name__.endswith(_TOKENWISE_NAMES):
        return False
    return next(module.parameters(recurse=False), None) is not None or kind.__module__ in _WITHOUT_PARAMETERS


def _with_parameters(model: nn.Module, name: str) -> list[str]:
    """Names of a module and of those inside of it that hold parameters themselves."""
    begin = f"{name}." if name else ""
    inside = ((each, module) for each, module in model.named_modules() if f"{each}.".startswith(begin))
    return [each for each, module in inside if next(module.parameters(recurse=False), None) is not None]
