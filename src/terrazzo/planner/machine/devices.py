"""The machines that estimates are made for: devices from a sourced table, their links, and how many of them there are.

A new device is one row of `gpus.csv`; a new architecture is one more entry of `ARCHITECTURES`. Empty fields are figures
that are not known. Columns of the table:

    name, vendor, aliases                    aliases with "; " between: what torch reports, and short names
    arch                                     a key of `ARCHITECTURES`
    compute_capability                       NVIDIA's; of AMD's devices the name of the target, such as gfx942
    *_dense_tflops, fp32_vector_tflops       peaks without sparsity, TFLOP/s
    mem_gb_marketing, torch_total_gib        decimal GB as sold; GiB as torch sees them
    mem_type, mem_bw_tb_s                    TB/s
    scaleup_link, scaleup_uni_gb_s           in words; GB/s in one direction
    scaleup_kind                             a key of `SCALEUP_KINDS`
    scaleup_domain                           devices in one domain; empty: 1
    pcie_gen, pcie_uni_gb_s                  GB/s in one direction, to the host
    typical_gpus_per_node                    devices of one host
    typical_internode_gb_s_per_gpu           GB/s in one direction
    mamf_*_tflops                            largest measured rates of a matrix product, TFLOP/s
    tdp_w                                    watts
    notes, source                            in words
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import TypeVar

from terrazzo.engine.runtime import device as gpus
from terrazzo.errors import BadInput
from terrazzo.messages import ALL, nearest
from terrazzo.planner.machine import architectures
from terrazzo.planner.machine.architectures import ARCHITECTURES, HOPPER_RECIPES, SCALEUP_KINDS
from terrazzo.planner.machine.checks_of_figures import check_amounts, check_counts, check_rates, check_word
from terrazzo.processes.cpus import allowed_cpus
from terrazzo.processes.system import control_groups, text_of

__all__ = [
    "DRIVE_RATED_BYTES",
    "FORMATS",
    "SEEN_ELSE",
    "Cluster",
    "Device",
    "MeasuredHost",
    "cpu_host",
    "device",
    "device_of_row",
    "devices",
    "this_host",
    "this_machine",
]

DRIVE_RATED_BYTES = 600e12
"""Bytes that a consumer drive of 1 TB may be written in total, by its warranty."""

FORMATS = ("bf16", "fp16", "fp8", "fp4", "tf32", "fp32", "fp64")
"""Compute formats that a device may have a rate in. The table has none in fp64."""

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredHost:
    """Times of one host on whose CPUs ranks compute, which `python -m benchmarks.planner.ranking` measures.

    Attributes:
        call_s, hop_s: time that a collective takes beside moving bytes, whatever its ranks, and for each.
        unit_s, stage_s: time around each gather and each sum of a unit's states, and each message between stages.
        cores: more ranks than these take turns. None: each rank has its own.
    """

    call_s: float = 0.0
    hop_s: float = 0.0
    unit_s: float = 0.0
    stage_s: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        check_amounts(self, ("call_s", "hop_s", "unit_s", "stage_s"), zero=True, unknown=False)
        check_counts(self, ("cores",), unknown=True)


@dataclass(frozen=True)
class Device:
    """One GPU, or one CPU host, as a rank sees it. None where a figure is not known; nothing is guessed.

    Attributes:
        kind: `cuda`, `cpu`; AMD's devices are `cuda` too, as in torch.
        peak_flops: dense peak, FLOP/s, by compute format, of `FORMATS`.
        matmul_flops: largest measured rate of a matrix product (MAMF), FLOP/s, by the same formats.
        memory_bytes: what torch reports as total, not what the vendor prints.
        assumed_share: of the nominal decimal GB, where `memory_bytes` is that share of them; None where it is known.
        memory_bandwidth: B/s.
        scaleup_bandwidth: B/s in one direction, to the devices of the same scale-up domain.
        scaleup_domain: devices in one such domain; it may be larger than a host.
        internode_bandwidth: B/s in one direction and per device, to other domains.
        pcie_bandwidth: B/s in one direction, to the host.
        per_node: devices of one host.
        watts: power that the device may draw.
        switch_sums: whether the scale-up switch sums what passes it (NVLink SHARP, from Hopper on). full_mesh: there is
            none, and each pair of devices has a link of its own.
        wide_warps: whether groups of warps multiply together, which faster attention kernels need (NVIDIA, from Hopper
            on, but for workstation parts).
        flash_share: of the largest rate of matrix products that its power keeps up, what FlashAttention-2 reaches.
        recipe_shares: rates of products in fp8 by the recipe of their scales, as shares of the rate with one scale for
            each matrix; `mx` only where there are matrix units for it.
        launch_s: host time for launching one eager block's kernels, forward and backward; None for the usual one.
        measured: of a host on whose CPUs ranks compute, what was measured there; None for the usual times.
        capability: NVIDIA's compute capability, such as 8.0; below 8 there are no bf16 units.
        source: where the figures are from.
    """

    name: str
    kind: str = "cuda"
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    scaleup_bandwidth: float | None = None
    scaleup_domain: int = 1
    internode_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    per_node: int = 8
    watts: float | None = None
    switch_sums: bool = False
    full_mesh: bool = False
    wide_warps: bool = False
    flash_share: float = 0.5
    recipe_shares: Mapping[str, float] = field(default_factory=lambda: HOPPER_RECIPES)
    launch_s: float | None = None
    measured: MeasuredHost | None = None
    capability: float | None = None
    source: str = ""
    assumed_share: float | None = None

    def __post_init__(self) -> None:
        check_word(self, "kind", ("cuda", "cpu"))
        bandwidths = [f"{link}_bandwidth" for link in ("memory", "scaleup", "internode", "pcie")]
        check_amounts(self, ("memory_bytes", *bandwidths, "watts", "capability"))
        check_amounts(self, ("launch_s",), zero=True)
        check_amounts(self, ("flash_share",), unknown=False, most=1)
        check_counts(self, ("scaleup_domain", "per_node"))
        for name in ("peak_flops", "matmul_flops"):
            check_rates(self, name, FORMATS)
        check_rates(self, "recipe_shares", ("rowwise", "mx"))

    def lacks(self, form: str) -> bool:
        """Whether it is a GPU that is known to have no matrix units for a format, such as `bf16` or `mx`."""
        if self.kind != "cuda":
            return False
        if form == "mx":
            return bool(self.peak_flops) and "mx" not in self.recipe_shares
        if form == "bf16" and self.capability is not None:
            return self.capability < 8
        return bool(self.peak_flops) and form not in self.peak_flops

    @property
    def near_ranks(self) -> int:
        """How many of its ranks reach each other without a network: of a host, or of a scale-up domain if larger."""
        return max(self.per_node, self.scaleup_domain)

    def in_hosts_of(self, per_node: int) -> Device:
        """The device in hosts of so many. Links within a host join no others, and where each pair has its own there are
        fewer in a smaller host; those of a rack join the whole hosts in it.
        """
        domain, bandwidth = self.scaleup_domain, self.scaleup_bandwidth
        if domain <= self.per_node:
            domain = min(domain, per_node)
        domain -= domain % per_node if domain > per_node else 0
        if self.full_mesh and bandwidth and domain > 1:
            bandwidth *= (domain - 1) / (self.scaleup_domain - 1)
        return replace(self, per_node=per_node, scaleup_domain=domain, scaleup_bandwidth=bandwidth)


@dataclass(frozen=True)
class Cluster:
    """`count` equal devices.

    Attributes:
        price_per_hour: of one device, in whatever currency; None if not given.
        host_memory_bytes: per host; disk_bytes and disk_bandwidth likewise. None if not given.
    """

    device: Device
    count: int = 1
    price_per_hour: float | None = None
    host_memory_bytes: int | None = None
    disk_bytes: int | None = None
    disk_bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_counts(self, ("count",))
        check_amounts(self, ("price_per_hour",), zero=True)
        check_amounts(self, ("host_memory_bytes", "disk_bytes", "disk_bandwidth"))

    @property
    def ranks_per_host(self) -> int:
        """How many of its ranks share a host that is full."""
        return min(self.count, self.device.per_node)

    @property
    def nodes(self) -> int:
        return -(-self.count // self.device.per_node)

    @property
    def ranks_of_last_host(self) -> int:
        """How many are on the last host: fewer where `count` does not fill it."""
        return self.count - (self.nodes - 1) * self.device.per_node


def device(name: str) -> Device:
    """The device of that name: the table's own, an alias, or what torch reports. Case, spaces and dashes do not matter.

    Short names mean the usual part: `H100` is the 80 GB SXM, `A100` the 80 GB SXM, `V100` the 32 GB SXM.

    Raises:
        BadInput: a name that fits several parts, which are listed, or none; then the nearest is named; at `?` all are.
    """
    table, key = _table(), _key(name)
    if name == ALL:
        raise BadInput(f"GPUs of the table are {', '.join(each.name for each in devices())}.")
    if key in table:
        return table[key]
    fitting = _fitting(set(_words(name)))
    if len(fitting) == 1:
        return table[_key(fitting[0])]
    if fitting:
        raise BadInput(f"The GPU {name!r} may be {' or '.join(fitting)}. Write one of these names.")
    near = nearest(key, table)
    hint = f" Did you mean {table[near].name!r}?" if near else ""
    raise BadInput(
        f"There is no GPU {name!r} in the table.{hint} {ALL!r} in its place lists all {len(devices())}. Of another "
        "device `terrazzo plan` takes the figures: --memory-gb, and for time --peak-tflops, --memory-tb-s, "
        "--scaleup-gb-s, --internode-gb-s, --pcie-gb-s and --watts."
    )


def devices() -> tuple[Device, ...]:
    """All devices of the table, in its order."""
    return tuple({each.name: each for each in _table().values()}.values())


def this_machine() -> Cluster:
    """What this process could train on: its CUDA devices, else its CPUs as one device.

    No peak is known of a CPU, nor of a GPU that is not in the table, so that nothing is said of time or MFU there
    unless a measurement is at hand.
    """
    if not gpus.count():
        return this_host()
    properties = gpus.properties(0)
    try:
        known = device(properties.name)
    except BadInput:
        amd = getattr(properties, "gcnArchName", "").startswith("gfx")
        known = Device(
            properties.name, capability=None if amd else properties.major + properties.minor / 10, source="this machine"
        )
    count = gpus.count()
    here = replace(known.in_hosts_of(count), memory_bytes=properties.total_memory, assumed_share=None)
    return Cluster(here, count, host_memory_bytes=_host_memory_bytes())


def this_host() -> Cluster:
    """The CPUs of this machine, whether or not it has GPUs."""
    return cpu_host(_host_memory_bytes())


def cpu_host(memory_bytes: int | None) -> Cluster:
    """The CPUs that this process may use, as one device with the memory of its host."""
    name = f"CPU with {len(allowed_cpus())} cores"
    return Cluster(Device(name, "cpu", memory_bytes=memory_bytes, per_node=1, source="this machine"))


def _words(name: str) -> list[str]:
    """The words of a device's name, without those that vendors put before it."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return [word for word in words if word not in ("", "nvidia", "amd", "instinct", "geforce", "tesla")]


def _key(name: str) -> str:
    return "".join(_words(name))


@cache
def _names() -> tuple[tuple[str, Device], ...]:
    """Every name and alias; names come before aliases."""
    text = files("terrazzo.planner.machine").joinpath("gpus.csv").read_text(encoding="utf-8")
    rows = [(row["aliases"].split(";"), device_of_row(row)) for row in csv.DictReader(text.splitlines())]
    names = [(each.name, each) for _, each in rows]
    return (*names, *((alias, each) for aliases, each in rows for alias in aliases if _key(alias)))


@cache
def _table() -> dict[str, Device]:
    table: dict[str, Device] = {}
    for name, each in _names():
        table.setdefault(_key(name), each)
    return table


def _fitting(words: set[str]) -> list[str]:
    """Names of the devices that are called by all of these words: whole ones, so that an L40 is no L40S."""
    return sorted({each.name for name, each in _names() if words and words <= set(_words(name))})


def device_of_row(row: Mapping[str, str]) -> Device:
    """The device of a row of `gpus.csv`, by column.

    Raises:
        BadInput: an architecture, or a kind of scale-up links, that `machine.architectures` has not.
    """
    architecture = _entry(ARCHITECTURES, row, "arch", "ARCHITECTURES")
    scaleup = _entry(SCALEUP_KINDS, row, "scaleup_kind", "SCALEUP_KINDS")

    def figure(column: str, unit: float) -> float | None:
        return float(row[column]) * unit if row[column] else None

    def by_format(columns: Mapping[str, str]) -> dict[str, float]:
        return {name: value for name, column in columns.items() if (value := figure(column, 1e12)) is not None}

    seen, nominal = figure("torch_total_gib", 2**30), float(row["mem_gb_marketing"]) * 1e9
    share = LEAST_SEEN.get(row["arch"], SEEN_ELSE)
    return Device(
        name=row["name"],
        capability=None if row["compute_capability"].startswith("gfx") else float(row["compute_capability"]),
        peak_flops=by_format({name: f"{name}_dense_tflops" for name in ("bf16", "fp16", "fp8", "fp4", "tf32")})
        | by_format({"fp32": "fp32_vector_tflops"}),
        matmul_flops=by_format({name: f"mamf_{name}_tflops" for name in ("bf16", "fp16", "fp8")}),
        memory_bytes=int(share * nominal if seen is None else seen),
        assumed_share=share if seen is None else None,
        memory_bandwidth=figure("mem_bw_tb_s", 1e12),
        scaleup_bandwidth=figure("scaleup_uni_gb_s", 1e9),
        scaleup_domain=int(row["scaleup_domain"] or 1),
        internode_bandwidth=figure("typical_internode_gb_s_per_gpu", 1e9),
        pcie_bandwidth=figure("pcie_uni_gb_s", 1e9),
        per_node=int(row["typical_gpus_per_node"]),
        watts=figure("tdp_w", 1),
        full_mesh=scaleup.full_mesh,
        switch_sums=scaleup.switch_sums,
        wide_warps=architecture.wide_warps,
        flash_share=architecture.flash_share,
        recipe_shares=architecture.recipe_shares,
        source=row["source"],
    )


def _entry(table: Mapping[str, T], row: Mapping[str, str], column: str, name: str) -> T:
    if row[column] not in table:
        raise BadInput(
            f"gpus.csv: {row['name']} has {column} {row[column]!r}, and {name} in {architectures.__name__} has "
            f"{', '.join(map(repr, table))}. Write one of these, or add an entry there."
        )
    return table[row[column]]


LEAST_SEEN = {"Volta": 1.05, "Ampere GA102": 0.98, "Hopper": 1.05, "CDNA3": 1.05}
SEEN_ELSE = 1.0
"""What torch sees of nominal decimal GB, by `arch`: no more than the table's devices of that generation of which it is
known, and of another no more than the GB that are sold, of which a B300 shows no more either. GDDR6 gives a part to
ECC."""


def _host_memory_bytes() -> int:
    """Physical memory, or what the control group allows if that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits()])


def _group_limits() -> Iterator[int]:
    for folder in control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (text := text_of(folder / name)).isdigit():
                yield int(text)
