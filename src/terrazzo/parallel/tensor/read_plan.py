"""Reads a plan of tensor parallelism, which is globs and styles, for a model. The model stays as it is.

Every parameter gets a `Record`. For one that is cut it says which part this rank has, and for any other whether each
rank computes a part of its gradient, or all ranks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from terrazzo.engine import Box, Family, Record
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, listed
from terrazzo.name_globs import level_hint, of_one_level
from terrazzo.nn.float8_linear import Float8Linear
from terrazzo.parallel.local_parameters import check_replaceable
from terrazzo.parallel.peft_adapters import with_adapters
from terrazzo.parallel.sharing_rules import shares_heads, shares_key_heads
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks, runs_of
from terrazzo.parallel.tensor.float8_scales import check_scales
from terrazzo.parallel.tensor.plan_rules import check_regions
from terrazzo.parallel.tensor.styles import Colwise, Embedding, Enter, Replicate, Rowwise, Style, style_named
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["TensorPlan", "cuts_of", "matching", "styles_of"]

TensorPlan = Mapping[str, Style | str]
"""Globs over names of modules, a `*` within one level, to styles."""


def cuts_of(model: nn.Module, ranks: TensorRanks, styles: Mapping[str, Style], sequence: bool) -> TensorCuts:
    """What a plan changes of `model`, which stays as it is.

    Args:
        styles: as of `styles_of`.
        sequence: whether sequences are split in modules of that style. If not, they are whole everywhere.

    Raises:
        BadInput: a plan that does not fit the model.
    """
    cuts = TensorCuts(model, ranks, with_adapters(model, styles), sequence)
    _read_cuts(cuts)
    check_scales(model, cuts.records, cuts.rows)
    check_regions(cuts)
    _record_uncut(cuts)
    return cuts


def matching(model: nn.Module, glob: str) -> list[str]:
    """Names of the modules that a glob means; a `*` stays within one level of names."""
    return of_one_level((name for name, _ in model.named_modules() if name), glob)


def styles_of(model: nn.Module, plan: TensorPlan) -> dict[str, Style]:
    """The style of each module that a plan gives one, by name.

    Raises:
        BadInput: what is no plan, a glob that matches no module, an unknown style, or a module with two.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise BadInput(
            f"tensor is {plan!r}; give 'auto', or a dict of globs over names of modules and styles, such as "
            "{'layers.*.mlp': 'enter', 'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}."
        )
    styles: dict[str, Style] = {}
    for glob, value in plan.items():
        style = style_named(value, glob)
        names = matching(model, glob)
        if not names:
            known = [name for name, _ in model.named_modules() if name]
            raise BadInput(
                f"The tensor-parallel plan has {glob!r}, which matches no module of {type(model).__name__}."
                f"{level_hint(known, glob) or did_you_mean(glob, known)} Modules are {listed(known, 6)}."
            )
        for name in names:
            if styles.setdefault(name, style) != style:
                raise BadInput(
                    f"The tensor-parallel plan gives {name!r} two styles, {styles[name]} and {style}: write globs of "
                    "which one matches it."
                )
    return styles


# -- which part is whose ---------------------------------------------------------------------------------------


def _read_cuts(cuts: TensorCuts) -> None:
    """Record the parts of all matrices that are cut.

    Raises:
        BadInput: modules that cannot be cut as the plan says.
    """
    for name, module, style in cuts.named(*_READS):
        wanted = nn.Embedding if isinstance(style, Embedding) else nn.Linear
        if not isinstance(module, wanted) or not (style.own_forward or _has_torchs_forward(module)):
            replaced = ", whose forward has been replaced," * ("forward" in vars(module))
            raise BadInput(
                f"{name!r} is a {type(module).__name__}{replaced or ','} and the style {type(style).__name__.lower()} "
                f"knows torch.nn.{wanted.__name__} with its own forward alone. Give its name no style, and it stays "
                f"whole on every rank.{_OWN_FORWARDS.get(type(style), '') * isinstance(module, wanted)}"
            )
        for attribute in ("weight",) if module._parameters.get("bias") is None else ("weight", "bias"):
            check_replaceable(name, module, attribute)
        _READS[type(style)](cuts, name, module, style)


def _has_torchs_forward(module: nn.Module) -> bool:
    """Whether a module runs a forward that styles know, and no other in its class or on itself."""
    known = (nn.Linear.forward, Float8Linear.forward, nn.Embedding.forward)
    return type(module).forward in known and "forward" not in vars(module)


_OWN_FORWARDS: dict[type[Style], str] = {
    Colwise: " If it computes each output from the input and the output's own row of weight and bias alone, give "
    "terrazzo.parallel.Colwise(own_forward=True).",
    Embedding: " If it looks up the indices that it is given, as they are, and computes each token by itself, give "
    "terrazzo.parallel.Embedding(own_forward=True).",
}


def _read_row(cuts: TensorCuts, name: str, module: Any, style: Rowwise) -> None:
    runs = [[run] for run in _parts(cuts, name, module.weight.shape[1], "inputs")]
    cuts.records[name, "weight"] = _cut(cuts, module.weight, 1, runs)


def _read_embedding(cuts: TensorCuts, name: str, module: Any, style: Embedding) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise BadInput(
            f"{name!r} is an embedding with max_norm or scale_grad_by_freq, which need all rows of a look-up: give its "
            "name no style, and it stays whole on every rank."
        )
    runs = [[run] for run in _parts(cuts, name, module.weight.shape[0], "rows")]
    cuts.records[name, "weight"] = _cut(cuts, module.weight, 0, runs)


def _read_column(cuts: TensorCuts, name: str, module: Any, style: Colwise) -> None:
    numel, size = module.weight.shape[0], cuts.ranks.size
    parts = style.parts or (numel,)
    heads = style.heads if isinstance(style.heads, tuple) else (style.heads,) * len(parts)
    if sum(parts) != numel or len(heads) != len(parts):
        raise BadInput(
            f"{name!r} has {numel} outputs, and the plan fuses parts of {', '.join(map(str, parts))} with heads "
            f"{style.heads}: give as many heads as parts, and parts that add up to {numel}."
        )
    runs: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    start = 0
    for part, count in zip(parts, heads, strict=True):
        if count is None:
            intervals = _parts(cuts, name, part, "outputs")
        elif shares_heads(count, size) and part % count == 0:
            intervals = runs_of(part, size)
        elif len(parts) == 1 and shares_key_heads(count, size) and part % count == 0:
            if not _has_torchs_forward(module):
                raise BadInput(
                    f"{name!r} has {count} heads, fewer than tp {size}, and its forward is not that of torch.nn.Linear:"
                    " a rank would compute the heads that it needs by a forward in its place. Choose tp so that it "
                    f"divides {count}, or leave the layer its own forward."
                )
            if style.gathered:
                raise BadInput(
                    f"{name!r} has {count} heads, fewer than tp {size}, and the plan gathers its outputs, of which a "
                    f"rank would compute only the head that it needs. Choose tp so that it divides {count}, or take "
                    "'colwise', which gathers nothing."
                )
            first = cuts.ranks.rank * count // size * (part // count)
            cuts.rows[name] = (first, first + part // count)
            return
        else:
            raise BadInput(
                f"{name!r} has {count} heads in {part} outputs, which tp {size} does not divide: a rank needs whole "
                f"heads, as many as the others. Choose tp so that it divides {count}, the number of heads."
            )
        for run, (first, last) in zip(runs, intervals, strict=True):
            run.append((start + first, start + last))
        start += part
    for attribute in ("weight", "bias"):
        if (parameter := getattr(module, attribute)) is not None:
            cuts.records[name, attribute] = _cut(cuts, parameter, 0, runs)


_READS: dict[type[Style], Callable[[TensorCuts, str, Any, Any], None]] = {
    Colwise: _read_column,
    Rowwise: _read_row,
    Embedding: _read_embedding,
}
"""What is recorded of a module of each style whose matrix is cut."""


def _cut(cuts: TensorCuts, parameter: Tensor, dim: int, runs: Sequence[Sequence[tuple[int, int]]]) -> Record:
    """The record of a parameter of which each rank has some half-open intervals of one dim, `runs` by rank."""
    boxes = tuple(Box.cut(parameter.shape, dim, run) for run in runs)
    return Record(Family.DENSE, boxes[cuts.ranks.rank], boxes=boxes)


def _parts(cuts: TensorCuts, name: str, numel: int, what: str) -> Sequence[tuple[int, int]]:
    """Each rank's half-open interval of `numel` things. Lengths may differ by one."""
    if numel < cuts.ranks.size:
        raise BadInput(f"{name!r} has {numel} {what}, fewer than tp {cuts.ranks.size}: give its name no style.")
    return runs_of(numel, cuts.ranks.size)


def _record_uncut(cuts: TensorCuts) -> None:
    """Record for every other parameter whether all ranks compute its gradient, or a part each."""
    by_parameter: dict[nn.Parameter, tuple[str, Record]] = {}
    for name, module in cuts.model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False):
            place = cuts.first_name(name), attribute
            cut = cuts.records.get(place)
            record = _uncut(cuts, name, attribute, parameter) if cut is None or cut.box.is_all else cut
            cuts.records.setdefault(place, record)
            before, known = by_parameter.setdefault(parameter, (f"{name}.{attribute}", record))
            if record != known:
                raise BadInput(
                    f"{before!r} and '{name}.{attribute}' are one parameter, which the plan cuts in two ways: give "
                    "both of their modules styles that cut alike, such as 'embedding_rowwise' and "
                    "'colwise_gather_output', or none."
                )


def _uncut(cuts: TensorCuts, name: str, attribute: str, parameter: nn.Parameter) -> Record:
    """The record of a parameter that all ranks have whole. Gradients are summed where ranks see other activations."""
    first = cuts.first_name(name)
    style = cuts.styles.get(first)
    after_sum = style.after_sum if isinstance(style, Replicate) else attribute == "bias" and isinstance(style, Rowwise)
    within = cuts.inside(name, Enter) and not after_sum
    partial = cuts.block_of(name) is not None or within or first in cuts.rows
    return Record(Family.SHARED, Box.all_of(parameter.shape), replicated=not partial)
