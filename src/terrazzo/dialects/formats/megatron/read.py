"""Reading Megatron-LM's arguments: ranks, precision and memory. What a step does is in `read_training`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.formats.megatron.keys import DEGREES, KEYS, LAUNCHER, REMOVED, canonical
from terrazzo.dialects.formats.megatron.read_training import read_training
from terrazzo.engine import LossScaling, Plan
from terrazzo.messages import did_you_mean

__all__ = ["read"]

_IDLE = "without {} it says nothing"


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """What arguments mean."""
    reader = Reader(document, "Megatron-LM", keys=KEYS, canonical=canonical)
    reader.keep_nulls()
    settings: SettingsByPath = {"units.policy": Setting("auto", "default")}
    settings |= _world(reader) | _mesh(reader) | _sharding(reader) | _precision(reader) | _offload(reader)
    settings |= _stages(reader, settings["mesh.pp"].value, context) | read_training(reader)
    reading = reader.finish("megatron", settings, unknown="stops at it", gone=REMOVED)
    return replace(reading, description=replace(reading.description, document=_normal(reading.description.document)))


def _normal(document: ConfigDocument) -> dict[str, Any]:
    """The document with every argument by the name that Megatron-LM itself takes."""
    arguments = {canonical(str(key)): value for key, value in document.items()}
    if isinstance(told := arguments.get(LAUNCHER), Mapping):
        names = {canonical(f"{LAUNCHER}.{key}").partition(".")[2]: value for key, value in told.items()}
        arguments[LAUNCHER] = names
    return arguments


def _idle(reader: Reader, key: str, switch: str) -> None:
    """An argument that another one has to switch on."""
    if reader.spelled(key) in reader.flat:
        reader.keep(key, _IDLE.format(switch), loss="harmless")


# -- ranks ---------------------------------------------------------------------------------------------------------


def _world(reader: Reader) -> SettingsByPath:
    """Ranks by what the launcher is given."""
    each, machines = reader.take(f"{LAUNCHER}.nproc-per-node"), reader.take(f"{LAUNCHER}.nnodes")
    for key in [key for key in reader.unread() if key.startswith(f"{LAUNCHER}.")]:
        if near := did_you_mean(canonical(key).partition(".")[2], ("nproc-per-node", "nnodes")):
            reader.refuse(key, f"torchrun has no such option and stops at it.{near}")
    if each.value is None:
        _idle(reader, f"{LAUNCHER}.nnodes", "nproc-per-node")
        return {}
    return {"mesh.world": derived(each.value * machines.value, each, machines, origin="file"), "mesh.nodes": machines}


def _mesh(reader: Reader) -> SettingsByPath:
    settings: SettingsByPath = {path: reader.take(key) for path, key in DEGREES.items()}
    ranks, way = reader.take("context-parallel-size"), reader.take("cp-comm-type")
    words = set(way.value or ("p2p",))
    settings["parallel.sequence"] = reader.take("sequence-parallel")
    if words == {"a2a"} and ranks.value > 1:
        return {
            **settings,
            "mesh.cp": Setting(1, "derived"),
            "mesh.sp": derived(ranks.value, ranks, way, origin="file"),
        }
    if way.origin == "file" and ranks.value > 1 and words <= {"p2p", "allgather"}:
        mode = (
            {"p2p": "ring", "allgather": "gather"}.get(next(iter(words)), "") if len(words) == 1 else "ring or gather"
        )
        reader.keep(way.key, "the numbers are the same", loss="harmless", here=f"parallel.context.mode: {mode}")
    elif way.origin == "file" and ranks.value > 1:
        reader.keep(way.key, "ranks share a sequence in one way, by all layers and nodes: parallel.context.mode")
    else:
        _idle(reader, "cp-comm-type", "context-parallel-size")
    return {**settings, "mesh.cp": ranks, "mesh.sp": Setting(1, "default")}


def _stages(reader: Reader, ranks: int, context: ReadingContext) -> SettingsByPath:
    """Stages of each rank: as said, or as many as its layers make."""
    several, each = (
        reader.take(key) for key in ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")
    )
    layers = KEYS["num-layers-per-virtual-pipeline-stage"].type.parse(reader.raw("num-layers"))
    layers = layers if isinstance(layers, int) else context.layers
    chunks: Setting[Any] = Setting(several.value or 1, several.origin, several.key)
    if several.value is None and each.value is not None:
        if layers is None:
            reader.keep(each.key, "how many stages a rank has, the number of layers says: give num-layers, or --model")
        else:
            chunks = derived(max(1, layers // ranks // each.value), each, origin="file")
    elif each.value is not None:
        reader.refuse(each.key, "num-virtual-stages-per-pipeline-rank says the same: keep one of them")
    return {"parallel.schedule": Setting("1f1b", "default"), "parallel.chunks": chunks}


def _sharding(reader: Reader) -> SettingsByPath:
    """What is split over data ranks. Without any of the three switches nothing is."""
    own, torchs, split = (
        reader.take(key) for key in ("use-megatron-fsdp", "use-torch-fsdp2", "use-distributed-optimizer")
    )
    groups, whole = reader.take("num-distributed-optimizer-instances"), Setting(None, "default")
    strategy, outer = reader.take("data-parallel-sharding-strategy"), reader.take("outer-dp-sharding-strategy")
    keeps = reader.take("torch-fsdp2-no-reshard-after-forward")
    if not own.value:
        _idle(reader, strategy.key, "use-megatron-fsdp")
        _idle(reader, outer.key, "use-megatron-fsdp")
    if not torchs.value:
        _idle(reader, keeps.key, "use-torch-fsdp2")
    if not own.value and (torchs.value or not split.value):
        _idle(reader, groups.key, "use-distributed-optimizer")
        groups = Setting(1, "default")
    if own.value:
        row, sources = strategy.value, [own, strategy, groups, outer]
    elif torchs.value:
        row, sources = ("shard_grad_op" if keeps.value else "zero3"), [torchs, keeps]
    else:
        row, sources = ("zero1" if split.value else "zero0"), [split, groups]
    two_axes = groups.value > 1 and row != "zero0"
    places = {state: str(place) for state, place in Plan.named(row).places().items()}
    if two_axes:
        places = {state: place.replace("D", "S") for state, place in places.items()}
    if two_axes and own.value and outer.value == "optim":
        places["optim"] = "S,R"
    from_file = [source for source in sources if source.origin == "file"]
    origin: Any = "file" if from_file else "default"
    return {
        **{f"sharding.{state}": derived(place, *from_file, origin=origin) for state, place in places.items()},
        "mesh.dp_replicate": groups if two_axes else Setting(1, "default"),
        "mesh.dp_shard": whole,
    }


# -- precision, offload --------------------------------------------------------------------------------------------


def _precision(reader: Reader) -> SettingsByPath:
    wide, narrow = reader.take("accumulate-allreduce-grads-in-fp32"), reader.take("grad-reduce-in-bf16")
    flags = {half: reader.take(half) for half in ("bf16", "fp16")}
    kind, half = next(((name, flag) for name, flag in flags.items() if flag.value), ("fp32", Setting(False, "default")))
    if all(flag.value for flag in flags.values()):
        reader.keep("fp16", "bf16 is on as well, and Megatron stops there: keep one of them", loss="refused")
    aware, sums = reader.take("use-precision-aware-optimizer"), reader.take("main-grads-dtype")
    sources = [each for each in (half, wide, narrow, sums) if each.origin == "file"]
    torchs = bool(reader.raw("use-torch-fsdp2"))
    grads = "fp32"
    if kind == "bf16" and (narrow.value or torchs or (sums.value == "bf16" and not wide.value)):
        grads = "bf16"
    elif kind == "fp16" and not wide.value:
        grads = "fp16"
    settings: SettingsByPath = {f"precision.{name}": _of(kind, half) for name in ("weight", "compute", "saved")}
    summed = derived(grads, *sources, origin="file" if sources else "default")
    settings |= {"precision.reduce": summed, "precision.accumulate": summed}
    settings |= {"precision.output": Setting("fp32", "default"), "precision.autocast": Setting(False, "default")}
    return settings | _states(reader, aware) | _loss_scaling(reader, kind, half)


def _of(kind: str, half: Setting[Any]) -> Setting[Any]:
    return Setting(kind, half.origin, half.key)


def _states(reader: Reader, aware: Setting[Any]) -> SettingsByPath:
    """Dtypes of the optimizer's states: fp32, unless each is chosen."""
    master, first, second = (reader.take(key) for key in ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"))
    if not aware.value:
        for each in (master, first, second):
            _idle(reader, each.key, "use-precision-aware-optimizer")
        return {path: Setting("fp32", "default") for path in ("precision.master", "precision.moments")}
    if first.value != second.value and second.origin == "file":
        reader.mark(second.key, "lossy", f"both moments have one dtype here, that of exp-avg-dtype: {first.value}")
    reader.keep(aware.key, "each state has the dtype that its own key says, fp32 without one", loss="harmless")
    from_file = [each for each in (first, second) if each.origin == "file"]
    moments = derived(first.value, *from_file, origin="file" if from_file else "default")
    return {"precision.master": master, "precision.moments": moments}


def _loss_scaling(reader: Reader, kind: str, half: Setting[Any]) -> SettingsByPath:
    fixed = reader.take("loss-scale")
    init, least, steps, misses = (
        reader.take(key) for key in ("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
    )
    if kind != "fp16" or fixed.value:
        for each in (init, least, steps, misses):
            _idle(reader, each.key, "fp16 and a dynamic scale")
        settings: SettingsByPath = {"precision.loss_scaling": Setting(None, half.origin, half.key)}
        return settings | ({"precision.static_loss_scale": fixed} if fixed.value else {})
    scaling = LossScaling(init=init.value, interval=int(steps.value), hysteresis=misses.value, minimum=least.value)
    from_file = [each for each in (half, init, least, steps, misses) if each.origin == "file"]
    return {"precision.loss_scaling": derived(scaling, *from_file, origin="file")}


def _offload(reader: Reader) -> SettingsByPath:
    switch, share = reader.take("optimizer-cpu-offload"), reader.take("optimizer-offload-fraction")
    settings: SettingsByPath = {path: Setting("device", "default") for path in ("offload.weight", "offload.grad")}
    if not switch.value or not share.value:
        _idle(reader, share.key, "optimizer-cpu-offload")
        return {**settings, "offload.optim": Setting("device", switch.origin, switch.key)}
    tier = "cpu" if share.value == 1 else f"cpu:{share.value:g}"
    return {**settings, "offload.optim": derived(tier, switch, share, origin="file")}
