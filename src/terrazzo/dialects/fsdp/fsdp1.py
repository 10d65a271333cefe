"""Keyword arguments of torch's `FullyShardedDataParallel` (FSDP1), as a mapping of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from terrazzo.dialects.description import Description, Setting
from terrazzo.dialects.dialect import NO_CONTEXT, Context, Dialect, Document, Finding, Reading, Writing
from terrazzo.dialects.draft import Pen
from terrazzo.dialects.fsdp.mesh import mesh_sizes
from terrazzo.dialects.fsdp.policy import FSDP1_POLICY, keep_casts, loaded, otherwise, write_policy
from terrazzo.dialects.fsdp.words import (
    ALONE_WORDS,
    HYBRID_ROWS,
    SHARDING,
    STRATEGIES,
    WRAP_KEYS,
    alone,
    canonical,
    dtype,
    leave_to_loop,
    nearest_row,
    offload,
    row_settings,
    shard_ranks,
    uniform,
    wrap_policy,
    write_offload,
    write_wrap_policy,
)
from terrazzo.dialects.reader import Reader, derived, keep_nulls, refuse_rest

__all__ = ["FSDP1", "NAMES"]

NAMES = {
    "zero3": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "zero0": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
}
"""Torch's name of a row."""
_WORDS = {**STRATEGIES, **{f"shardingstrategy.{word}": row for word, row in STRATEGIES.items()}}
_PREFETCH = {"backward_pre": 1, "backward_post": 0, "backwardprefetch.backward_pre": 1}
_PREFETCH["backwardprefetch.backward_post"] = 0

KEYS: dict[str, str] = {
    "process_group": "ranks to shard over; a pair of groups: hybrid sharding",
    "sharding_strategy": "which states are split, and when the weights are freed",
    "cpu_offload": "weights, gradients and optimizer in host memory",
    "cpu_offload.offload_params": "weights, gradients and optimizer in host memory",
    **{f"auto_wrap_policy{suffix}": "what is gathered and released as one" for suffix in WRAP_KEYS},
    "backward_prefetch": "when backward gathers the next unit",
    "mixed_precision": "dtypes of gather, reduction and buffers",
    "mixed_precision.param_dtype": "dtype of gathered weights, and so of the computation",
    "mixed_precision.reduce_dtype": "dtype of gradients on the wire; none: as param_dtype",
    "mixed_precision.buffer_dtype": "dtype of module buffers",
    "mixed_precision.keep_low_precision_grads": "gradients stay in the dtype of the reduction",
    "mixed_precision.cast_forward_inputs": "inputs of inner units are cast",
    "mixed_precision.cast_root_forward_inputs": "inputs of the whole model are cast",
    "mixed_precision._module_classes_to_ignore": "module classes kept out of mixed precision",
    "ignored_modules": "modules that are not sharded",
    "ignored_states": "parameters or modules that are not sharded",
    "param_init_fn": "function that fills modules built on the meta device",
    "device_id": "device that the units are moved to",
    "sync_module_states": "rank 0's weights are sent to all",
    "forward_prefetch": "forward gathers one unit ahead",
    "limit_all_gathers": "the host waits when too many gathers are under way",
    "use_orig_params": "parameters keep their names and shapes",
    "device_mesh": "sizes of the replica and shard axes",
    "device_mesh.<axis>": "size of one axis, replicas first",
}


class FSDP1(Dialect):
    """`FullyShardedDataParallel(model, **these)`."""

    name = "fsdp1"
    title = "torch FSDP1 arguments"
    suffix = ".yaml"
    known_keys = tuple(KEYS)

    def recognises(self, document: Document) -> bool:
        """By its own argument names, all of which it must know."""
        names = {key.partition(".")[0] for key in KEYS}
        return bool(document) and set(document) <= names and not isinstance(document.get("mixed_precision"), str)

    def meaning(self, key: str) -> str:
        return KEYS.get(key, "")

    def read(self, document: Document, context: Context = NO_CONTEXT) -> Reading:
        return read_arguments(document, context).finish(self.name)

    def write(self, description: Description, context: Context = NO_CONTEXT) -> Writing:
        pen = Pen(description, "FSDP1", self.name)
        leave_to_loop(pen)
        write_arguments(pen, context.world)
        return pen.finish(self.name)

    def findings(self, document: Document, reading: Reading, context: Context) -> Iterable[Finding]:
        return argument_findings(document)


# -- reading -------------------------------------------------------------------------------------------------------


class Arguments:
    """FSDP1 arguments, read; other dialects that pass them on add to `given`."""

    def __init__(self, document: Document) -> None:
        self.reader = Reader(document, "FullyShardedDataParallel", ("device_mesh",))
        self.given: dict[str, Setting[Any]] = {}

    def finish(self, dialect: str) -> Reading:
        refuse_rest(self.reader, KEYS)
        return self.reader.finish(dialect, self.given, KEYS, unknown="raises a TypeError")


def read_arguments(document: Document, context: Context) -> Arguments:
    """What the arguments mean, before unknown keys are spoken of."""
    arguments = Arguments(document)
    reader = arguments.reader
    keep_nulls(reader, KEYS)
    strategy = reader.choice("sharding_strategy", _WORDS, "zero3", null=True)
    strategy = canonical(reader, "sharding_strategy", strategy, NAMES.get(strategy.value))
    where = "cpu_offload.offload_params" if "cpu_offload.offload_params" in reader.flat else "cpu_offload"
    arguments.given = {
        **row_settings(strategy.value, strategy),
        **_mesh(reader, strategy),
        **wrap_policy(reader, "auto_wrap_policy"),
        **_ignored(reader),
        **_precision(reader, context),
        **offload(reader.boolean(where, False, null=True)),
        **_prefetch(reader),
        "loading.broadcast": reader.boolean("sync_module_states", False),
    }
    if whole := alone(arguments.given):
        arguments.given |= whole
        reader.say(strategy.key, "renamed", ALONE_WORDS)
    _keep_needless(reader)
    return arguments


def _mesh(reader: Reader, strategy: Setting[Any]) -> dict[str, Setting[Any]]:
    if reader.get("process_group") is not None:
        why = "a process group is an object of the running program: say the sizes as device_mesh"
        reader.keep("process_group", why, refused=True)
        reader.refuse("process_group", why)
    sizes = mesh_sizes(reader, "device_mesh")
    hybrid = strategy.value in HYBRID_ROWS
    if sizes is not None and len(sizes) != (2 if hybrid else 1):
        shape = "two axes, replicas and shards" if hybrid else "one axis"
        reader.refuse("device_mesh", f"it has {len(sizes)} axes; {NAMES[strategy.value]} takes {shape}")
        sizes = None
    if sizes is None:
        replicas = derived(None, strategy, origin="default") if hybrid else Setting(1, "default")
        return {"mesh.dp_replicate": replicas, "mesh.dp_shard": Setting(None, "default")}
    found = {"mesh.dp_shard": Setting(sizes[-1], "file", "device_mesh")}
    return {**found, "mesh.dp_replicate": Setting(sizes[0] if hybrid else 1, "file", "device_mesh")}


def _ignored(reader: Reader) -> dict[str, Setting[Any]]:
    for key in ("ignored_states", "ignored_modules"):
        if reader.get(key) is not None:
            return {"units.ignored": reader.any(key)}
    return {}


def _precision(reader: Reader, context: Context) -> dict[str, Setting[Any]]:
    section = "mixed_precision"
    words = {name: dtype(reader, f"{section}.{name}_dtype") for name in ("param", "reduce", "buffer")}
    base = loaded(context, any(found.value for found in words.values()))
    if words["param"].value and words["reduce"].value is None:
        reader.say(f"{section}.reduce_dtype", "defaulted", f"none follows param_dtype: {words['param'].value}")
    low = reader.boolean(f"{section}.keep_low_precision_grads", False)
    if low.origin == "file":
        reader.keep(low.key, "gradients stay in the dtype of the reduction", harmless=True)
    compute = otherwise(words["param"], base)
    reduce = otherwise(words["reduce"], words["param"], base)
    keep_casts(reader, {f"{section}.cast_forward_inputs": False, f"{section}.cast_root_forward_inputs": True})
    reader.keep(f"{section}._module_classes_to_ignore", "only FSDP1 keeps module classes out of mixed precision")
    return {
        **uniform(base, "weight", "master", "moments", "saved"),
        "precision.compute": compute,
        "precision.reduce": reduce,
        "precision.accumulate": derived(reduce.value if low.value else base, low, origin=low.origin),
        "precision.buffers": otherwise(words["buffer"], loaded(context, False)),
    }


def _prefetch(reader: Reader) -> dict[str, Setting[Any]]:
    key = "backward_prefetch"
    if key in reader.flat and reader.get(key) is None:
        backward = Setting(0, "file", key)
    else:
        backward = reader.choice(key, _PREFETCH, 1)
    if "post" in str(reader.get(key)).lower() and backward.origin == "file":
        reader.keep(key, "the next unit is gathered after the gradients of this one, not before", harmless=True)
    ahead = reader.boolean("forward_prefetch", False)
    return {
        "prefetch.backward": backward,
        "prefetch.forward": derived(int(bool(ahead.value)), ahead, origin=ahead.origin),
    }


def _keep_needless(reader: Reader) -> None:
    """Arguments that solve problems which only FSDP1 has."""
    notes = {
        "use_orig_params": "FSDP1 only: every other stack keeps parameters with their names and shapes",
        "limit_all_gathers": "FSDP1 only: elsewhere streams wait for each other and the host needs no limit",
        "device_id": "units go to the rank's own device",
    }
    for key, why in notes.items():
        if key != "device_id":
            reader.boolean(key, True)
        if reader.get(key) is not None:
            kept = reader.verdicts.get(key)
            if kept is None or kept.kind == "applied":
                reader.keep(key, why, harmless=True)
    if reader.get("param_init_fn") is not None:
        reader.keep("param_init_fn", "it names code, which is not run: other stacks fill meta modules by themselves")


# -- writing -------------------------------------------------------------------------------------------------------


def write_arguments(pen: Pen, world: int | None = None) -> None:
    """Write all that FSDP1's arguments can say."""
    row, why = nearest_row(pen.description, NAMES)
    if row is not None:
        _write_row(pen, row, why, world)
    elif why:
        pen.refuse(SHARDING, f"{why}: choose one of {', '.join(NAMES.values())}")
    pen.implied("mesh.world")
    write_wrap_policy(pen, "auto_wrap_policy")
    older = pen.own and "ignored_modules" in pen.setting("units.ignored").keys
    pen.option("units.ignored", "ignored_modules" if older else "ignored_states", None)
    write_policy(pen, FSDP1_POLICY)
    if write_offload(pen, "cpu_offload.offload_params"):
        pen.implied("offload.pin") if pen.value("offload.pin", True) else pen.lossy("offload.pin", "FSDP1 always pins")
    _write_prefetch(pen)
    pen.option("loading.broadcast", "sync_module_states", False)


def _write_row(pen: Pen, row: str, why: str, world: int | None) -> None:
    if pen.wanted("sharding.weight", "D", "sharding_strategy") or (not pen.own and row != "zero3"):
        pen.put(SHARDING, "sharding_strategy", NAMES[row], why, "lossy" if why else "applied")
    elif why:
        pen.lossy(SHARDING, why)
    else:
        pen.implied(SHARDING)
    replicas, shards = pen.value("mesh.dp_replicate"), pen.value("mesh.dp_shard")
    if row in HYBRID_ROWS and not pen.own:
        shards = shard_ranks(pen, world)
    axes = ("mesh.dp_replicate", "mesh.dp_shard")
    if pen.own and not pen.setting("mesh.dp_shard").keys:
        pen.implied(axes)
    elif row not in HYBRID_ROWS:
        _write_flat_mesh(pen, shards)
    elif replicas is not None and shards is not None:
        pen.put(axes, "device_mesh", [replicas, shards])
    else:
        said = [path for path in axes if pen.value(path) is not None]
        pen.implied(axes, "by default the ranks of a node are shards, and the nodes replicas")
        pen.lossy(said, "device_mesh needs both sizes, and the number of ranks is not known: say --world")


def _write_flat_mesh(pen: Pen, shards: int | None) -> None:
    """All data ranks are one axis, whatever axes the source has."""
    axes = ("mesh.dp_replicate", "mesh.dp_shard")
    replicas = pen.setting("mesh.dp_replicate").value if pen.is_set("mesh.dp_replicate") else 1
    if shards is not None and replicas is not None:
        kept = replicas == 1
        pen.put(axes, "device_mesh", [replicas * shards], "" if kept else "all data ranks are one axis")
    else:
        pen.implied(axes, "all data ranks are one axis")


def _write_prefetch(pen: Pen) -> None:
    for path, key, words, default in (
        ("prefetch.backward", "backward_prefetch", {0: None, 1: "BACKWARD_PRE"}, 1),
        ("prefetch.forward", "forward_prefetch", {0: False, 1: True}, 0),
    ):
        ahead = pen.value(path)
        if pen.kept(key):
            pen.implied(path, key=key)
        elif ahead is not None and ahead > 1:
            pen.put(path, key, words[1], f"{ahead} units ahead were asked; FSDP1 gathers one", "lossy")
        elif pen.wanted(path, default, key):
            pen.put(path, key, words[ahead])
        else:
            pen.implied(path)


# -- checking ------------------------------------------------------------------------------------------------------


def argument_findings(document: Document) -> Iterable[Finding]:
    """What FSDP1 refuses or takes otherwise than it looks."""
    strategy = str(document.get("sharding_strategy") or "FULL_SHARD").upper()
    if strategy.endswith("NO_SHARD"):
        yield Finding("sharding_strategy", "warning", "NO_SHARD is deprecated in FSDP: use DistributedDataParallel.")
    chosen = ("process_group", "device_mesh", "auto_wrap_policy")
    if "HYBRID" in strategy and all(document.get(key) is None for key in chosen):
        text = f"{strategy} needs device_mesh, process_group or auto_wrap_policy: FSDP raises without any of them."
        yield Finding("sharding_strategy", "error", text)
    for one, other in (("process_group", "device_mesh"), ("ignored_modules", "ignored_states")):
        if document.get(one) is not None and document.get(other) is not None:
            yield Finding(one, "error", f"FSDP raises when both {one} and {other} are given: keep {other}.")
    if document.get("auto_wrap_policy") is None:
        text = "without it the whole model is one unit: all weights are gathered at once, and nothing overlaps."
        yield Finding("auto_wrap_policy", "warning", text)
    if "backward_prefetch" in document and document["backward_prefetch"] is None:
        yield Finding("backward_prefetch", "warning", "none: gathers do not overlap with backward; say BACKWARD_PRE.")
