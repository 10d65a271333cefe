"""The setup that a request means: every default filled in, and the ranks and batches worked out."""

from __future__ import annotations

import math
from dataclasses import replace

from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.messages import ALL, counted, did_you_mean
from terrazzo.parallel import Mode
from terrazzo.planner.machine import devices as hardware
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.model.adapters import adapter_rank, globs, trained
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup import choice_names
from terrazzo.planner.setup.arguments import count_range
from terrazzo.planner.setup.checks import check_number
from terrazzo.planner.setup.kernels import attention_of
from terrazzo.planner.setup.optimizers import optimizer
from terrazzo.planner.setup.request import ModelSource, Request
from terrazzo.planner.setup.setup import Loss, Setup

__all__ = [
    "CONTEXT",
    "MICRO_BATCHES_PER_STAGE",
    "MOST_TRIED",
    "OPTIMIZER",
    "PRECISION",
    "build_cluster",
    "build_setup",
    "counts_of",
    "mesh_of",
    "of_one_rank",
    "precision_of",
    "request_of",
    "sequence_of",
    "settled",
    "shape_of",
]

GPU = "h100-sxm"
STRATEGY, PRECISION, OPTIMIZER = "zero3", "bf16", "adamw"
CONTEXT: Mode = "gather"
SEQUENCE = 4096
MICRO_BATCHES_PER_STAGE = 8
"""Defaults. With 8 micro-batches per pipeline stage the bubble is below 1/8 of the step."""

MOST_TRIED = 1024
"""The most devices that are tried where no number is named."""


LEAST_CAP = 0.25
"""Share of a device's watts below which none can be capped: nvidia-smi allows 100 to 400 W of an A100
(NVIDIA/nvidia-docker#1648) and 200 to 700 of an H100 (stackhpc/ansible-slurm-appliance#975)."""

BANDWIDTHS = ("memory_bandwidth", "scaleup_bandwidth", "internode_bandwidth", "pcie_bandwidth")
FIGURES = ("memory_bytes", "peak_flops", "watts", *BANDWIDTHS)
"""What describes a device that the table has not."""


def build_setup(request: Request) -> Setup:
    """The setup that a request means, with every default filled in; `checks.check` says whether it can be.

    Raises:
        BadInput: unknown names, or ranks or batches that do not factor.
    """
    model, cluster = trained(request, shape_of(request.model)), build_cluster(request)
    plan = request.plan or choice_names.strategy(STRATEGY)
    mesh = mesh_of(request, cluster, plan)
    if request.dp_replicate is None:  # groups that are named are taken, as a run takes them
        _check_groups(mesh, plan, cluster.device.near_ranks)
    checkpointing = choice_names.checkpointing(request.checkpointing or "none")
    if checkpointing.every > max(model.layers, 1):
        raise BadInput(
            f"{request.checkpointing} recomputes one block in {checkpointing.every}, and {model.name} has "
            f"{counted(model.layers, 'layer')}. Use an N of at most {max(model.layers, 1)}, or none."
        )
    micro_batch = request.micro_batch or 1
    spec = optimizer(request.optimizer or OPTIMIZER)
    precision = choice_names.precision(precision_of(request, cluster.device), spec, request.qlora)
    _check_accumulation(request, plan, mesh)
    micro_batches = _micro_batches(request, mesh, micro_batch)
    rows = micro_batch * micro_batches * mesh.batch_ranks
    return Setup(
        model=model,
        cluster=cluster,
        plan=plan,
        mesh=mesh,
        sequence=sequence_of(request),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        empty_rows=0 if request.global_batch is None else rows - request.global_batch,
        precision=precision.states,
        matmul=precision.matmul,
        recipe=precision.recipe,
        optimizer=spec,
        checkpointing=checkpointing.mode,
        every=checkpointing.every,
        compile=request.compile,
        attention=attention_of(request.attention, model, cluster.device, request.as_megatron),
        loss=request.loss or _loss(model, mesh, request.as_megatron),
        prefetch=request.prefetch,
        accumulate_locally=bool(request.accumulate_locally),
        sequence_parallel=request.sequence_parallel,
        tensor_overlap=request.tensor_overlap or ("backward" if request.as_megatron else "none"),
        context=request.context or CONTEXT,
        virtual_stages=request.virtual_stages or 1,
        pipeline=request.pipeline or "1f1b",
        framework=request.runs_in,
        optimizer_kernel=request.optimizer_kernel,
        adapters=adapter_rank(request),
        freeze=globs(request.freeze),
        ema=request.ema,
    )


def request_of(request: Request, setup: Setup) -> Request:
    """`request` with all that a search has chosen in `setup`: `build_setup` makes `setup` of it again.

    Shard groups that are those of hosts, or of larger domains, stay so on other numbers of devices.
    """
    chosen = replace(
        request,
        gpus=setup.cluster.count,
        strategy=setup.plan,
        checkpointing=setup.checkpointing_name,
        micro_batch=setup.micro_batch,
        context=setup.context,
        pipeline=setup.pipeline,
        virtual_stages=setup.virtual_stages,
        **{axis: getattr(setup.mesh, axis) for axis in ("tp", "pp", "cp", "ep")},
    )
    by_default = mesh_of(chosen, setup.cluster, setup.plan) == setup.mesh
    return chosen if by_default else replace(chosen, dp_replicate=setup.mesh.dp_replicate)


def precision_of(request: Request, device: Device) -> str:
    """The precision that was named, or the default on that device with the keys that were named alone."""
    default, named = "fp16" if device.lacks("bf16") else PRECISION, request.precision
    return named or default if not named or choice_names.names_base(named) else f"{default},{named}"


def shape_of(model: ModelSource) -> ModelShape:
    """The shape behind a request's `model`. Raises: `BadInput` where there is none."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, (int, float)):
        check_number("params", model)
    from terrazzo.planner.model.loading import model_shape

    return model_shape(model)


def settled(request: Request) -> Request:
    """The request with its model and its device read, so that a search reads them once for a number of devices."""
    device = build_cluster(request).device
    return replace(request, model=shape_of(request.model), gpu=device, memory_bytes=None, reserve_bytes=None)


def counts_of(request: Request, per_node: int) -> tuple[int, ...]:
    """The numbers of devices that a request allows: one, or in a range every whole number of hosts.

    Below one host, powers of two; all, where the range has neither. Raises: `BadInput` for what is neither a number nor
    a range.
    """
    if isinstance(request.gpus, int):
        return (count_range(str(request.gpus))[0],)
    first, last = count_range(request.gpus or f"1..{MOST_TRIED}")
    small = [2**power for power in range(per_node.bit_length()) if 2**power < per_node]
    whole = range(per_node, last + 1, per_node)
    counts = tuple(count for count in (*small, *whole) if first <= count <= last)
    return counts or tuple(range(first, last + 1))


def sequence_of(request: Request) -> int:
    """Tokens per sequence, 0 of a model without layers."""
    if request.sequence is not None:
        return request.sequence
    model = shape_of(request.model)
    return min(model.positions or SEQUENCE, SEQUENCE) if model.layers else 0


def build_cluster(request: Request, count: int | None = None) -> Cluster:
    """The devices of a request, `count` of them, by default as many as it names or 1."""
    if count is None:
        first = replace(request, gpus=_least(request)) if request.gpus is None else request
        count = counts_of(first, 1 if isinstance(first.gpus, int) else _device(request, 1).per_node)[0]
    return Cluster(
        device=_device(request, count),
        count=count,
        price_per_hour=request.price_per_hour,
        host_memory_bytes=None if request.host_memory_bytes is None else int(request.host_memory_bytes),
        disk_bytes=None if request.disk_bytes is None else int(request.disk_bytes),
        disk_bandwidth=request.disk_bandwidth,
    )


def _least(request: Request) -> int:
    """Devices that the given axes need."""
    axes = (request.tp, request.pp, request.cp, request.dp_replicate)
    return max(math.prod(size or 1 for size in axes), request.ep or 1)


def of_one_rank(device: Device, ranks: int) -> Device:
    """The device of one of the `ranks` of a host: a whole GPU, or a share of the memory of a host with CPUs alone."""
    if device.kind != "cpu":
        return device
    memory = device.memory_bytes
    return replace(device, memory_bytes=memory and memory // ranks, per_node=ranks)


def _device(request: Request, count: int) -> Device:
    """The device of each of `count` ranks. This machine's CPUs, by their name, are one host for all, or for `per_node`
    each; a `Device` is as a rank sees it.
    """
    name = GPU if request.gpu is None else request.gpu
    device = name if isinstance(name, Device) else _named_device(name, request)
    if request.memory_bytes is not None:
        device = replace(device, memory_bytes=int(request.memory_bytes), assumed_share=None)
    if request.reserve_bytes is not None:
        device = replace(device, memory_bytes=_without_reserve(device, request.reserve_bytes))
    if not isinstance(name, Device):
        device = of_one_rank(device, min(count, request.per_node or count))
    if request.peak_flops is not None:  # and no measured rate of the device that the table has
        device = replace(device, peak_flops=dict.fromkeys(hardware.FORMATS, request.peak_flops), matmul_flops={})
    if request.per_node is not None:
        device = device.in_hosts_of(request.per_node)
    names = (*BANDWIDTHS, "watts", "launch_s")
    own = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if device.watts is not None and own.get("watts", 0) > device.watts:
        raise BadInput(
            f"watts is {own['watts']:g}, and {device.name} may draw {device.watts:g}: a cap lies below. Leave watts "
            "out for a device without one."
        )
    if device.watts is not None and own.get("watts", device.watts) < (least := LEAST_CAP * device.watts):
        raise BadInput(
            f"watts is {own['watts']:g}, and {device.name} takes {device.watts:g}: it cannot be capped so far. Give "
            f"{least:g} or more."
        )
    device = replace(device, **own)
    if request.scaleup_bandwidth is not None and device.scaleup_domain == 1:  # links that the table has not: of a host
        device = replace(device, scaleup_domain=device.per_node)
    return device


def _without_reserve(device: Device, reserve_bytes: float) -> int:
    if device.memory_bytes is None or reserve_bytes >= device.memory_bytes:
        known = "is not known" if device.memory_bytes is None else f"is {device.memory_bytes / 1e9:.1f} GB"
        raise BadInput(
            f"{reserve_bytes / 1e9:g} GB are left to others (reserve_bytes, --reserve-gb), and the memory of "
            f"{device.name} {known}. Leave less, or give its memory too (--memory-gb)."
        )
    return int(device.memory_bytes - reserve_bytes)


def _named_device(name: str, request: Request) -> Device:
    """The device of that name in the table.

    `cpu` is this machine's CPUs, `here` its GPUs if it has any. With its memory given it may be any.
    """
    if name.lower() == "cpu":
        return hardware.this_host().device
    if name.lower() == "here":
        return hardware.this_machine().device
    near = did_you_mean(name, [known.name for known in hardware.devices()])
    try:
        return hardware.device(name)
    except BadInput:
        figures = [figure for figure in FIGURES if getattr(request, figure) is not None]
        if near or not figures:
            raise
        if request.memory_bytes is None:
            raise BadInput(
                f"The table has no GPU {name!r}, and of the figures that stand for it the memory is missing: give that "
                f"first (--memory-gb), or a name of the table, which {ALL!r} in its place lists."
            ) from None
        return Device(name)


def mesh_of(request: Request, cluster: Cluster, plan: Plan) -> Mesh:
    """Sizes of all axes. What is left of the devices after tp, pp and cp is data parallel.

    Raises: `BadInput` where the devices do not divide so.
    """
    tp, pp, cp, ep = (getattr(request, axis) or 1 for axis in ("tp", "pp", "cp", "ep"))
    model_ranks = tp * pp * cp
    if cluster.count % model_ranks:
        raise BadInput(
            f"{cluster.count} GPUs are not a multiple of tp {tp} × pp {pp} × cp {cp} = {model_ranks}: "
            f"{cluster.count} / {model_ranks} = {cluster.count / model_ranks:.4g} data ranks. Use "
            f"{-(-cluster.count // model_ranks) * model_ranks} GPUs, or axes whose product divides {cluster.count}."
        )
    data_ranks = cluster.count // model_ranks
    mesh, replicas = Mesh(pp=pp, dp_shard=data_ranks, cp=cp, tp=tp, ep=ep), request.dp_replicate
    if replicas is None:
        return mesh.in_domains(cluster.device.near_ranks) if plan.groups else mesh
    if data_ranks % replicas:
        raise BadInput(
            f"{data_ranks} data ranks cannot form {replicas} equal groups (dp_replicate): {data_ranks} / {replicas} = "
            f"{data_ranks / replicas:.4g}. Use a divisor of {data_ranks}."
        )
    return replace(mesh, dp_replicate=replicas, dp_shard=data_ranks // replicas)


def _check_groups(mesh: Mesh, plan: Plan, near_ranks: int) -> None:
    """Raises `BadInput` where a plan that splits within groups of its own choice has one rank in each."""
    if not plan.groups or mesh.shard_ranks > 1 or mesh.dp_replicate == 1:
        return
    ranks = mesh.dp_replicate
    wider = next((size for size in range(2, ranks // 2 + 1) if ranks % size == 0), None)
    groups = "" if wider is None else f", or dp_replicate {ranks // wider}, for groups of {wider} ranks"
    why = f": beside tp {mesh.tp} no more are on a host of {near_ranks}" if mesh.tp > 1 else ""
    raise BadInput(
        f"{plan.name} splits nothing over groups of one rank, which its {ranks} groups have{why}. Use zero3, which "
        f"splits over all data ranks{groups}."
    )


def _check_accumulation(request: Request, plan: Plan, mesh: Mesh) -> None:
    """Raises `BadInput` where every micro-batch is to be reduced, and gradients are not split or come in stages."""
    if request.accumulate_locally is False and (not plan.grad.axes or (mesh.pp > 1 and not request.as_megatron)):
        why = f"pp is {mesh.pp}, and stages" if plan.grad.axes else f"{plan.name} does not split gradients, and ranks"
        raise BadInput(
            f"accumulate_locally is False, which reduces every micro-batch, but {why} add them up by themselves until "
            "the last. Leave it out."
        )


def _loss(model: ModelShape, mesh: Mesh, megatron: bool) -> Loss:
    """The loss that `terrazzo train` takes, or Megatron-core."""
    return "fused" if megatron else "parts" if mesh.tp > 1 and model.family else "full"


def _micro_batches(request: Request, mesh: Mesh, micro_batch: int) -> int:
    if request.global_batch is None:
        default = MICRO_BATCHES_PER_STAGE * mesh.pp if mesh.pp > 1 else 1
        return request.micro_batches or default
    return -(-request.global_batch // (micro_batch * mesh.batch_ranks))  # as `terrazzo train`, which fills up the last
