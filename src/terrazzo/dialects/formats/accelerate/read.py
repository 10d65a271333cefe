"""Reading Accelerate's YAML: what shards, and on which engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.reader import only_from_file
from terrazzo.dialects.formats.accelerate.accelerate_reader import AccelerateReader
from terrazzo.dialects.formats.accelerate.keys import TYPES
from terrazzo.dialects.formats.accelerate.read_deepspeed import read_deepspeed
from terrazzo.dialects.formats.accelerate.read_fsdp import VERSION, read_fsdp
from terrazzo.dialects.formats.shared.accelerate_dtypes import stack_precision, under_fp8
from terrazzo.dialects.formats.shared.accelerate_stack import read_axes
from terrazzo.dialects.formats.shared.fsdp_arguments import offload
from terrazzo.dialects.formats.shared.plan_rows import row_settings

__all__ = ["read"]

_AXIS = "parallelism_config.parallelism_config_{}_size"


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    reader = AccelerateReader(document, context)
    kind = _kind(reader)
    half = _half(reader)
    settings = read_axes(reader, _AXIS, fsdp=TYPES[kind.value] == "fsdp") | _world(reader)
    settings |= {"mesh.pp": Setting(1, "default"), "mesh.ep": Setting(1, "default")}
    settings |= _engine(reader, TYPES[kind.value], half, settings) | _compile(reader, TYPES[kind.value])
    if kind.origin == "file":
        settings = {path: _chosen(path, setting, kind) for path, setting in settings.items()}
    if half.value == "fp8":
        settings["precision.linears"] = Setting("fp8-tensorwise", half.origin, half.key)
    reader.keep_rest(fp8=half.value == "fp8")
    return reader.finish("accelerate", settings)


def _kind(reader: AccelerateReader) -> Setting[str]:
    """What shards; `NO` without quotes is false in YAML."""
    if reader.raw("distributed_type") is False:
        reader.refuse("distributed_type", "YAML reads NO as false: write 'NO' in quotes")
        return Setting("NO", "default")
    kind = reader.take("distributed_type")
    return kind if kind.value is not None else replace(kind, value="NO")


def _half(reader: AccelerateReader) -> Setting[Any]:
    """Mixed precision; `no` without quotes is false in YAML, which Accelerate trips over."""
    if reader.raw("mixed_precision") is False:
        reader.refuse("mixed_precision", "YAML reads no as false, and Accelerate stops there: write 'no' in quotes")
        return Setting(None, "default")
    older = reader.take("fp16")
    if older.origin == "file":
        reader.mark("fp16", "renamed", "today's word is mixed_precision: fp16")
    if older.value and "mixed_precision" not in reader.flat:
        return Setting("fp16", "file", "fp16")
    return reader.take("mixed_precision")


def _world(reader: AccelerateReader) -> SettingsByPath:
    """Ranks. -1 leaves them to the command line."""
    ranks = reader.take("num_processes")
    cpu = reader.take("use_cpu")
    settings: SettingsByPath = {"training.device": Setting("cpu" if cpu.value else None, cpu.origin, cpu.key)}
    settings |= only_from_file({"mesh.nodes": reader.take("num_machines")})
    if ranks.value > 0:
        return settings | {"mesh.world": ranks}
    if ranks.origin == "file":
        reader.keep("num_processes", "the command line says how many", loss="harmless")
    return settings


def _engine(reader: AccelerateReader, engine: str, half: Setting[Any], settings: SettingsByPath) -> SettingsByPath:
    world = settings["mesh.world"].value if "mesh.world" in settings else reader.context.world
    if engine == "deepspeed":
        low = under_fp8(half)
        from_file = {path: setting for path, setting in settings.items() if setting.origin == "file"}
        return read_deepspeed(reader, low, world) | from_file
    if engine == "fsdp":
        return read_fsdp(reader, settings) | _precision(reader, f"fsdp{reader.take(VERSION).value}", half)
    if engine == "another engine":
        reader.refuse("distributed_type", "it is an engine of its own: take FSDP, DEEPSPEED or MULTI_GPU")
        return {}
    replicas: SettingsByPath = {
        **row_settings("zero0", Setting(None, "default")),
        **offload(Setting(False, "default")),
        "saving.state": Setting("full", "default"),
        "saving.export": Setting("full", "default"),
        "loading.broadcast": Setting(True, "default"),
    }
    return replicas | _precision(reader, "ddp", half)


def _precision(reader: AccelerateReader, stack: str, half: Setting[Any]) -> SettingsByPath:
    """fp8 sits on bf16."""
    return stack_precision(stack, under_fp8(half), False, reader.context)


def _compile(reader: AccelerateReader, engine: str) -> SettingsByPath:
    """A backend switches torch.compile on, but for DeepSpeed, which the launcher does not tell."""
    key = "dynamo_config.dynamo_backend"
    backend = reader.take(key)
    if "dynamo_backend" in reader.flat:
        backend = reader.take("dynamo_backend")
    on = str(backend.value or "NO").upper() != "NO"
    if on and engine == "deepspeed":
        reader.refuse(backend.key, "accelerate launch does not hand it to DeepSpeed: call engine.compile()")
        return {"training.compile": Setting(False, "default")}
    return {"training.compile": Setting(on, backend.origin, backend.key)}


def _chosen(path: str, setting: Setting[Any], kind: Setting[Any]) -> Setting[Any]:
    """The row is `distributed_type`'s choice as well."""
    if path.startswith("sharding.") and setting.origin in ("file", "default"):
        return Setting(setting.value, "file", ", ".join((*setting.keys, *kind.keys)))
    return setting
