"""Plans of tensor parallelism that models bring themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.parallel.peft_adapters import base_of
from terrazzo.parallel.sharing_rules import shares_heads
from terrazzo.parallel.tensor.read_plan import TensorPlan, matching
from terrazzo.parallel.tensor.styles import STYLES, Colwise, Embedding, Enter, Replicate, Rowwise, SplitSequence, Style

__all__ = ["check_styles", "own_plan"]

_TRANSFORMERS: dict[str, Style] = {
    **{name: style for name, style in STYLES.items() if name not in ("enter", "sequence")},
    "colwise": Colwise(own_forward=True),
    "colwise_gather_output": Colwise(gathered=True, own_forward=True),
    "embedding_rowwise": Embedding(own_forward=True),
    "replicated_with_grad_allreduce": Replicate(),
    "sequence_parallel": Replicate(),
}
"""Styles of `base_model_tp_plan`, which calls forwards of the model's own with parts, too.

Those of the last two have their gradients summed where blocks split sequences."""

_EXPERTS = "moe_tp_experts"
"""Their style of a mixture's experts, which stay whole: a rank computes its own tokens, or shares along `ep`."""


def own_plan(model: nn.Module, size: int) -> TensorPlan:
    """The plan of a model that has `tensor_plan()`, or of one of transformers; also of one with adapters around it.

    Args:
        size: ranks along `tp`.

    Raises:
        BadInput: a model without one, or whose plan has styles that are unknown here.
    """
    base, prefix = base_of(model)
    return {f"{prefix}{glob}": style for glob, style in _own_plan(base, size).items()}


def _own_plan(model: nn.Module, size: int) -> TensorPlan:
    own: Any = model
    if callable(getattr(model, "tensor_plan", None)):
        plan: TensorPlan = own.tensor_plan()
        return plan
    transformers_plan = getattr(model, "tp_plan", None) if hasattr(model, "config") else None
    if not transformers_plan:
        raise BadInput(
            f"{type(model).__name__} has no plan of tensor parallelism, neither tensor_plan() nor transformers' "
            "base_model_tp_plan. Give one, as in tensor={'layers.*.mlp': 'enter', 'layers.*.mlp.up': 'colwise', "
            "'layers.*.mlp.down': 'rowwise'}."
        )
    return _of_transformers(model, transformers_plan, size)


def _of_transformers(model: Any, transformers_plan: Mapping[str, str], size: int) -> TensorPlan:
    present = {glob: style for glob, style in transformers_plan.items() if _named(model, glob)}
    check_styles(type(model).__name__, present)
    mixtures = [name for glob, style in present.items() if style == _EXPERTS for name in matching(model, glob)]
    present = _without_experts(present)
    styles = {name: _TRANSFORMERS[style] for glob, style in present.items() for name in _named(model, glob)}
    config = model.config.get_text_config()
    heads: int = config.num_attention_heads
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    if not shares_heads(heads, size):
        raise BadInput(
            f"{type(model).__name__} has {heads} attention heads, which tp {size} does not divide: a rank needs whole "
            f"heads, as many as the others. Choose tp so that it divides {heads}."
        )
    plan: dict[str, Style] = {}
    for name, style in styles.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        width = getattr(parent, "head_dim", None)
        counts = {count * width: count for count in (heads, key_heads)} if isinstance(width, int) else {}
        module = model.get_submodule(name)
        if isinstance(style, Colwise) and getattr(module, "out_features", None) in counts:
            style = replace(style, heads=counts[module.out_features])
        plan[name] = style
        if isinstance(style, Colwise | Rowwise) and parent is not model and "." in name and _is_region(styles, name):
            plan[name.rpartition(".")[0]] = _region(parent, _siblings(styles, name), heads // size, key_heads < size)
    runs = {glob.partition(".*")[0] for glob in transformers_plan if ".*" in glob}
    blocks = [name for run in runs if len(runs) == 1 for name in matching(model, f"{run}.*")]
    for name in mixtures:
        plan |= _routed(model, name, plan, blocks)
    return plan | {f"{run}.*": SplitSequence() for run in runs if len(runs) == 1 and blocks}


def _routed(model: nn.Module, experts: str, plan: TensorPlan, blocks: Collection[str]) -> dict[str, Style]:
    """The styles of a mixture's experts, and of what computes beside them token by token, such as a router."""
    around = experts.rpartition(".")[0]
    inside = model.get_submodule(around).named_modules(prefix=around) if around not in blocks else ()
    with_parameters = [name for name, module in inside if next(module.parameters(recurse=False), None) is not None]
    entered = [f"{name}." for name, style in plan.items() if isinstance(style, Enter)]
    uncut = [
        name for name in with_parameters if name not in plan and not any(name.startswith(each) for each in entered)
    ]
    return dict.fromkeys([experts, *uncut], Replicate())


def _without_experts(theirs: Mapping[str, str]) -> dict[str, str]:
    """A `base_model_tp_plan` without what it says of a mixture's experts and of their stacks."""
    experts = [glob for glob, style in theirs.items() if style == _EXPERTS]
    return {
        glob: style
        for glob, style in theirs.items()
        if not any(glob == each or glob.startswith(f"{each}.") for each in experts)
    }


def _region(parent: nn.Module, inside: list[Style], heads: int, one_key_head: bool) -> Enter:
    """A rank whose own query heads share one key head has a group of all of them; not where heads are put together."""
    groups, gathered = "num_key_value_groups", any(isinstance(style, Colwise) and style.gathered for style in inside)
    return Enter(((groups, heads),) if one_key_head and not gathered and hasattr(parent, groups) else ())


def _is_region(styles: Mapping[str, Style], name: str) -> bool:
    """Whether there are a matrix that is cut by columns and one by rows side by side."""
    return all(any(isinstance(style, kind) for style in _siblings(styles, name)) for kind in (Colwise, Rowwise))


def _siblings(styles: Mapping[str, Style], name: str) -> list[Style]:
    """Styles of the modules that have the same parent, this one's among them."""
    return [style for each, style in styles.items() if each.rpartition(".")[0] == name.rpartition(".")[0]]


def _named(model: nn.Module, glob: str) -> list[str]:
    """Modules, or parameters, that a glob means; none where the plan is of a part that this model does not have."""
    if names := matching(model, glob):
        return names
    parent, _, attribute = glob.rpartition(".")
    parents = matching(model, parent) if parent else []
    return [f"{name}.{attribute}" for name in parents if attribute in model.get_submodule(name)._parameters]


def check_styles(whose: str, theirs: Mapping[str, str]) -> None:
    """Refuse a `base_model_tp_plan` with styles that are unknown here.

    Raises:
        BadInput: there.
    """
    known = _without_experts(theirs)
    for glob, style in known.items():
        if style not in _TRANSFORMERS:
            raise BadInput(
                f"The base_model_tp_plan of {whose} gives {glob!r} the style {style!r}, which this version does not "
                f"know; it knows {', '.join(_TRANSFORMERS)}, and leaves a mixture's experts whole. Take tp 1, or give "
                f"tz.parallelize a plan of your own without {glob!r}, as in tensor={_example(known)}."
            )


def _example(theirs: Mapping[str, str]) -> dict[str, str]:
    """A plan that has to do with the model: of modules of which theirs has a column and a row side by side."""
    for glob, style in theirs.items():
        around = glob.rpartition(".")[0]
        siblings = {each: one for each, one in theirs.items() if each.rpartition(".")[0] == around}
        cut = {each: one for each, one in siblings.items() if one in ("colwise", "rowwise")}
        if style == "rowwise" and around and "colwise" in cut.values() and {*siblings.values()} <= {*_TRANSFORMERS}:
            return {around: "enter", **cut}
    return {"layers.*.mlp": "enter", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
