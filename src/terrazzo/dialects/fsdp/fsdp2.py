"""Arguments of torch's `fully_shard` (FSDP2), its policies, and the calls on an `FSDPModule`, as a mapping of names.

`module` is its first argument: the class names of the modules that are units beside the root. `mesh` is sizes, or names
with sizes. What `reduce_dtype: null` means has changed: the dtype of the computation up to torch 2.14, that of the
parameter from 2.15 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from terrazzo.dialects.description import Description, Setting
from terrazzo.dialects.dialect import NO_CONTEXT, Context, Dialect, Document, Finding, Reading, Writing
from terrazzo.dialects.draft import Pen
from terrazzo.dialects.fsdp.mesh import MODEL_AXES, read_mesh, write_sharding
from terrazzo.dialects.fsdp.policy import FSDP2_POLICY, keep_casts, loaded, otherwise, write_policy
from terrazzo.dialects.fsdp.words import OFFLOAD, canonical, dtype, leave_to_loop, offload, uniform, write_offload
from terrazzo.dialects.reader import Reader, derived, keep_nulls, refuse_rest

__all__ = ["FSDP2", "REDUCE_CHANGED"]

REDUCE_CHANGED = (2, 15)
"""The version of torch from which on no `reduce_dtype` means the parameter's own dtype."""

_METHODS = {
    "set_modules_to_forward_prefetch": "units that forward gathers ahead",
    "set_modules_to_backward_prefetch": "units that backward gathers ahead",
    "set_requires_gradient_sync": "whether backward reduces gradients",
    "set_requires_all_reduce": "whether backward reduces over replicas",
    "set_is_last_backward": "marks the last micro-batch",
    "set_gradient_divide_factor": "divisor of the reduced gradient",
    "set_force_sum_reduction_for_comms": "gradients are summed, and divided on the rank",
    "set_reshard_after_forward": "changes the policy while training",
    "set_reshard_after_backward": "whether weights are freed after backward",
    "set_unshard_in_backward": "whether backward gathers weights",
    "set_all_reduce_hook": "function in place of the reduction over replicas",
    "set_custom_all_gather": "class in place of the gather",
    "set_custom_reduce_scatter": "class in place of the reduction",
    "set_symm_mem_for_comm": "collectives in symmetric memory",
    "set_reduce_scatter_max_input_buffers": "most buffers of reductions under way",
    "set_reduce_scatter_divide_factor": "older word for set_gradient_divide_factor",
    "set_reduce_scatter_unused_params": "whether parameters without gradients are reduced",
    "set_separate_reduce_scatter_group": "a process group of its own for the reduction",
    "set_allocate_memory_from_process_group_for_comm": "buffers from the process group's memory",
    "set_post_optim_event": "event that the next gather waits for",
    "unshard": "gathers by hand",
    "reshard": "frees by hand",
}
KEYS: dict[str, str] = {
    "module": "class names of the modules that are units, beside the root",
    "mesh": "sizes of the data axes: shards, or replicas and shards",
    "mesh.<axis>": "size of an axis by name",
    "dp_mesh_dims": "which axes of a larger mesh are data axes",
    "dp_mesh_dims.shard": "axes to shard over",
    "dp_mesh_dims.replicate": "axes to replicate over",
    "reshard_after_forward": "whether weights are freed after forward; a number: kept split over so many ranks",
    "shard_placement_fn": "function that chooses the tensor dim to split",
    "mp_policy": "dtypes of gather and reduction",
    "mp_policy.param_dtype": "dtype of gathered weights, and so of the computation",
    "mp_policy.reduce_dtype": "dtype of gradients on the wire, and of their sum while reduction is off",
    "mp_policy.output_dtype": "dtype that outputs of a unit are cast to",
    "mp_policy.cast_forward_inputs": "inputs of a unit are cast",
    "offload_policy": "CPUOffloadPolicy: weights, gradients and optimizer in host memory",
    "offload_policy.pin_memory": "host memory is page-locked",
    "ignored_params": "parameters that are not sharded",
    **_METHODS,
}
_LOOP = "it belongs to the training loop there"
_FASTER = "it changes how gradients travel, not what they are"
_CODE = "it names code, which is not run"
_KEPT: dict[str, tuple[str, dict[str, bool]]] = {
    "shard_placement_fn": (f"{_CODE}; parameters are split along dim 0 without it", {}),
    "set_requires_gradient_sync": (_LOOP, {}),
    "set_requires_all_reduce": (_LOOP, {}),
    "set_is_last_backward": (_LOOP, {}),
    "set_gradient_divide_factor": (
        "gradients are divided by another number: scale the loss instead",
        {"refused": True},
    ),
    "set_force_sum_reduction_for_comms": (_FASTER, {"harmless": True}),
    "set_reshard_after_forward": ("a plan is fixed when training starts", {}),
    "set_reshard_after_backward": ("weights that are split at rest are freed after backward", {}),
    "set_unshard_in_backward": ("backward gathers whatever it needs", {}),
    "set_all_reduce_hook": (_CODE, {"refused": True}),
    "set_custom_all_gather": (_CODE, {"refused": True}),
    "set_custom_reduce_scatter": (_CODE, {"refused": True}),
    "set_symm_mem_for_comm": (_FASTER, {"harmless": True}),
    "set_reduce_scatter_max_input_buffers": (_FASTER, {"harmless": True}),
    "set_reduce_scatter_divide_factor": ("gradients are divided by another number: scale the loss", {"refused": True}),
    "set_reduce_scatter_unused_params": ("what a missing gradient counts as is the library's", {}),
    "set_separate_reduce_scatter_group": (_FASTER, {"harmless": True}),
    "set_allocate_memory_from_process_group_for_comm": (_FASTER, {"harmless": True}),
    "set_post_optim_event": (_FASTER, {"harmless": True}),
    "unshard": ("gathers are scheduled by the library there", {"harmless": True}),
    "reshard": ("gathers are scheduled by the library there", {"harmless": True}),
}
_OFFLOADS = {"cpuoffloadpolicy": True, "offloadpolicy": False, True: True, False: False}


class FSDP2(Dialect):
    """`fully_shard(module, **these)` for every unit and the root."""

    name = "fsdp2"
    title = "torch FSDP2 (fully_shard) arguments"
    suffix = ".yaml"
    known_keys = tuple(KEYS)

    def recognises(self, document: Document) -> bool:
        """By its own argument names, all of which it must know."""
        names = {key.partition(".")[0] for key in KEYS}
        return bool(document) and set(document) <= names

    def meaning(self, key: str) -> str:
        return KEYS.get(key, KEYS["mesh.<axis>"] if key.startswith("mesh.") else "")

    def read(self, document: Document, context: Context = NO_CONTEXT) -> Reading:
        reader = Reader(document, "fully_shard", ("mesh",))
        keep_nulls(reader, KEYS)
        given = {
            **read_mesh(reader, context),
            **_units(reader),
            **_precision(reader, context),
            **_offload(reader),
            **_prefetch(reader),
        }
        for key, (why, grave) in _KEPT.items():
            if reader.get(key) is not None:
                reader.keep(key, why, **grave)
        refuse_rest(reader, KEYS)
        return reader.finish(self.name, given, KEYS, unknown="raises a TypeError")

    def write(self, description: Description, context: Context = NO_CONTEXT) -> Writing:
        pen = Pen(description, "FSDP2", self.name)
        leave_to_loop(pen)
        write_sharding(pen, context)
        _write_units(pen)
        write_policy(pen, FSDP2_POLICY)
        _write_offload(pen)
        for way, default in (("forward", 0), ("backward", 1)):
            pen.option(f"prefetch.{way}", f"set_modules_to_{way}_prefetch", default)
        if pen.value("loading.broadcast"):
            pen.lossy("loading.broadcast", "load with set_model_state_dict(..., broadcast_from_rank0=True)")
        return pen.finish(self.name)

    def findings(self, document: Document, reading: Reading, context: Context) -> Iterable[Finding]:
        yield from _precision_findings(document)
        mesh = document.get("mesh")
        if isinstance(mesh, Mapping) and set(mesh) & set(MODEL_AXES) and not document.get("dp_mesh_dims"):
            text = "fully_shard takes every axis of this mesh for a data axis: say which are, in dp_mesh_dims."
            yield Finding("mesh", "error", text)
        if isinstance(mesh, list | tuple) and len(mesh) == 2:
            text = "fully_shard refuses two axes without names: say {dp_replicate: ..., dp_shard: ...}."
            yield Finding("mesh", "warning", text)
        if "module" not in document:
            text = "module is not said: called on the root alone, all weights are gathered at once."
            yield Finding("module", "warning", text)


# -- reading -------------------------------------------------------------------------------------------------------


def _units(reader: Reader) -> dict[str, Setting[Any]]:
    found: dict[str, Setting[Any]] = {}
    classes = reader.names("module", null=True)
    if classes.value:
        found = {"units.policy": derived("classes", classes, origin="file"), "units.classes": classes}
    if reader.get("ignored_params") is not None:
        found["units.ignored"] = reader.any("ignored_params")
    return found


def reduces_in_parameter_dtype(context: Context) -> bool:
    """Whether this version of torch reduces in the parameter's own dtype where none is said; default: the one here."""
    return context.version("torch", torch.__version__) >= REDUCE_CHANGED


def _precision(reader: Reader, context: Context) -> dict[str, Setting[Any]]:
    words = {name: dtype(reader, f"mp_policy.{name}_dtype") for name in ("param", "reduce", "output")}
    base = loaded(context, any(words[name].value for name in ("param", "reduce")))
    compute = otherwise(words["param"], base)
    followed = base if reduces_in_parameter_dtype(context) else compute
    reduce = otherwise(words["reduce"], followed)
    if words["reduce"].value is None:
        why = (
            f"none: {reduce.value} with this torch; the dtype of the computation up to 2.14, the parameter's from 2.15"
        )
        reader.say("mp_policy.reduce_dtype", "defaulted", why)
    keep_casts(reader, {"mp_policy.cast_forward_inputs": True})
    given = {
        **uniform(base, "weight", "master", "moments", "saved"),
        "precision.compute": compute,
        "precision.reduce": reduce,
        "precision.accumulate": Setting(reduce.value, "default"),
    }
    return {**given, "precision.output": words["output"]} if words["output"].value else given


def _offload(reader: Reader) -> dict[str, Setting[Any]]:
    key = "offload_policy"
    if f"{key}.pin_memory" in reader.flat:
        pin = reader.boolean(f"{key}.pin_memory", True)
        return offload(Setting(True, "file", pin.key), pin)
    enabled = reader.choice(key, _OFFLOADS, False, null=True)
    return offload(canonical(reader, key, enabled, "CPUOffloadPolicy" if enabled.value else "OffloadPolicy"))


def _prefetch(reader: Reader) -> dict[str, Setting[Any]]:
    found: dict[str, Setting[Any]] = {}
    for way, default in (("forward", 0), ("backward", 1)):
        key = f"set_modules_to_{way}_prefetch"
        raw = reader.get(key)
        if isinstance(raw, list | tuple):
            reader.keep(key, f"so many units are gathered ahead in {way}; which ones, the order of the run decides")
            found[f"prefetch.{way}"] = Setting(len(raw), "file", key)
        else:
            found[f"prefetch.{way}"] = reader.integer(key, default)
    return found


# -- writing -------------------------------------------------------------------------------------------------------


def _write_units(pen: Pen) -> None:
    policy = pen.value("units.policy")
    if policy == "classes":
        pen.put("units.classes", "module", list(pen.value("units.classes", ())))
        pen.implied("units.policy", key="module")
    elif policy in ("auto", "min_numel"):
        paths = ("units.policy", "units.min_numel")
        pen.lossy(paths, "fully_shard has no rule for units: name the classes of the blocks in module")
    else:
        pen.implied("units.policy", "called on the root alone: the whole model is one unit")
    pen.option("units.ignored", "ignored_params", None)


def _write_offload(pen: Pen) -> None:
    pin = pen.value("offload.pin", True)
    key = "offload_policy"
    said = pen.own and f"{key}.pin_memory" in pen.setting("offload.pin").keys
    if (said or not pin) and any(pen.value(path, "device") != "device" for path in OFFLOAD):
        write_offload(pen, f"{key}.pin_memory", pin)
        pen.implied("offload.pin", key=f"{key}.pin_memory")
        return
    if write_offload(pen, key, "CPUOffloadPolicy", "OffloadPolicy"):
        pen.implied("offload.pin")


# -- checking ------------------------------------------------------------------------------------------------------


def _precision_findings(document: Document) -> Iterable[Finding]:
    policy = document.get("mp_policy")
    if isinstance(policy, Mapping) and policy.get("param_dtype") and not policy.get("reduce_dtype"):
        text = (
            f"reduce_dtype is not said: gradients travel in {policy['param_dtype']} up to torch 2.14 and in the"
            " parameter's own dtype from 2.15 on. Say which."
        )
        yield Finding("mp_policy.reduce_dtype", "warning", text)
