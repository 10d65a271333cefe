"""What the planner expects of a GPU, for the numbers that the first half hour on it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.checks import LARGE
from benchmarks.gpu.contenders import Workload
from benchmarks.gpu.measure import FULL
from terrazzo.errors import BadInput
from terrazzo.messages import GIB
from terrazzo.planner import Estimate, Request, build_setup, device, estimate

__all__ = ["expected"]


def expected(step: str, gpu: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """By the names of `numbers`, those that the planner has a figure for; none for a device that it does not know."""
    try:
        device(gpu)
    except BadInput:
        return {}
    found: dict[str, float] = {}
    if step.startswith("memory"):
        memory = _estimate(LARGE, gpu).memory
        found = {"allocated GiB": memory.allocated_bytes / GIB, "reserved GiB": memory.reserved_bytes / GIB}
        found["reserved / allocated"] = memory.reserved_bytes / memory.allocated_bytes
    elif step == "benchmark":
        for name in {name.partition(":")[0] for name in numbers if not name.startswith("missed")}:
            found |= _of_case(name, gpu)
    return {name: value for name, value in found.items() if name in numbers}


def _of_case(name: str, gpu: str) -> dict[str, float]:
    """Of a case, named as by `measure.cases`: a step without communication, of which the fake group does none."""
    *model, mode = name.split("-")
    compiled = mode == "compiled"
    if model in (["alone"], ["offload"]):
        strategy = "zero3" if model == ["alone"] else "zero3@cpu"
        estimate = _estimate(FULL.alone, gpu, strategy=strategy, compile=compiled)
    else:
        estimate = _estimate(FULL.sharded[model[0]], gpu, int(model[1]), compile=compiled)
    found = {f"{name}: peak GiB": estimate.memory.allocated_bytes / GIB}
    if estimate.time is not None:
        alone = [term.value for term in estimate.time.terms if not _of_communication(term.name)]
        found[f"{name}: step ms"] = 1e3 * sum(alone)
    return found


def _of_communication(term: str) -> bool:
    return "communication" in term or term == "contention"


def _estimate(workload: Workload, gpu: str, world: int = 1, strategy: str = "zero3", **options: Any) -> Estimate:
    """In bf16, as the contender runs it."""
    config = workload.model
    model = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_sequence_length,
        "tie_word_embeddings": config.tie_embeddings,
    }
    checkpointing = "full" if workload.checkpointing else "none"
    asked = Request(
        model, world, gpu=gpu, strategy=strategy, sequence=config.max_sequence_length, micro_batch=workload.batch,
        checkpointing=checkpointing, **options,
    )  # fmt: skip
    return estimate(build_setup(asked))
