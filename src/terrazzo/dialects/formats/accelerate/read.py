"""Reading Accelerate's YAML: what shards, and on which engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByKey
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.formats.accelerate.keys import TYPES
from terrazzo.dialects.formats.accelerate.read_deepspeed import read_deepspeed
from terrazzo.dialects.formats.accelerate.read_fsdp import VERSION, read_fsdp, read_mesh
from terrazzo.dialects.formats.accelerate.reader import AccelerateReader
from terrazzo.dialects.formats.shared.accelerate import stack_precision
from terrazzo.dialects.formats.shared.fsdp import offload
from terrazzo.dialects.formats.shared.rows import row_settings

__all__ = ["read"]


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    source = AccelerateReader(document, context)
    kind = _kind(source)
    half = _half(source)
    given = read_mesh(source, TYPES[kind.value] == "fsdp") | _world(source)
    given |= _engine(source, TYPES[kind.value], half, given) | _compile(source, TYPES[kind.value])
    if kind.origin == "file":
        given = {path: _chosen(path, setting, kind) for path, setting in given.items()}
    if half.value == "fp8":
        given["precision.linears"] = Setting("fp8-tensorwise", half.origin, half.key)
    source.keep_rest(fp8=half.value == "fp8")
    return source.finish("accelerate", given)


def _kind(source: AccelerateReader) -> Setting[str]:
    """What shards; `NO` without quotes is false in YAML."""
    if source.get("distributed_type") is False:
        source.refuse("distributed_type", "YAML reads NO as false: write 'NO' in quotes")
        return Setting("NO", "default")
    found = source.take("distributed_type")
    return found if found.value is not None else replace(found, value="NO")


def _half(source: AccelerateReader) -> Setting[Any]:
    """Mixed precision; `no` without quotes is false in YAML, which Accelerate trips over."""
    if source.get("mixed_precision") is False:
        source.refuse("mixed_precision", "YAML reads no as false, and Accelerate stops there: write 'no' in quotes")
        return Setting(None, "default")
    older = source.take("fp16")
    if older.origin == "file":
        source.say("fp16", "renamed", "today's word is mixed_precision: fp16")
    if older.value and "mixed_precision" not in source.flat:
        return Setting("fp16", "file", "fp16")
    return source.take("mixed_precision")


def _world(source: AccelerateReader) -> SettingsByKey:
    """Ranks. -1 leaves them to the command line."""
    ranks = source.take("num_processes")
    cpu = source.take("use_cpu")
    given: SettingsByKey = {"training.device": Setting("cpu" if cpu.value else None, cpu.origin, cpu.key)}
    if ranks.value > 0:
        return given | {"mesh.world": ranks}
    if ranks.origin == "file":
        source.keep("num_processes", "the command line says how many", loss="harmless")
    return given


def _engine(source: AccelerateReader, engine: str, half: Setting[Any], given: SettingsByKey) -> SettingsByKey:
    world = given["mesh.world"].value if "mesh.world" in given else source.context.world
    if engine == "deepspeed":
        low = Setting("bf16" if half.value == "fp8" else half.value, half.origin, half.key)
        said = {path: setting for path, setting in given.items() if setting.origin == "file"}
        return read_deepspeed(source, low, world) | said
    if engine == "fsdp":
        return read_fsdp(source, given) | _precision(source, f"fsdp{source.take(VERSION).value}", half)
    if engine == "another engine":
        source.refuse("distributed_type", "it is an engine of its own: take FSDP, DEEPSPEED or MULTI_GPU")
        return {}
    replicas: SettingsByKey = {
        **row_settings("zero0", Setting(None, "default")),
        **offload(Setting(False, "default")),
        "saving.state": Setting("full", "default"),
        "saving.export": Setting("full", "default"),
        "loading.broadcast": Setting(True, "default"),
    }
    return replicas | _precision(source, "ddp", half)


def _precision(source: AccelerateReader, stack: str, half: Setting[Any]) -> SettingsByKey:
    """fp8 sits on bf16."""
    under = Setting("bf16" if half.value == "fp8" else half.value, half.origin, half.key)
    return stack_precision(stack, under, False, source.context)


def _compile(source: AccelerateReader, engine: str) -> SettingsByKey:
    """A backend switches torch.compile on, but for DeepSpeed, which the launcher does not tell."""
    key = "dynamo_config.dynamo_backend"
    backend = source.take(key)
    if "dynamo_backend" in source.flat:
        backend = source.take("dynamo_backend")
    on = str(backend.value or "NO").upper() != "NO"
    if on and engine == "deepspeed":
        source.refuse(backend.key, "accelerate launch does not hand it to DeepSpeed: call engine.compile()")
        return {"training.compile": Setting(False, "default")}
    if backend.origin == "file":
        source.keep_as(backend.key, source.flat[backend.key], "which compiler")
    return {"training.compile": Setting(on, backend.origin, backend.key)}


def _chosen(path: str, setting: Setting[Any], kind: Setting[Any]) -> Setting[Any]:
    """The row is `distributed_type`'s choice as well."""
    if path.startswith("sharding.") and setting.origin in ("file", "default"):
        return Setting(setting.value, "file", ", ".join((*setting.keys, *kind.keys)))
    return setting
