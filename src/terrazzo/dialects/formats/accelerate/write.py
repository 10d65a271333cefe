"""Writing Accelerate's YAML from the neutral description."""

from __future__ import annotations

from terrazzo.dialects.core.description import SHARDING, TIERS, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.formats.accelerate.write_engines import write_deepspeed, write_replicas
from terrazzo.dialects.formats.accelerate.write_fsdp import write_fsdp
from terrazzo.dialects.formats.accelerate.write_own import write_own
from terrazzo.dialects.formats.shared.fsdp import leave_to_loop

__all__ = ["write"]


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """A file that `accelerate launch --config_file` takes, with a verdict for every setting."""
    if description.dialect == "accelerate":
        return write_own(description)
    pen = Pen(description, "Accelerate", "accelerate")
    leave_to_loop(pen)
    pen.write("compute_environment", "LOCAL_MACHINE")
    engine = _engine(pen)
    pen.write("distributed_type", engine)
    _machines(pen)
    half = _half(pen, engine)
    if engine == "FSDP":
        write_fsdp(pen, half, context)
    elif engine == "DEEPSPEED":
        write_deepspeed(pen, half)
    else:
        write_replicas(pen, half)
    _compile(pen, engine)
    return pen.finish()


def _engine(pen: Pen) -> str:
    """FSDP where it has the row, DeepSpeed for what only that can do, plain replicas where nothing is split."""
    tiers = {str(pen.value(path, "device")) for path in TIERS}
    finer = len(tiers) > 1 or not tiers <= {"device", "cpu"}
    row, sequence = pen.description.row, pen.value("mesh.sp", 1) > 1
    split = all(pen.is_set(path) for path in SHARDING) and row != "zero0"
    if pen.description.dialect == "deepspeed" and split:
        return "DEEPSPEED"
    if row in ("zero1", "zero2") or sequence or (finer and row in ("zero3", "shard_grad_op")):
        return "DEEPSPEED"
    if not split:
        return "MULTI_CPU" if pen.value("training.device") == "cpu" else "MULTI_GPU"
    return "FSDP"


def _machines(pen: Pen) -> None:
    if pen.value("mesh.world") is not None:
        pen.put("mesh.world", "num_processes", pen.value("mesh.world"))
    if pen.value("training.device") == "cpu":
        pen.put("training.device", "use_cpu", True)
    else:
        pen.implied("training.device")


def _half(pen: Pen, engine: str) -> str | None:
    """Write mixed precision; None where none of it is on.

    Weights, masters and compute all in 16 bits are, under FSDP, a model loaded so and no mixed precision.
    """
    compute = pen.value("precision.compute")
    if str(linears := pen.value("precision.linears")).startswith("fp8-"):
        return _fp8(pen, linears)
    if compute not in ("bf16", "fp16"):
        if pen.is_set("precision.compute"):
            pen.write("mixed_precision", "no")
        return None
    pure = compute == pen.value("precision.weight") == pen.value("precision.master")
    if pure and engine != "DEEPSPEED":
        pen.write("mixed_precision", "no")
        return None
    pen.put("precision.compute", "mixed_precision", compute)
    return str(compute)


def _fp8(pen: Pen, linears: str) -> str:
    """The recipe that torchao has by default, which is the scale of a whole matrix; bf16 lies under it."""
    code = "Accelerate scales whole matrices: pass AORecipeKwargs(config=Float8LinearConfig.from_recipe_name(...))"
    pen.put("precision.linears", "mixed_precision", "fp8", *((code, "lossy") if linears == "fp8-rowwise" else ()))
    pen.write("fp8_config", {"fp8_backend": "AO", "fp8_enable_fsdp_float8_all_gather": False})
    if pen.value("precision.compute") == "bf16":
        pen.implied("precision.compute", key="mixed_precision")
    else:
        pen.lossy("precision.compute", "fp8 lies on bf16", "mixed_precision")
    if pen.value("precision.skip"):
        pen.lossy("precision.skip", "layers are chosen in code: AORecipeKwargs(module_filter_func=...)")
    return "fp8"


def _compile(pen: Pen, engine: str) -> None:
    if not pen.value("training.compile"):
        pen.implied("training.compile")
    elif engine == "DEEPSPEED":
        pen.lossy("training.compile", "accelerate launch does not hand it to DeepSpeed: call engine.compile()")
    else:
        pen.put("training.compile", "dynamo_config.dynamo_backend", "INDUCTOR")
