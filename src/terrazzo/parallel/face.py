"""`tz.parallelize`."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.making.parts import SHARES_MATRICES, check_uncut
from terrazzo.engine.model.together import check_agreement, together
from terrazzo.errors import BadInput
from terrazzo.parallel.chunks import Balance
from terrazzo.parallel.context import Context, Mode
from terrazzo.parallel.plans import own_plan
from terrazzo.parallel.ranks import TensorRanks, tensor_ranks
from terrazzo.parallel.sharing import share_sequences
from terrazzo.parallel.tensor import TensorPlan, cut_model

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    mesh: DeviceMesh,
    *,
    tensor: TensorPlan | Literal["auto"] | None = "auto",
    sequence: bool = True,
    context: Mode | None = "gather",
    balance: Balance = "head_tail",
) -> M:
    """Give each rank its part of a model's matrices, before an optimizer is built and `tz.shard` is called. Collective.

    Along `cp` ranks share sequences: each is given its part of them, and attention brings the parts together. Split
    batches with `tz.parallel.context_of(model).split(...)`.

    The model is changed in place: what is cut is replaced by plain parameters of the rank's own part, and modules
    exchange activations with the other ranks along `tp`. These see the same batches; losses, and what the model
    returns, are the same on each of them. Weights that differ between ranks take the first one's values first. On the
    meta device nothing is allocated; `tz.shard` then draws each parameter whole, and the rank keeps its part.

    Args:
        model: the whole model, not sharded, on every rank.
        mesh: of `tz.mesh`, which `tz.shard` is to be given as well. Without an axis `tp` or `cp`, nothing is done.
        tensor: `"auto"`, the model's own plan: its `tensor_plan()`, or the `base_model_tp_plan` of transformers; or
            globs over names of modules to styles, such as `{"layers.*.up": "column", "layers.*.down": "row"}`; or None.
            Styles: `column` and `row` for linear maps, `column_gathered` for one whose outputs are put together again,
            `row_splits` for one whose inputs are whole, `embedding` for a table by rows, `enter` for a module whose
            input is whole for the columns inside, `sequence` for blocks through which each rank takes a part of each
            sequence, `uncut` for what is whole, and `tz.parallel.Column` with heads or fused parts.
        sequence: split sequences through the blocks that the plan says, which sends as much and keeps fewer
            activations. Their length must divide by tp in training.
        context: how attention over shared sequences is computed: `gather`, `ulysses` or `ring`.
        balance: `head_tail`, where all ranks have the same work under a causal mask; or `none`.

    Raises:
        BadInput: on every rank along `tp`, before anything is changed: a plan that is unknown, matches nothing or does
            not fit the model; heads that tp does not divide; a model that is cut already. Likewise along `cp`: a model
            whose attention cannot be shared; no context.
    """
    dims = mesh.mesh_dim_names or ()
    if "cp" in dims and mesh["cp"].size() > 1:
        if context is None:
            raise BadInput(
                f"The mesh has cp {mesh['cp'].size()}, and context is None: each rank would take its part of a sequence"
                " for the whole. Give context='gather', or make the mesh with dp_shard in the place of cp."
            )
        tp = mesh["tp"].size() if "tp" in dims and tensor is not None else 1
        share_sequences(model, Context(mesh.get_group("cp"), context, balance, tp))
    if tensor is None or ("tp" not in dims and tensor == "auto"):
        return model
    if "tp" not in dims:
        raise BadInput(
            f"tz.parallelize was given a plan of tensor parallelism, but the mesh has the axes {', '.join(dims)}: make "
            "it with tz.mesh(tp=2), or leave 'tensor' out."
        )
    if mesh["tp"].size() == 1:
        return model
    ranks = tensor_ranks(mesh)
    plan = together(ranks.axes, lambda: _plan_of(model, ranks, tensor))
    facts: dict[str, object] = {"tensor": {glob: str(style) for glob, style in plan.items()}, "sequence": sequence}
    facts["parameters"] = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()]
    check_agreement(ranks.axes, facts)
    cut_model(model, ranks, plan, sequence)
    vars(model)[SHARES_MATRICES] = ranks
    return model


def _plan_of(model: nn.Module, ranks: TensorRanks, tensor: TensorPlan | str | None) -> TensorPlan:
    check_uncut(model)
    if isinstance(tensor, str):
        if tensor != "auto":
            raise BadInput(f"tensor is {tensor!r}; give 'auto', a dict of globs over module names and styles, or None.")
        return own_plan(model, ranks.size)
    assert tensor is not None, "None has been answered"
    return tensor
