"""Tensor parallelism: cuts a model's matrices over ranks, by a plan of globs and styles.

All is read and checked before anything is changed. Every parameter gets a `Record`: of those that are cut its part, of
the others whether each rank computes a part of its gradient, or all the same.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from terrazzo.engine import Box, Family, Record, leave_record, stages_of
from terrazzo.engine.plan.family import SHARES_MATRICES
from terrazzo.engine.states.materialize import synchronize
from terrazzo.errors import BadInput, did_you_mean, listed
from terrazzo.parallel.adapters import with_adapters
from terrazzo.parallel.parts import check_replaceable, replaced_by_part, watch_states
from terrazzo.parallel.tensor.direct import watch_direct_use
from terrazzo.parallel.tensor.dropout import fork_dropout, has_dropout, watch_seeds
from terrazzo.parallel.tensor.ranks import TensorRanks, runs_of
from terrazzo.parallel.tensor.styles import (
    Column,
    Embedding,
    Enter,
    Logits,
    Row,
    SplitSequence,
    Style,
    Uncut,
    style_named,
)
from terrazzo.parallel.tensor.uses import (
    LocalRows,
    PartialSums,
    TensorUse,
    enter,
    gather_outputs,
    put_forward,
    split_inputs,
    split_run,
    take_part,
)

__all__ = ["Cuts", "TensorPlan", "cut_matrices", "cuts_of", "matching", "style_of"]

TensorPlan = Mapping[str, Style | str]
"""Globs over names of modules, a `*` within one level, to styles."""


@dataclass
class Cuts:
    """What will be done to one model.

    Attributes:
        split: whether sequences are split through the modules of that style; else they are whole everywhere.
        styles: of modules, by name.
        records: of parameters, by the names of their modules and their own.
        rows: the half-open interval of outputs that a rank computes of a matrix that it has whole, by module.
    """

    model: nn.Module
    ranks: TensorRanks
    styles: dict[str, Style]
    split: bool
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)

    def named(self, *kinds: type[Style]) -> Iterator[tuple[str, Any, Style]]:
        """The modules of these styles, in the order in which they are registered."""
        for name, module in self.model.named_modules():
            style = self.styles.get(name)
            if isinstance(style, kinds):
                yield name, module, style

    def inside(self, name: str, kind: type[Style]) -> bool:
        """Whether a module is, or lies inside of one, of that style."""
        parts = name.split(".")
        return any(isinstance(self.styles.get(".".join(parts[:end])), kind) for end in range(1, len(parts) + 1))

    def splits(self, name: str) -> bool:
        """Whether sequences are split around a module."""
        return self.split and self.inside(name, SplitSequence)

    def here(self) -> Cuts:
        """Those of the stages of the model that this rank runs; all of a model that has none."""
        if (stages := stages_of(self.model)) is None:
            return self
        runs = stages.runs
        records = {each: record for each, record in self.records.items() if self._is_here(*each)}
        styles = {name: style for name, style in self.styles.items() if runs(name)}
        rows = {name: interval for name, interval in self.rows.items() if runs(name)}
        return replace(self, styles=styles, records=records, rows=rows)

    def _is_here(self, name: str, attribute: str) -> bool:
        """Whether this rank has a parameter: of a tied one, also where it does not run the module."""
        return self.model.get_submodule(name)._parameters.get(attribute) is not None

    def runs_split(self) -> list[list[nn.Module]]:
        """The modules through which sequences are split, those of each stage by themselves: stages send whole ones."""
        found: dict[int, list[nn.Module]] = {}
        stages = stages_of(self.model)
        for name, module, _ in self.named(SplitSequence) if self.split else ():
            found.setdefault(0 if stages is None else stages.chunks_of(name)[0], []).append(module)
        return list(found.values())


def cuts_of(model: nn.Module, ranks: TensorRanks, plan: TensorPlan, sequence: bool) -> Cuts:
    """How a plan cuts the matrices of `model`, which stays as it is.

    Args:
        sequence: split sequences through the modules of that style; else they are whole everywhere.

    Raises:
        BadInput: a plan that does not fit the model.
    """
    cuts = Cuts(model, ranks, _resolved(model, plan), sequence)
    _read_cuts(cuts)
    _check_regions(cuts)
    _record_uncut(cuts)
    return cuts


def cut_matrices(cuts: Cuts) -> None:
    """Cut matrices in place, of a model in stages those of this rank's. Collective along `tp`."""
    here = cuts.here()
    _replace_parameters(here)
    _put_uses(here)
    SHARES_MATRICES.leave(cuts.model, cuts.ranks)


def matching(model: nn.Module, glob: str) -> list[str]:
    """Names of the modules that a glob means; a `*` stays within one level of names."""
    dots = glob.count(".")
    names = (name for name, _ in model.named_modules() if name)
    return [name for name in names if name.count(".") == dots and fnmatch.fnmatchcase(name, glob)]


def style_of(model: nn.Module, plan: TensorPlan, name: str) -> Style | None:
    """The style that a plan gives a module; None where it gives none."""
    return next((style_named(given, glob) for glob, given in plan.items() if name in matching(model, glob)), None)


def _resolved(model: nn.Module, plan: TensorPlan) -> dict[str, Style]:
    if not isinstance(plan, Mapping) or not plan:
        raise BadInput(
            f"tensor is {plan!r}; give 'auto', or a dict of globs over names of modules and styles, such as "
            "{'layers.*.up': 'column', 'layers.*.down': 'row'}."
        )
    styles: dict[str, Style] = {}
    for glob, given in plan.items():
        style = style_named(given, glob)
        names = matching(model, glob)
        if not names:
            known = [name for name, _ in model.named_modules() if name]
            raise BadInput(
                f"The tensor-parallel plan has {glob!r}, which matches no module of {type(model).__name__}."
                f"{did_you_mean(glob, known)} A '*' stands for one level of names; modules are {listed(known, 6)}."
            )
        for name in names:
            if styles.setdefault(name, style) != style:
                raise BadInput(
                    f"The tensor-parallel plan gives {name!r} two styles, {styles[name]} and {style}: write globs of "
                    "which one matches it."
                )
    return with_adapters(model, styles)


# -- which part is whose ---------------------------------------------------------------------------------------


def _read_cuts(cuts: Cuts) -> None:
    """Note the parts of all matrices that are cut.

    Raises:
        BadInput: modules that cannot be cut as the plan says.
    """
    for name, module, style in cuts.named(Column, Row, Embedding):
        wanted = nn.Embedding if isinstance(style, Embedding) else nn.Linear
        own_forward = type(module).forward is nn.Linear.forward
        if not isinstance(module, wanted) or (isinstance(style, Row) and not own_forward):
            raise BadInput(
                f"{name!r} is a {type(module).__name__}, and the style {type(style).__name__.lower()} knows "
                f"torch.nn.{wanted.__name__}{' with its own forward' * (wanted is nn.Linear)} alone. Give its name no "
                "style, and it stays whole on every rank."
            )
        for attribute in ("weight",) if module._parameters.get("bias") is None else ("weight", "bias"):
            check_replaceable(name, module, attribute)
        match style:
            case Column():
                _read_column(cuts, name, cast(nn.Linear, module), style)
            case Row():
                runs = [_part(cuts, name, module.weight.shape[1], "inputs")]
                cuts.records[name, "weight"] = Record(Family.DENSE, Box.cut(module.weight.shape, 1, runs))
            case Embedding():
                _check_embedding(name, cast(nn.Embedding, module))
                runs = [_part(cuts, name, module.weight.shape[0], "rows")]
                cuts.records[name, "weight"] = Record(Family.DENSE, Box.cut(module.weight.shape, 0, runs))


def _read_column(cuts: Cuts, name: str, module: nn.Linear, style: Column) -> None:
    numel, size = module.weight.shape[0], cuts.ranks.size
    parts = style.parts or (numel,)
    heads = style.heads if isinstance(style.heads, tuple) else (style.heads,) * len(parts)
    if sum(parts) != numel or len(heads) != len(parts):
        raise BadInput(
            f"{name!r} has {numel} outputs, and the plan fuses parts of {', '.join(map(str, parts))} with heads "
            f"{style.heads}: give as many heads as parts, and parts that add up to {numel}."
        )
    runs, start = [], 0
    for part, count in zip(parts, heads, strict=True):
        if count is None:
            first, last = _part(cuts, name, part, "outputs")
        elif count % size == 0 and part % count == 0:
            first, last = runs_of(part, size)[cuts.ranks.rank]
        elif len(parts) == 1 and size % count == 0 and part % count == 0:
            first = cuts.ranks.rank * count // size * (part // count)
            cuts.rows[name] = (first, first + part // count)
            return
        else:
            raise BadInput(
                f"{name!r} has {count} heads in {part} outputs, which tp {size} does not divide: a rank needs whole "
                f"heads, as many as the others. Choose tp so that it divides {count}, the number of heads."
            )
        runs.append((start + first, start + last))
        start += part
    for attribute in ("weight", "bias"):
        if (parameter := getattr(module, attribute)) is not None:
            cuts.records[name, attribute] = Record(Family.DENSE, Box.cut(parameter.shape, 0, runs))


def _part(cuts: Cuts, name: str, numel: int, what: str) -> tuple[int, int]:
    """This rank's part of `numel` things, whose parts may differ by one."""
    if numel < cuts.ranks.size:
        raise BadInput(f"{name!r} has {numel} {what}, fewer than tp {cuts.ranks.size}: give its name no style.")
    return runs_of(numel, cuts.ranks.size)[cuts.ranks.rank]


def _check_embedding(name: str, module: nn.Embedding) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise BadInput(
            f"{name!r} is an embedding with max_norm or scale_grad_by_freq, which need all rows of a look-up: give its "
            "name no style, and it stays whole on every rank."
        )


def _check_regions(cuts: Cuts) -> None:
    """Refuse plans whose modules do not come to one sum, or that split what is not computed for each position alone.

    Raises:
        BadInput: there.
    """
    for name, _, _ in cuts.named(Enter):
        inner = [style for each, style in cuts.styles.items() if each.startswith(f"{name}.")]
        if not all(any(isinstance(style, kind) for style in inner) for kind in (Column, Row)):
            raise BadInput(
                f"The tensor-parallel plan has {name!r} as 'enter', but no 'column' and 'row' inside of it: its ranks' "
                "parts would never be summed. Give the matrices inside their styles."
            )
        whole = [each for each, style in cuts.styles.items() if each.startswith(f"{name}.") and _is_gathered(style)]
        held = _with_parameters(cuts.model, name)
        uncut = [each for each in held if not isinstance(cuts.styles.get(each), Column | Row)]
        if whole and uncut:
            raise BadInput(
                f"The tensor-parallel plan puts the outputs of {whole[0]!r} together again inside of {name!r}: whether "
                f"{listed(uncut)} there gets a part of its gradient on each rank, or all of it, is not known. Give its "
                "matrices 'column' and 'row', or give none inside of that module a style."
            )
    for name, module in cuts.model.named_modules():
        if not cuts.splits(name) or cuts.inside(name, Enter) or name in cuts.styles:
            continue
        if next(module.parameters(recurse=False), None) is not None and not type(module).__name__.endswith("Norm"):
            raise BadInput(
                f"{name!r}, a {type(module).__name__}, is neither cut nor inside of a module of style 'enter', but "
                "would see a part of each sequence alone. Give it a style ('uncut', if it computes each position by "
                "itself), or pass sequence=False to tz.parallelize."
            )


def _is_gathered(style: Style) -> bool:
    return isinstance(style, Column) and style.gathered


def _with_parameters(model: nn.Module, name: str) -> list[str]:
    """Names of the modules inside of one that hold parameters themselves."""
    inside = ((each, module) for each, module in model.named_modules() if each.startswith(f"{name}."))
    return [each for each, module in inside if next(module.parameters(recurse=False), None) is not None]


def _record_uncut(cuts: Cuts) -> None:
    """Note of every other parameter that all ranks have it, and whether they compute the same gradient."""
    by_parameter: dict[nn.Parameter, tuple[str, Record]] = {}
    for name, module in cuts.model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False):
            record = cuts.records.setdefault((name, attribute), _uncut(cuts, name, attribute, parameter))
            before, known = by_parameter.setdefault(parameter, (f"{name}.{attribute}", record))
            if record != known:
                raise BadInput(
                    f"{before!r} and '{name}.{attribute}' are one parameter, which the plan cuts in two ways: give "
                    "both of their modules styles that cut alike, such as 'embedding' and 'column_gathered', or none."
                )


def _uncut(cuts: Cuts, name: str, attribute: str, parameter: nn.Parameter) -> Record:
    """Of a parameter that all ranks have whole: where each sees other activations, gradients are to be summed."""
    style = cuts.styles.get(name)
    after_sum = style.after_sum if isinstance(style, Uncut) else attribute == "bias" and isinstance(style, Row)
    within = cuts.inside(name, Enter) and not after_sum
    partial = cuts.splits(name) or within or name in cuts.rows
    return Record(Family.SHARED, Box.all_of(parameter.shape), replicated=not partial)


# -- doing it --------------------------------------------------------------------------------------------------


def _replace_parameters(cuts: Cuts) -> None:
    """Leave records, and this rank's parts in the place of what is cut: of a tied parameter one for all modules."""
    real: list[Tensor] = [parameter for parameter in cuts.model.parameters() if not parameter.is_meta]
    if real:
        synchronize(real, cuts.ranks.axes)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for (name, attribute), record in cuts.records.items():
        module = cuts.model.get_submodule(name)
        leave_record(module, attribute, record)
        if record.box.is_all:
            continue
        whole = getattr(module, attribute)
        if whole not in replaced:
            replaced[whole] = replaced_by_part(whole, record)
        module._parameters[attribute] = replaced[whole]


def _put_uses(cuts: Cuts) -> None:
    """Have modules exchange what they compute."""
    use, drops = TensorUse(cuts.ranks), has_dropout(cuts.model)
    runs = cuts.runs_split()
    for run in runs:
        split_run(run[0], run[-1], use)
    regions = [module for name, module, _ in cuts.named(Enter) if not cuts.splits(name)]
    if drops:
        watch_seeds(cuts.model, cuts.ranks)
        for module in (*itertools.chain(*runs), *regions):
            fork_dropout(module, cuts.ranks.rank)
    for name, module, style in cuts.named(Enter, Column, Row, Embedding, Logits):
        splits = cuts.splits(name)
        alone = isinstance(style, Column | Logits) and not cuts.inside(name, Enter)
        if isinstance(style, Enter) or alone:
            enter(module, use, splits)
        for attribute, value in style.changed if isinstance(style, Enter) else ():
            setattr(module, attribute, value)
        if isinstance(style, Column) and name in cuts.rows:
            put_forward(module, LocalRows, cuts.rows[name])
        elif isinstance(style, Column) and style.gathered:
            gather_outputs(module, use, module.out_features)
        elif isinstance(style, Logits) and style.gathered:
            gather_outputs(module, use, style.numel)
        elif isinstance(style, Row):
            if style.splits:
                split_inputs(module, use)
            put_forward(module, PartialSums, (use, splits))
        elif isinstance(style, Embedding):
            box = cuts.records[name, "weight"].box
            start = box.rectangles[0].offsets[0]
            take_part(module, use, start, start + module.weight.shape[0], box.shape[0])
    _watch(cuts)


def _watch(cuts: Cuts) -> None:
    """Have what nobody should take for whole parameters refused."""
    cut: dict[str, list[str]] = {}
    for (name, attribute), record in cuts.records.items():
        if not record.box.is_all:
            cut.setdefault(name, []).append(attribute)
    for name in cut:
        watch_states(cuts.model.get_submodule(name), name)
    held = {name: list(cuts.model.get_submodule(name)._parameters) for name in cuts.rows}
    users = [name for name, _, _ in cuts.named(Logits)]
    watch_direct_use(cuts.model, cut | held, users)
