"""Applies a plan of tensor parallelism that has been read: cuts parameters, and adds exchanges to modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from terrazzo.engine import leave_record
from terrazzo.engine.consensus.equal_values import synchronize
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.numbered import Names
from terrazzo.marks import SHARES_MATRICES
from terrazzo.parallel.local_parameters import replaced_by_part, watch_states
from terrazzo.parallel.peft_adapters import layer_of
from terrazzo.parallel.tensor.activation_exchanges import runs_of
from terrazzo.parallel.tensor.channels.channel_parts import ChannelParts, Run
from terrazzo.parallel.tensor.direct_weight_use import DirectUse
from terrazzo.parallel.tensor.dropout import fork_dropout, has_dropout
from terrazzo.parallel.tensor.embedding_rows import look_up_part
from terrazzo.parallel.tensor.first_forwards import BuildWatch, watch_first_forwards
from terrazzo.parallel.tensor.float8_scales import share_scales
from terrazzo.parallel.tensor.gradient_parts import GradientParts
from terrazzo.parallel.tensor.linear_forwards import compute_rows, sum_outputs
from terrazzo.parallel.tensor.module_hooks import enter, gather_outputs, split_inputs
from terrazzo.parallel.tensor.same_inputs import SameDraws, SameInputs, SameRandomStates
from terrazzo.parallel.tensor.sequence_split import ModuleExchanges, SequenceRun, split_between
from terrazzo.parallel.tensor.styles import Colwise, Embedding, Enter, Logits, Rowwise, Style
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["cut_matrices"]


def cut_matrices(cuts: TensorCuts) -> None:
    """Cut the matrices of a model in place; of a model in stages those of this rank. Collective along `tp`."""
    own = cuts.of_this_rank()
    _replace_parameters(own)
    _add_exchanges(own)
    share_scales(own)
    SHARES_MATRICES.leave(cuts.model, cuts.ranks.labelled(Label(names=Names(modules=own.names))))


def _replace_parameters(cuts: TensorCuts) -> None:
    """Leave the records on modules, and replace cut parameters by this rank's parts. Ties are kept."""
    if (axes := cuts.ranks.axes) is not None:
        synchronize([each for each in cuts.model.parameters() if not each.is_meta], axes, axes.within_stage)
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


def _add_exchanges(cuts: TensorCuts) -> None:
    """Have modules exchange what they compute with the other ranks."""
    run_of: dict[str, SequenceRun] = {}
    for blocks in cuts.sequence_runs():
        run_of |= dict.fromkeys([name for name, _ in blocks], split_between(cuts, blocks))
    if not cuts.ranks.is_simulated and has_dropout(cuts.model):
        cuts.model.register_forward_pre_hook(SameRandomStates(cuts.ranks))
        for name in run_of:
            fork_dropout(cuts.model.get_submodule(name), cuts.ranks.rank)
        for name, module, _ in cuts.named(Enter):
            if cuts.block_of(name) is None:
                fork_dropout(module, cuts.ranks.rank, *_parts_and_sums(cuts, name))
    for name, module, style in cuts.named():
        block = cuts.block_of(name)
        exchanges = ModuleExchanges(name, cuts.ranks_at(name), None if block is None else run_of[block])
        if cuts.enters(name):
            enter(module, exchanges, takes_weights=isinstance(style, Logits))
        if type(style) in _EXCHANGES:
            _EXCHANGES[type(style)](cuts, module, style, exchanges)
    for name in _cut_attributes(cuts):
        watch_states(cuts.model.get_submodule(name), name)
    watch_first_forwards(cuts.model, _watches(cuts))
    if not cuts.ranks.is_simulated:
        cuts.model.register_forward_pre_hook(SameInputs(cuts.ranks), prepend=True, with_kwargs=True)


def _parts_and_sums(cuts: TensorCuts, name: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Inside of a module: those whose output is a part on each rank, and those whose output all ranks have."""
    inside = [(each, style) for each, _, style in cuts.named(Colwise, Rowwise) if each.startswith(f"{name}.")]
    sums = dict.fromkeys(layer_of(each) for each, style in inside if style.completes)
    parts = dict.fromkeys(layer_of(each) for each, style in inside if not style.completes)
    model = cuts.model
    return [model.get_submodule(each) for each in parts], [model.get_submodule(each) for each in sums]


def _of_column(cuts: TensorCuts, module: Any, style: Colwise, exchanges: ModuleExchanges) -> None:
    if exchanges.name in cuts.rows:
        compute_rows(module, cuts.rows[exchanges.name])
    elif style.completes:
        gather_outputs(module, exchanges.ranks, module.out_features)


def _of_row(cuts: TensorCuts, module: Any, style: Rowwise, exchanges: ModuleExchanges) -> None:
    if style.takes_part:
        split_inputs(module, exchanges.ranks)
    sum_outputs(module, exchanges)


def _of_embedding(cuts: TensorCuts, module: Any, style: Embedding, exchanges: ModuleExchanges) -> None:
    box = cuts.records[exchanges.name, "weight"].box
    start = box.rectangles[0].offsets[0]
    look_up_part(module, exchanges.ranks, start, start + module.weight.shape[0], box.shape[0])


def _of_logits(cuts: TensorCuts, module: Any, style: Logits, exchanges: ModuleExchanges) -> None:
    if style.gathered:
        gather_outputs(module, exchanges.ranks, style.numel)


def _of_enter(cuts: TensorCuts, module: Any, style: Enter, exchanges: ModuleExchanges) -> None:
    for attribute, value in style.changed:
        setattr(module, attribute, value)


_EXCHANGES: dict[type[Style], Callable[[TensorCuts, Any, Any, ModuleExchanges], None]] = {
    Colwise: _of_column,
    Rowwise: _of_row,
    Embedding: _of_embedding,
    Logits: _of_logits,
    Enter: _of_enter,
}
"""What is changed of a module of each style, beside how its input enters."""


def _cut_attributes(cuts: TensorCuts) -> dict[str, list[str]]:
    """The attributes, by module, that hold parts."""
    cut: dict[str, list[str]] = {}
    for (name, attribute), record in cuts.records.items():
        if not record.box.is_all:
            cut.setdefault(name, []).append(attribute)
    return cut


def _summed_attributes(cuts: TensorCuts) -> dict[str, tuple[list[str], str]]:
    """The attributes, by module, of whose gradients ranks compute parts, and the outermost module in which they do."""
    summed: dict[str, tuple[list[str], str]] = {}
    for (name, attribute), record in cuts.records.items():
        if record.box.is_all and not record.replicated and name not in cuts.rows:
            summed.setdefault(name, ([], cuts.region_of(name)))[0].append(attribute)
    return summed


def _watches(cuts: TensorCuts) -> list[BuildWatch]:
    """What the first forwards of a model are watched for."""
    used_in_part = {name: list(cuts.model.get_submodule(name)._parameters) for name in cuts.rows}
    users = [name for name, _, _ in cuts.named(Logits)]
    direct_use = DirectUse(_cut_attributes(cuts), used_in_part, users, _summed_attributes(cuts))
    channels = _channel_parts(cuts)
    if cuts.ranks.is_simulated:
        return [channels, direct_use]
    draws = [] if has_dropout(cuts.model) else [SameDraws(cuts.ranks)]
    return [*draws, channels, _gradient_parts(cuts), direct_use]


def _channel_parts(cuts: TensorCuts) -> ChannelParts:
    columns = {
        name: _runs(cuts, name, module, style) for name, module, style in cuts.named(Colwise) if not style.completes
    }
    for name, _, style in cuts.named(Logits):
        if isinstance(style, Logits) and not style.gathered:
            start, stop = runs_of(style.numel, cuts.ranks.size)[cuts.ranks.rank]
            columns[name] = [Run(stop - start, None)]
    rows = [name for name, _, style in cuts.named(Rowwise) if not style.takes_part]
    return ChannelParts(columns, rows, [name for name, _, _ in cuts.named()], cuts.ranks.size)


def _runs(cuts: TensorCuts, name: str, module: Any, style: Any) -> list[Run]:
    """What this rank computes of each matrix that is fused into one of style `colwise`."""
    if name in cuts.rows:
        start, stop = cuts.rows[name]
        return [Run(stop - start, 1)]
    parts = style.parts or (module.out_features,)
    heads = style.heads if isinstance(style.heads, tuple) else (style.heads,) * len(parts)
    size, rank = cuts.ranks.size, cuts.ranks.rank
    intervals = [runs_of(part, size)[rank] for part in parts]
    counts = [None if count is None else count // size for count in heads]
    return [Run(stop - start, count) for (start, stop), count in zip(intervals, counts, strict=True)]


def _gradient_parts(cuts: TensorCuts) -> GradientParts:
    parts = GradientParts()
    for name, _, style in cuts.named():
        if cuts.enters(name):
            parts.entered.append(name)
        if style.completes:
            parts.summed.append(name)
        if style.takes_part:
            parts.split.append(name)
    for (name, attribute), record in cuts.records.items():
        is_cut = not record.box.is_all and not isinstance(cuts.styles.get(name), Embedding)
        entered, in_block = cuts.inside(name, Enter), cuts.block_of(name) is not None
        between = not record.replicated and entered and not in_block
        if is_cut or between or name in cuts.rows:
            parts.parameters.append((name, attribute))
        elif record.replicated and name not in cuts.styles and not entered and not in_block:
            parts.outside.append((name, attribute))
    return parts
