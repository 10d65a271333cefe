"""What devices reach of their peaks: matrix products, throughout a step too, reading and writing memory, and copies."""

from __future__ import annotations

from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.transfers import Link

__all__ = [
    "MEMORY_SHARE",
    "PCIE_COPY_SHARE",
    "SUSTAINED_SHARE",
    "copy_s",
    "matmul_rate",
    "memory_rate",
    "power_share",
    "sixteen_bits",
    "sustained_rate",
]

MEASURED_SHARE = 0.80
"""The largest rate of a matrix product as a share of the dense peak, where it was not measured: 0.87 on A100, 0.80 on
H100, 0.78 on B200 (stas00/ml-engineering, MAMF)."""

MEASURED_FP8_SHARE = 0.72
"""This share in fp8: 0.71 on H100, 0.73 on H200, 0.72 on GB200 (the same source, and Azure/AI-benchmarking-guide)."""

FP8_OF_BF16_SHARE = 0.95
"""This share in fp8 over that in bf16, of a device where bf16 was measured alone: 0.88 on H100, 0.98 on B200, 0.99 on
GB200 (the same source)."""

SUSTAINED_SHARE = 0.88
"""What large products reach of that largest rate throughout a training step on an A100."""

SUSTAINED_POWER = 0.3
"""Devices with fewer watts for each FLOP/s than an A100 lower their clocks under load: the power of that ratio which
the sustained rate follows."""

A100_WATTS_PER_FLOPS = 400 / 271.2e12

MEMORY_SHARE = 0.85
"""What elementwise kernels reach of the memory's bandwidth."""

PCIE_COPY_SHARE = 0.80
"""What pinned copies reach of a PCIe link's bandwidth: 24.8 of 31.5 GB/s, 55.6 of 63 (forums.developer.nvidia.com,
thread 352186)."""


def matmul_rate(device: Device, matmul: str) -> float | None:
    """Largest rate of matrix products in a format, FLOP/s; None where the device's peak in it is not known.

    Where it was not measured, the share of the peak follows that in bf16, or is the usual one.
    """
    if matmul in device.matmul_flops:
        return device.matmul_flops[matmul]
    peak, bf16 = device.peak_flops.get(matmul), device.matmul_flops.get("bf16")
    if peak is None:
        return None
    if bf16 and "bf16" in device.peak_flops:
        return peak * (bf16 / device.peak_flops["bf16"] * (FP8_OF_BF16_SHARE if matmul == "fp8" else 1))
    return peak * (MEASURED_FP8_SHARE if matmul == "fp8" else MEASURED_SHARE)


def sustained_rate(device: Device, matmul: str) -> float | None:
    """What large matrix products reach throughout a step, FLOP/s."""
    rate = matmul_rate(device, matmul)
    return None if rate is None else rate * SUSTAINED_SHARE * power_share(device, matmul)


def power_share(device: Device, matmul: str) -> float:
    """The share of a rate reached for a moment that the device's power allows to keep up.

    Power is compared in 16 bits: a narrower format needs less of it for each operation, and is as fast as that allows.
    """
    wide = matmul_rate(device, sixteen_bits(matmul))
    if wide is None or device.watts is None:
        return 1.0
    return min(1.0, float((device.watts / wide / A100_WATTS_PER_FLOPS) ** SUSTAINED_POWER))


def sixteen_bits(matmul: str) -> str:
    """The format of what is not computed in a narrower one: attention, the head."""
    return "bf16" if matmul in ("fp8", "fp4") else matmul


def memory_rate(device: Device) -> float:
    """What elementwise kernels read and write, B/s. The device's bandwidth must be known."""
    assert device.memory_bandwidth is not None
    return device.memory_bandwidth * MEMORY_SHARE


def copy_s(cluster: Cluster, link: Link, sent_bytes: float) -> float:
    """Seconds of a rank's copies over PCIe, or to disks, which the ranks of a host share. The link must be known."""
    if link is Link.PCIE:
        assert cluster.device.pcie_bandwidth is not None
        return sent_bytes / (cluster.device.pcie_bandwidth * PCIE_COPY_SHARE)
    assert cluster.disk_bandwidth is not None
    return sent_bytes * cluster.ranks_per_host / cluster.disk_bandwidth
