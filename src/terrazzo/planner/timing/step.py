"""How long one optimizer step takes, and what bounds it.

The step is that of the slowest rank along pp: what its blocks, and its head, need for all micro-batches, the
communication that nothing hides, the pipeline's idle time, the optimizer, and copies to host and disk.
"""

from __future__ import annotations

from terrazzo.planner.figures import Formula, Term, TimeFigures, TrafficFigures
from terrazzo.planner.machine.transfers import Link
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration
from terrazzo.planner.timing.compute import flops_per_token
from terrazzo.planner.timing.core_turns import step_terms
from terrazzo.planner.timing.measured import copied_bytes, line_terms, measured_rank, measured_terms
from terrazzo.planner.timing.pipeline_rank import slowest_rank
from terrazzo.planner.timing.rates import matmul_rate
from terrazzo.planner.traffic.volumes import traffic_of

__all__ = ["FORMULAS", "time_of"]

BAND = 0.20
"""Relative error that nine of ten published steps stay within, half of them within 0.06
(benchmarks/planner/results/accuracy.json)."""

CALIBRATED_BAND = 0.05
"""Aim for a run whose own steps were measured here before."""

FORMULAS = {
    "time.matmul": Formula(
        "pace * flops / sustained_flops; a product of [m, k] and [k, n] counts 2 * (m * n + 0.9e6) * (k + 128), with "
        "what it loses by its shape, m and n in whole tiles of 128, and twice that where a width is no multiple of 8; "
        "pace is 1 until measured",
        "largest measured rate (stas00/ml-engineering, MAMF) times what a step keeps up of it; set on MosaicML's runs",
    ),
    "time.attention": Formula(
        "pace * (flops / attention_flops + moved_bytes / bandwidth); flops of a layer and micro-batch are 7 * tokens * "
        "attended * heads * head_dim / tp, masked ones skipped, at the kernel's share of the largest matrix rate "
        "that power keeps up, on long sequences at 128 channels, * attended / (attended + 500), and less at narrow "
        "heads: FlashAttention-2 0.72 on A100, 0.5 on H100, 0.28 on B200, in Triton 1 / 1.8 of that, from Hopper on "
        "cudnn 0.78 and flash3 0.85; unfused 12 * ... of plain products, and 28 bytes per score; tiles of shared "
        "sequences move 36 bytes for each element of their queries, and 10 of their keys and values",
        "two products forward and five backward; kernels measured by themselves (Dao-AILab/flash-attention assets, "
        "arXiv 2307.08691, arXiv 2407.08608, benchmarks/results/gpu/kernels.md); "
        "terrazzo/parallel/context/attention_tiles.py",
    ),
    "time.memory": Formula(
        "pace * bytes / bandwidth; of norms, residuals, activations, gradients, casts and the loss, and 45 for each "
        "element of a frozen matrix in 4 bits, which is decoded twice",
        "roofline: elementwise kernels reach 85 % of the memory's bandwidth",
    ),
    "time.recompute": Formula(
        "pace * micro_batches * layers * repeated_s; a layer's forward / every (full), or what lies between saved "
        "products, under math attention its core (selective), with every second product (selective_half)",
        "arXiv 1604.06174; arXiv 2205.05198 section 5; torchtitan's per-operation checkpointing",
    ),
    "time.launch": Formula(
        "pace * micro_batches * layers * gap_s; of a layer sqrt(launch_s ^ 2 + busy_s ^ 2) - busy_s",
        "the host cannot launch kernels faster; set on vTrain's runs of small GPTs",
    ),
    "time.tensor": Formula(
        "micro_batches * layers * waits_s; seconds of a layer's collectives; hidden are half of those of tp in "
        "backward under tensor overlap backward, 0.4 of all of tp under async, and of a ring what attention hides",
        "arXiv 2205.05198 section 4; pytorch/torchtitan benchmarks; ring attention, arXiv 2310.01889",
    ),
    "time.data": Formula(
        "total_s - hidden_s; exposed of a block are max(0, gather - forward) and max(0, gather + reduction - backward),"
        " and the first gather, the last reduction and the root; each bytes / bandwidth + 8 us + (ranks - 1) * 3.4 us, "
        "or 12 us over nodes",
        "overlap as in the engine's schedule; NCCL's ring algorithms",
    ),
    "time.contention": Formula(
        "contention * hidden_s",
        "collectives take multiprocessors and memory from what hides them; set on MosaicML's runs",
    ),
    "time.send": Formula("micro_batches * send_s; bytes / bandwidth", "arXiv 2104.04473 section 4.1"),
    "time.optimizer": Formula("bytes / bandwidth", "elementwise, so bound by the memory"),
    "time.matrices": Formula(
        "pace * flops / rate, of bf16 products; flops of a matrix of sides m <= n are iterations * (4 m^2 n + 2 m^3), "
        "one after the other on the rank that has most of them, of each exchange",
        "Jordan et al. 2024; terrazzo/engine/optim/matrices/matrix_owners.py",
    ),
    "time.offload": Formula(
        "pcie_s + disk_s; bytes / bandwidth, of copies that nothing hides", "ZeRO-Infinity, arXiv 2104.07857"
    ),
    "time.measured": Formula("flops / flops_per_s", "measured on this device"),
    "time.waited": Formula("bytes / bandwidth; bytes that collectives send", "measured on this device"),
    "time.overhead": Formula("overhead_s; of a step, whatever its number of tokens", "measured on this device"),
}


_BOUNDS = {
    "time.matmul": "compute",
    "time.attention": "compute",
    "time.recompute": "compute",
    "time.matrices": "compute",
    "time.measured": "compute",
    "time.memory": "memory bandwidth",
    "time.optimizer": "memory bandwidth",
    "time.launch": "kernel launches",
    "time.overhead": "kernel launches",
    "time.bubble": "pipeline bubble",
    "time.turns": "compute",
    "time.host": "offload",
    "time.offload": "offload",
}


def time_of(
    setup: Setup, traffic: TrafficFigures | None = None, calibration: Calibration | None = None
) -> TimeFigures | str:
    """The time of one step, or why nothing can be said of it.

    Args:
        traffic: that of `traffic_of`, where it is at hand.
        calibration: a measurement on this device, which corrects the device's figures.
    """
    traffic = traffic or traffic_of(setup)
    if calibration is not None and _no_rates(setup):
        why = _nothing_to_compute(setup) or _unknown_links(setup, traffic, measured=True)
        return why or _time(setup, line_terms(setup, traffic, calibration), 0.0, calibration)
    why = _nothing_to_compute(setup) or _no_rates(setup) or _unknown_links(setup, traffic)
    if why:
        return why
    slowest = slowest_rank(setup) if calibration is None else measured_rank(setup, calibration)
    terms = step_terms(slowest) if calibration is None else measured_terms(slowest, traffic, calibration)
    return _time(setup, terms, slowest.exposure.hidden, calibration)


def _nothing_to_compute(setup: Setup) -> str:
    if not setup.sequence or not setup.model.hidden:
        return "nothing can be said of time: it needs the sequence length and the model's blocks"
    return ""


def _no_rates(setup: Setup) -> str:
    device = setup.cluster.device
    if matmul_rate(device, setup.matmul) is None:
        return f"nothing can be said of time: no peak of {device.name} in {setup.matmul} is known"
    if device.memory_bandwidth is None:
        return f"nothing can be said of time: the memory bandwidth of {device.name} is not known"
    return ""


def _unknown_links(setup: Setup, traffic: TrafficFigures, measured: bool = False) -> str:
    """`measured`: what collectives take is known, so that copies alone need the figures of their links."""
    device = setup.cluster.device
    known = {
        Link.SCALEUP: device.scaleup_bandwidth,
        Link.INTERNODE: device.internode_bandwidth,
        Link.PCIE: device.pcie_bandwidth,
        Link.DISK: setup.cluster.disk_bandwidth,
    }
    for link in copied_bytes(setup, traffic) if measured else traffic.links:
        if known[link] is None:
            return f"nothing can be said of time: the bandwidth of {device.name} {_LINKS[link]} is not known"
    return ""


_LINKS = {
    Link.SCALEUP: "to other devices of its domain",
    Link.INTERNODE: "to other hosts",
    Link.PCIE: "over PCIe",
    Link.DISK: "to the disks of its host",
}


def _time(setup: Setup, terms: list[Term], hidden_s: float, record: Calibration | None) -> TimeFigures:
    calibrated = record is not None and record.measured(setup)
    step_s = sum(term.value for term in terms)
    tokens = setup.tokens * setup.micro_batches * setup.mesh.batch_ranks / setup.mesh.world_size
    flops = flops_per_token(setup)
    peak = setup.cluster.device.peak_flops.get(setup.matmul)
    price, rate = setup.cluster.price_per_hour, tokens / step_s
    return TimeFigures(
        terms=tuple(terms),
        tokens_per_s_per_gpu=rate,
        mfu=flops * rate / peak if peak else None,
        bound_by=_bound_by(terms),
        hidden_s=hidden_s,
        flops_per_token=flops,
        calibrated=calibrated,
        rates_measured=record is not None,
        band=CALIBRATED_BAND if calibrated else BAND,
        cost_per_million_tokens=None if price is None else price / 3600 / rate * 1e6,
    )


def _bound_by(terms: list[Term]) -> str:
    shares: dict[str, float] = {}
    for term in terms:
        bound = _BOUNDS.get(term.formula, "communication")
        shares[bound] = shares.get(bound, 0.0) + term.value
    return max(shares, key=lambda bound: shares[bound])
