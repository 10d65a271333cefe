"""What Terrazzo calls and torch does not document, each looked up here alone, on import; `nn` is below, and has one.

What the engine reads beside them are attributes that torch's objects have; whether this torch has those is looked up
here, too. The table at the end of `docs/concepts/engine.md` says what each is for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

__all__ = [
    "FOREACH",
    "FlashAttention",
    "SavedHooks",
    "as_class",
    "default_store",
    "graph_task",
    "lookup",
    "plainly",
    "queue_callback",
    "set_versions",
    "tensor_data",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "uncompiled",
    "uncompiled_once_called",
    "unseen",
    "will_run",
    "without_transform",
]


def lookup(owner: Any, *path: str) -> Any:
    """What torch has there under these names, one inside of the other.

    Raises:
        ImportError: where it has not.
    """
    for name in path:
        named = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name, _NONE)
        if named is _NONE:
            raise ImportError(
                f"Terrazzo needs {name!r} of {getattr(owner, '__name__', owner)!s}, which torch "
                f"{torch.__version__} does not have. It is there from torch 2.11 to 2.13: install one of these."
            )
        owner = named
    return owner


_NONE = object()

# -- tensors and autograd ----------------------------------------------------------------------------------------------

plainly: Any = lookup(torch, "_C", "DisableTorchFunctionSubclass")
"""A block, `with plainly():`, in which torch asks no subclass: parameters at rest would answer in Python."""
tensor_data: Any = lookup(torch, "_C", "TensorBase", "data")
"""Torch's own property `data` of a tensor."""
as_class: Callable[..., Any] = lookup(Tensor, "_make_subclass")
"""A tensor as one of a subclass: `as_class(kind, tensor, requires_grad)`."""
set_versions: Callable[[Sequence[Tensor], Sequence[int]], None] = lookup(
    torch, "_C", "_autograd", "_unsafe_set_version_counter"
)
"""Set the `_version` of each of these tensors."""
graph_task: Callable[[], int] = lookup(torch, "_C", "_current_graph_task_id")
"""The number of the backward that has called what runs now on this thread; -1 outside."""
will_run: Callable[[Any], bool] = lookup(torch, "_C", "_will_engine_execute_node")
"""Whether the backward that is under way comes to a node of the graph. Raises: `RuntimeError` for the node at a leaf of
which `torch.autograd.grad` wants the gradient."""
queue_callback: Callable[[Callable[[], Any]], None] = lookup(
    torch.autograd, "Variable", "_execution_engine", "queue_callback"
)
"""Have something called when the backward that is under way has ended."""

_is_transformed: Callable[[Tensor], bool] = lookup(torch, "_C", "_functorch", "is_functorch_wrapped_tensor")
_inside_transform: Callable[[Tensor], Tensor] = lookup(torch, "_C", "_functorch", "get_unwrapped")


def without_transform(tensor: Tensor) -> Tensor:
    """What `torch.vmap`, or another of `torch.func`'s transforms, has wrapped; elsewhere the tensor itself."""
    while _is_transformed(tensor):
        tensor = _inside_transform(tensor)
    return tensor


# -- operators that others watch, or call ------------------------------------------------------------------------------

_DISPATCH = importlib.import_module("torch.utils._python_dispatch")
_modes: Callable[[], Sequence[Any]] = lookup(_DISPATCH, "_get_current_dispatch_mode_stack")
_without_modes: Callable[[], AbstractContextManager[Any]] = lookup(_DISPATCH, "_disable_current_modes")
_NUMBERING = tuple(
    lookup(torch.utils.checkpoint, name) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)


def unseen() -> AbstractContextManager[Any]:
    """A block whose operations a selective checkpoint does not see, if this is inside of one.

    It numbers the operations of a forward, and gives those that it has kept by their number as the forward runs again:
    what the engine does beside is other operations each time.
    """
    return _without_modes() if any(isinstance(mode, _NUMBERING) for mode in _modes()) else nullcontext()


_LISTS = (
    "_foreach_norm",
    "_foreach_mul_",
    "_foreach_div_",
    "_foreach_zero_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
)
FOREACH: dict[str, Any] = {name.partition("each_")[2]: lookup(torch, name) for name in _LISTS}
"""What torch's own clipping and optimizers call on lists of gradients."""


class SavedHooks:
    """The default hooks for what autograd keeps for backward, of this thread."""

    _autograd = lookup(torch, "_C", "_autograd")
    are_on: Callable[[], bool] = staticmethod(lookup(_autograd, "_saved_tensors_hooks_is_enabled"))
    push: Callable[..., None] = staticmethod(lookup(_autograd, "_push_saved_tensors_default_hooks"))
    pop: Callable[[], None] = staticmethod(lookup(_autograd, "_pop_saved_tensors_default_hooks"))
    top: Callable[[bool], Any] = staticmethod(lookup(_autograd, "_top_saved_tensors_default_hooks"))


class FlashAttention:
    """Torch's flash attention with the log-sum-exp, which `F.scaled_dot_product_attention` keeps to itself."""

    _aten: Any = torch.ops.aten
    on_cpu: Callable[..., Any] = staticmethod(lookup(_aten, "_scaled_dot_product_flash_attention_for_cpu"))
    on_cpu_backward: Callable[..., Any] = staticmethod(
        lookup(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    )
    on_cuda: Callable[..., Any] = staticmethod(lookup(_aten, "_scaled_dot_product_flash_attention"))
    on_cuda_backward: Callable[..., Any] = staticmethod(lookup(_aten, "_scaled_dot_product_flash_attention_backward"))


# -- processes, the compiler, objects ----------------------------------------------------------------------------------

default_store: Callable[[], dist.Store] = lookup(dist, "distributed_c10d", "_get_default_store")
"""The store by which the ranks of the default group have found each other."""


P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, kept out of graphs of torch's compiler; the first time that takes seconds to load."""
    wrapped: Callable[..., Any] = lookup(torch, "_dynamo", "disable")(function)
    return wrapped


def uncompiled_once_called(function: Callable[P, T]) -> Callable[P, T]:
    """The same of what is defined where nothing may be compiled: the compiler loads with the first call, not here."""
    wrapped: Callable[P, T] = lookup(torch, "_disable_dynamo")(function)
    return wrapped


def _check_attributes() -> None:
    """Raises `ImportError` where torch's objects have others than those that the engine reads."""
    for owner, names in (
        (Tensor, ("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")),
        (torch.UntypedStorage, ("_cdata", "resize_")),
        (torch.utils.checkpoint, ("_checkpoint_hook", "_recomputation_hook")),
        (nn.Module, ("_call_impl", "_compiled_call_impl", "_load_from_state_dict")),
        (DeviceMesh, ("_flatten",)),
        (ProcessGroup, ("_get_backend",)),
    ):
        for name in names:
            lookup(owner, name)
    modules = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks")
    hooks = ("_forward_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    module = nn.Module()
    for name in (*modules, *hooks):
        lookup(module, name)
    steps = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    loads = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    for name in (*steps, *loads):
        lookup(SimpleNamespace(**Optimizer.__annotations__), name)  # making one loads the compiler, which takes seconds


_check_attributes()
