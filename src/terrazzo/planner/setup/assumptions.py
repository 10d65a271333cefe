"""What was assumed because a request left it open, in sentences."""

from __future__ import annotations

from terrazzo.planner.machine.devices import SEEN_ELSE, Device
from terrazzo.planner.setup.build_setup import MICRO_BATCHES_PER_STAGE, OPTIMIZER, PRECISION, precision_of
from terrazzo.planner.setup.kernels import why_unfused
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["assumptions"]


def assumptions(request: Request, setup: Setup) -> tuple[str, ...]:
    """What was assumed because the request left it open, one sentence each."""
    notes = []
    if request.gpu is None and setup.model.layers:
        notes.append(f"No GPU was named: {setup.cluster.device.name} is assumed (--gpu).")
    if request.gpus is None:
        notes.append(f"No number of GPUs was given: {setup.cluster.count} is assumed (--gpus).")
    if request.sequence is None and setup.model.layers:
        notes.append(f"No sequence length was given: {setup.sequence} tokens are assumed (--seq).")
    if chosen := _defaults(request, setup):
        notes.append(f"Assumed where nothing was said: {', '.join(chosen)}.")
    if machines := _machines(request, setup):
        notes.append(f"Assumed of the machines: {', '.join(machines)}.")
    if request.precision is None and precision_of(request, setup.cluster.device) != PRECISION:
        notes.append(
            f"{setup.cluster.device.name} has no bf16 units, which came with Ampere: fp16 is chosen, with a loss "
            "scale; fp32 needs none (--precision)."
        )
    device = setup.cluster.device
    if device.assumed_share is not None and device.memory_bytes:
        others = "which no device of its generation of the table is below"
        if device.assumed_share == SEEN_ELSE:
            others = "since it is known of no device of its generation"
        notes.append(
            f"How much memory torch sees of {device.name} is not known: {device.assumed_share:g} times the nominal GB, "
            f"{others}, is assumed: {device.memory_bytes / 2**30:.1f} GiB (--memory-gb)."
        )
    if device.kind == "cuda" and device.watts is None and device.peak_flops and setup.model.layers:
        notes.append(
            f"How much power {device.name} may draw is not known, so that no limit of it is applied: rates are of "
            "clocks that do not fall under load (--watts)."
        )
    if request.peak_flops is not None and setup.matmul in ("fp8", "fp4"):
        notes.append(
            "The peak that was given (--peak-tflops) counts in every format: attention and the head, which "
            f"{setup.matmul} leaves in 16 bits, are taken to be as fast as its products."
        )
    if request.attention is None and (why := setup.keeps_scores and why_unfused(setup.model, device)):
        notes.append(f"{why}: all scores are counted (--attention flash for a fused kernel in code of your own).")
    if request.micro_batches is None and request.global_batch is None and setup.mesh.pp > 1:
        notes.append(
            f"No batch was given: {setup.micro_batches} micro-batches per step, {MICRO_BATCHES_PER_STAGE} for each of "
            f"{setup.mesh.pp} pipeline stages, are assumed (--global-batch)."
        )
    if setup.model.layers and setup.as_megatron:
        fused = " and a fused loss" if request.loss is None else ""
        notes.append(
            f"Memory is counted as Megatron-core takes it: buffers of whole gradients that stay allocated, a fused "
            f"optimizer update{fused}."
        )
    return tuple(notes)


def _defaults(request: Request, setup: Setup) -> list[str]:
    """The choices that were left open, each by the name of what was chosen and with the option that makes it."""
    choices: list[tuple[object, str]] = [
        (request.strategy, f"{setup.plan.name} (--strategy)"),
        (request.precision, f"{precision_of(request, setup.cluster.device)} (--precision)"),
        (request.optimizer, f"{OPTIMIZER} (--optimizer)"),
    ]
    if setup.model.layers:
        choices += [
            (request.micro_batch, f"micro-batch {setup.micro_batch} (--micro-batch)"),
            (request.checkpointing, f"checkpointing {setup.checkpointing} (--ac)"),
        ]
    if setup.mesh.cp > 1:
        choices.append((request.context, f"context mode {setup.context} (--context)"))
    return [text for choice, text in choices if choice is None]


def _machines(request: Request, setup: Setup) -> list[str]:
    """Where several GPUs lie, and what is between hosts, as the table has it for most that are sold; each with its
    option. Of this machine's GPUs the host is known, and of a `Device` that was given all is.
    """
    device, count = setup.cluster.device, setup.cluster.count
    if count == 1 or device.kind != "cuda" or isinstance(request.gpu, Device):
        return []
    said, racks = [], device.scaleup_domain > device.per_node
    if request.per_node is None and (request.gpu or "").lower() != "here":
        if count <= device.per_node:
            said.append(f"all GPUs on one host, of up to {device.per_node} (--per-node)")
        else:
            within = f" in racks of {device.scaleup_domain}" if racks else ""
            said.append(f"hosts of {device.per_node}{within} (--per-node)")
    if request.internode_bandwidth is None and device.internode_bandwidth and count > device.near_ranks:
        speed, where = f"{device.internode_bandwidth / 1e9:g} GB/s", "racks" if racks else "hosts"
        said.append(f"{speed} of each GPU to other {where} (--internode-gb-s)")
    return said
