"""What the GPU benchmark says of kernels and of offloaded steps: its arithmetic, and toy sizes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import attention_flops, products
from benchmarks.gpu.offloaded import covered, parts, spans_of


def test_a_step_is_told_by_who_is_at_work_alone_and_together() -> None:
    found = {"computation": [(0.0, 2.0), (1.0, 3.0)], "update": [(2.5, 6.0), (6.0, 7.0)], "to the device": [(5.0, 5.5)]}
    assert covered([(0.0, 2.0), (1.0, 3.0), (9.0, 10.0)]) == 4.0
    told = parts(found, (1.0, 8.0))
    assert told == {
        "computation": 2.0,
        "update": 4.5,
        "to the device": 0.5,
        "computation alone": 1.5,
        "update alone": 3.5,
        "to the device alone": 0.0,
        "nobody": 1.0,
    }


def test_a_trace_is_read_by_direction_and_by_the_systems_clock() -> None:
    def event(name: str, kind: str, start: float, **args: Any) -> dict[str, Any]:
        return {"name": name, "cat": kind, "ts": start, "dur": 10.0, "args": args}

    events = [
        event("gemm", "kernel", 5.0),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 20.0, bytes=100),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 40.0, bytes=7),
        event("Memcpy DtoD", "gpu_memcpy", 60.0, bytes=9),
        event("HtoD", "cpu_op", 80.0),
    ]
    found, moved = spans_of({"baseTimeNanoseconds": 1e9, "traceEvents": events})
    assert moved == {"to the device": 100, "from the device": 7}
    assert {name: len(spans) for name, spans in found.items()} == dict.fromkeys(found, 1)
    assert found["to the device"][0] == pytest.approx((1.00002, 1.00003), abs=1e-7)


def test_operations_are_those_of_half_a_square_and_of_a_llama_block() -> None:
    assert attention_flops(batch=2, heads=3, sequence=8, size=4) == 2 * (2 * 3 * 8 * 8 * 4 * 2) // 2
    inner, outer = products(4096)["up"]
    assert (inner, outer) == (4096, 14_336) and products(4096)["key, value"] == (4096, 1024)


def test_kernels_are_measured_and_what_a_device_lacks_is_left_open() -> None:
    record = kernels.measure("cpu", kernels.TINY)
    rows = {(row["kernel"], row["kv heads"]): row for row in record["attention"]}
    assert rows["torch's choice", 1]["both"] > 0 and "failed" in rows["cuDNN", 2]
    assert all(row["both"] > 0 for row in record["products"])
    lines = kernels.table(record).splitlines()
    assert "| 8 | 2 | 2 | 16 | cuDNN | - | - | - |" in lines
