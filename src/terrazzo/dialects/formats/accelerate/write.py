"""Writing Accelerate's YAML from the neutral description."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import TIER_PATHS, Description, Setting
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.accelerate.keys import KEYS
from terrazzo.dialects.formats.accelerate.write_deepspeed import write_deepspeed
from terrazzo.dialects.formats.accelerate.write_fsdp import write_fsdp
from terrazzo.dialects.formats.accelerate.write_replicas import write_replicas
from terrazzo.dialects.formats.shared.fsdp_arguments import leave_to_loop
from terrazzo.dialects.formats.shared.plan_rows import is_split

__all__ = ["write"]

_ON_COMMAND_LINE = (
    "accelerate launch stops without --num_processes, the ranks of all machines, and takes one machine where"
    " --num_machines does not say more"
)


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """A file that `accelerate launch --config_file` takes, with a verdict for every setting."""
    draft = Draft(description, "Accelerate", KEYS)
    draft.write("compute_environment", "LOCAL_MACHINE")
    engine = _engine(draft)
    draft.write("distributed_type", engine)
    for axis in ("pp", "ep") if engine != "DEEPSPEED" else ():
        if draft.value(f"mesh.{axis}", 1) > 1:
            draft.refuse(f"mesh.{axis}", "Accelerate has no such axis")
    _machines(draft)
    half: Setting[Any] = Setting(_half(draft, engine), "file", "mixed_precision")
    if engine == "DEEPSPEED":
        write_deepspeed(draft, half, context)
    elif engine == "FSDP":
        write_fsdp(draft, half, context)
    else:
        write_replicas(draft, half, context)
    _compile(draft, engine)
    leave_to_loop(draft)
    return draft.finish()


def _engine(draft: Draft) -> str:
    """FSDP where it has the row, DeepSpeed for what only that can do, plain replicas where nothing is split."""
    tiers = {str(draft.value(path, "device")) for path in TIER_PATHS}
    finer = len(tiers) > 1 or not tiers <= {"device", "cpu"}
    row, sequence = draft.description.row, draft.value("mesh.sp", 1) > 1
    split = is_split(draft.description)
    if draft.description.dialect == "deepspeed" and split:
        return "DEEPSPEED"
    if row in ("zero1", "zero2") or sequence or (finer and row in ("zero3", "shard_grad_op")):
        return "DEEPSPEED"
    if not split:
        return "MULTI_CPU" if draft.value("training.device") == "cpu" else "MULTI_GPU"
    return "FSDP"


def _machines(draft: Draft) -> None:
    if draft.value("mesh.world") is not None:
        draft.put("mesh.world", "num_processes", draft.value("mesh.world"))
    else:
        draft.missing("mesh.world", "num_processes", _ON_COMMAND_LINE)
    if draft.value("mesh.nodes", 1) > 1:
        each = "each machine is told its machine_rank, and the main_process_ip of the first"
        draft.put("mesh.nodes", "num_machines", draft.value("mesh.nodes"), each)
    if draft.value("training.device") == "cpu":
        draft.put("training.device", "use_cpu", True)
    else:
        draft.holds("training.device", "a GPU where there is one")


def _half(draft: Draft, engine: str) -> str | None:
    """Write mixed precision; None where none of it is on.

    Weights, masters and compute all in 16 bits are, under FSDP, a model loaded so and no mixed precision.
    """
    compute = draft.value("precision.compute")
    if str(linears := draft.value("precision.linears")).startswith("fp8-"):
        return _fp8(draft, linears)
    if compute not in ("bf16", "fp16"):
        if draft.is_set("precision.compute"):
            draft.write("mixed_precision", "no")
        return None
    pure = compute == draft.value("precision.weight") == draft.value("precision.master")
    if pure and engine != "DEEPSPEED":
        draft.write("mixed_precision", "no")
        return None
    draft.put("precision.compute", "mixed_precision", compute)
    return str(compute)


def _fp8(draft: Draft, linears: str) -> str:
    """The recipe that torchao has by default, which is the scale of a whole matrix; bf16 lies under it."""
    code = "Accelerate scales whole matrices: pass AORecipeKwargs(config=Float8LinearConfig.from_recipe_name(...))"
    draft.put("precision.linears", "mixed_precision", "fp8", *((code, "lossy") if linears == "fp8-rowwise" else ()))
    draft.write("fp8_config", {"fp8_backend": "AO", "fp8_enable_fsdp_float8_all_gather": False})
    if draft.value("precision.compute") == "bf16":
        draft.implied("precision.compute", key="mixed_precision")
    else:
        draft.lossy("precision.compute", "fp8 lies on bf16", "mixed_precision")
    if draft.value("precision.skip") is not None:
        draft.lossy("precision.skip", "layers are chosen in code: AORecipeKwargs(module_filter_func=...)")
    return "fp8"


def _compile(draft: Draft, engine: str) -> None:
    if not draft.value("training.compile"):
        draft.implied("training.compile")
    elif engine == "DEEPSPEED":
        draft.lossy("training.compile", "accelerate launch does not hand it to DeepSpeed: call engine.compile()")
    else:
        draft.put("training.compile", "dynamo_config.dynamo_backend", "INDUCTOR")
