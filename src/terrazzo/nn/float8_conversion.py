"""Linear layers of a model given 8-bit products, and which are left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from terrazzo.errors import BadInput
from terrazzo.marks import SHARES_MATRICES, is_sharded
from terrazzo.messages import listed
from terrazzo.name_globs import matches_any, matches_one
from terrazzo.nn.float8_linear import FLOAT8, Float8Linear
from terrazzo.nn.float8_matrices import MULTIPLE, Recipe, check_multiplies, recipe_named
from terrazzo.nn.float8_products import Float8
from terrazzo.nn.forward_replacement import replace_forward
from terrazzo.nn.routers import is_router

__all__ = ["Converted", "float8"]


@dataclass(frozen=True)
class Converted:
    """What `float8` has done.

    Attributes:
        recipe: by name.
        names: of the linear layers that multiply in 8 bits.
        kept: why the others do not, by name.
    """

    recipe: str
    names: tuple[str, ...]
    kept: dict[str, str]

    def __str__(self) -> str:
        reasons = {why: [name for name, each in self.kept.items() if each == why] for why in self.kept.values()}
        others = "".join(f"; not {listed(names)}: {why}" for why, names in reasons.items())
        return f"float8 {self.recipe} in {len(self.names)} linear layers{others}"


def float8(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    skip: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> Converted:
    """Have a model's linear layers multiply in 8-bit floats; parameters, their names and dtypes stay.

    To be called before `tz.parallelize` and `tz.shard`. Weights are cast each time they are used, from what the layer
    has: under a plan that splits them, from the whole gathered weight; where ranks along `tp` have parts of a matrix,
    `tensorwise` scales it by the largest value of the whole one, and `rowwise` each rank's rows by themselves. Inputs
    and gradients are scaled as the rank has them. On a CPU products are emulated: the numbers of `torch._scaled_mm`
    there up to the order of sums, without its speed.

    Sizes that are no multiples of 16 are left alone, and so are layers that choose experts, those whose forward is not
    torch's own, and those of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, whose kernels read the weights.
    Products can be differentiated once: a gradient with `create_graph=True` raises `Misuse`.

    Args:
        recipe: `tensorwise`, or `rowwise`, which is more precise and gains less speed.
        skip: globs over names of layers that are left alone, a `*` for any part of one. Default: those outside of the
            repeated blocks (elements of an `nn.ModuleList`, or of the same class in an `nn.Sequential`), such as a
            head; without blocks, the first and the last.
        device: that the model will run on; default, where its parameters are. On the meta device nothing is tried.

    Raises:
        BadInput: with nothing changed, an unknown recipe, no layer to convert, a glob that matches none, a model that
            has been converted, cut or sharded already, a device without such products, as CUDA's before capability 8.9.
    """
    chosen = recipe_named(recipe)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    _check_untouched(model)
    placed = next((each.device for each in model.parameters()), torch.device("cpu")) if device is None else device
    if placed.type != "meta":
        _check_device(chosen, placed)
    reasons = _reasons_to_keep(model, linears, skip)
    names = tuple(name for name in linears if name not in reasons)
    if not names:
        why = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:4]) or "it has none"
        raise BadInput(
            f"float8 found no linear layer of {type(model).__name__} to convert ({why}). It knows "
            "torch.nn.Linear alone. Leave float8 out, or name what is to be left alone yourself, by skip=[...]."
        )
    for name in names:
        module = linears[name]
        FLOAT8.leave(module, Float8(chosen))
        replace_forward(module, Float8Linear.forward, extra_repr=Float8Linear.extra_repr)
    return Converted(chosen.name, names, reasons)


def _check_device(recipe: Recipe, device: torch.device) -> None:
    """Raise `BadInput` for one that does not multiply 8-bit floats, which a product of 16 by 16 tells."""
    try:
        check_multiplies(recipe, device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(
            f"float8: {device} does not multiply 8-bit floats ({str(error).splitlines()[0]}). Matrix units for them "
            "came with Ada and Hopper (compute capability 8.9), and torch has kernels for NVIDIA's alone: use bf16."
        ) from error


def _check_untouched(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if FLOAT8.find(module) is not None:
            raise BadInput(f"{name!r} multiplies in 8 bits already: call float8 once.")
        if is_sharded(module):
            raise BadInput(f"The {type(module).__name__} is sharded already: call tz.nn.float8 before tz.shard.")
        if SHARES_MATRICES.find(module) is not None:
            raise BadInput(
                f"The {type(model).__name__} has been cut by tz.parallelize, and float8 would scale each rank's part "
                "by itself: call tz.nn.float8 before."
            )


def _reasons_to_keep(model: nn.Module, linears: dict[str, nn.Linear], skip: Sequence[str] | None) -> dict[str, str]:
    """Why layers are left alone, by name."""
    reasons: dict[str, str] = {}
    uncalled = dict(_uncalled(model))
    if isinstance(skip, str):  # which is a sequence, of globs of one letter
        raise BadInput(f"float8: skip is {skip!r}: give a list of globs, [{skip!r}].")
    for glob in skip or ():
        if not matches_one(linears, glob):
            raise BadInput(
                f"float8: skip has {glob!r}, which matches no linear layer of {type(model).__name__}; they are "
                f"{listed(list(linears), 6)}; a '*' stands for any part of a name."
            )
    outside = _outside(model, list(linears)) if skip is None else set()
    for name, module in linears.items():
        if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
            reasons[name] = "another forward"
        elif name in uncalled:
            reasons[name] = uncalled[name]
        elif matches_any(name, skip or ()):
            reasons[name] = "skipped"
        elif name in outside:
            reasons[name] = "outside of the blocks"
        elif is_router(model, name):  # a small error sends a token elsewhere
            reasons[name] = "chooses experts"
        elif module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            reasons[name] = f"a size is no multiple of {MULTIPLE}"
    return reasons


def _uncalled(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Layers whose weights torch reads in a kernel of the module around them, by name, and why."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield f"{name}.out_proj".removeprefix("."), "nn.MultiheadAttention does not call it"
        if isinstance(module, nn.TransformerEncoderLayer):
            for each in ("linear1", "linear2"):
                yield f"{name}.{each}".removeprefix("."), "nn.TransformerEncoderLayer does not call it in evaluation"


def _outside(model: nn.Module, names: Sequence[str]) -> set[str]:
    """The `names` that are in no repeated block; the first and the last where there is no block."""
    blocks = tuple(f"{name}." for name in _blocks(model))
    outside = {name for name in names if not name.startswith(blocks)} if blocks else set(names)
    return {names[0], names[-1]} if outside == set(names) and names else outside


def _blocks(model: nn.Module) -> Iterator[str]:
    """Names of elements of lists, and of those of a sequence that another of their class stands beside."""
    for name, module in model.named_modules():
        kinds = [type(each) for each in module.children()]
        for inner, each in module.named_children():
            if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and kinds.count(type(each)) > 1):
                yield f"{name}.{inner}".removeprefix(".")
