"""How long one optimizer step takes, and what bounds it.

The step is that of the rank along pp that ends last: what its blocks, and its head, need for all micro-batches, the
communication that nothing hides, the pipeline's idle time, the optimizer, and copies to host and disk. An update that
waits for all ranks, as clipping does, is the longest of any.
"""

from __future__ import annotations

from terrazzo.planner.figures import Term, TimeFigures, TrafficFigures
from terrazzo.planner.machine.network import link_inside
from terrazzo.planner.machine.transfers import Link
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration
from terrazzo.planner.timing.compute import flops_per_token
from terrazzo.planner.timing.core_turns import step_terms
from terrazzo.planner.timing.measured import copied_bytes, line_terms, measured_step, measured_terms
from terrazzo.planner.timing.pipeline_step import PipelineStep
from terrazzo.planner.timing.rates import matmul_rate
from terrazzo.planner.traffic.volumes import traffic_of

__all__ = ["CALIBRATED_BAND", "time_of"]

BAND = 0.20
"""Relative error that nine of ten published steps stay within, half of them within 0.06
(benchmarks/planner/results/accuracy.json)."""

CALIBRATED_BAND = 0.05
"""Aim for a run whose own steps were measured here before."""

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
        why = _nothing_to_compute(setup) or _unknown(_unknown_links(setup, traffic, measured=True))
        return why or _time(setup, line_terms(setup, traffic, calibration), 0.0, calibration)
    why = _nothing_to_compute(setup) or _unknown(_no_rates(setup), _unknown_links(setup, traffic))
    if why:
        return why
    step = PipelineStep(setup) if calibration is None else measured_step(setup, calibration)
    terms = step_terms(step) if calibration is None else measured_terms(step, traffic, calibration)
    return _time(setup, terms, step.slowest.exposure.hidden, calibration)


def _nothing_to_compute(setup: Setup) -> str:
    if not setup.sequence or not setup.model.hidden:
        return "nothing can be said of time: it needs the sequence length and the model's blocks"
    return ""


def _unknown(*figures: str) -> str:
    """What is missing of a device, all of it at once."""
    missing = "; ".join(filter(None, figures))
    return f"nothing can be said of time: {missing}" if missing else ""


def _no_rates(setup: Setup) -> str:
    device = setup.cluster.device
    missing = []
    if matmul_rate(device, setup.matmul) is None:
        missing.append(f"no peak of {device.name} in {setup.matmul} is known (--peak-tflops)")
    if device.memory_bandwidth is None:
        missing.append(f"the memory bandwidth of {device.name} is not known (--memory-tb-s)")
    return "; ".join(missing)


def _unknown_links(setup: Setup, traffic: TrafficFigures, measured: bool = False) -> str:
    """`measured`: what collectives take is known, so that copies alone need the figures of their links."""
    device = setup.cluster.device
    known = {
        Link.SCALEUP: device.scaleup_bandwidth,
        Link.INTERNODE: device.internode_bandwidth,
        Link.PCIE: device.pcie_bandwidth,
        Link.DISK: setup.cluster.disk_bandwidth,
    }
    copied = copied_bytes(setup, traffic)
    crossed = dict.fromkeys(copied if measured else traffic.links)
    if Link.INTERNODE in crossed and device.near_ranks > 1:  # rings over hosts cross these too
        crossed[link_inside(device)] = None
    either = Link.PCIE not in copied and device.scaleup_bandwidth is None  # for what ranks of a host exchange
    instead = ", nor of links between devices of a host, which would do instead (--scaleup-gb-s)"
    return "; ".join(
        f"the bandwidth of {device.name} {_LINKS[link]} is not known" + instead * (either and link is Link.PCIE)
        for link in crossed
        if known[link] is None
    )


_LINKS = {
    Link.SCALEUP: "to other devices of its domain (--scaleup-gb-s)",
    Link.INTERNODE: "to other hosts (--internode-gb-s)",
    Link.PCIE: "over PCIe (--pcie-gb-s)",
    Link.DISK: "to the disks of its host (--disk-gb-s)",
}


def _time(setup: Setup, terms: list[Term], hidden_s: float, record: Calibration | None) -> TimeFigures:
    calibrated = record is not None and record.measured(setup)
    step_s = sum(term.value for term in terms)
    tokens, rows = (each * setup.sequence / setup.mesh.world_size for each in (setup.global_batch, setup.rows))
    flops = flops_per_token(setup.model, setup.sequence)
    peak = setup.cluster.device.peak_flops.get(setup.matmul)
    price, rate = setup.cluster.price_per_hour, tokens / step_s
    return TimeFigures(
        terms=tuple(terms),
        tokens_per_s_per_gpu=rate,
        mfu=flops * rows / step_s / peak if peak else None,
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
