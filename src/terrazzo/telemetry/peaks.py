"""Published dense bf16 peaks of GPUs, for model FLOPs utilisation.

Vendors' figures without structured sparsity, with fp32 accumulation. Sources: the tables of MosaicML Composer
(composer/callbacks/speed_monitor.py), Lightning (fabric/utilities/throughput.py), torchtitan (tools/utils.py) and
stas00/ml-engineering (compute/accelerator), compared with each other. The A10G is left out: they disagree on it.
"""

from __future__ import annotations

__all__ = ["peak_bf16_flops"]

# A name as torch reports it, shortened → TFLOP/s. Longer names come first, since the first match counts.
DENSE_BF16_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI355X": 2500.0,
    "MI325X": 1307.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,  # torch sees each of the two dies as a device
}


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device that torch calls `device_name`, or None where it is not known.

    Whole words are compared, so that `NVIDIA A1000` is not taken for an A100.
    """
    words = f" {device_name} "
    for name, tflops in DENSE_BF16_TFLOPS.items():
        if any(f" {name}{end}" in words for end in (" ", "-", "_")):
            return tflops * 1e12
    return None
