"""The table of devices: names, aliases, figures against published ones, and this machine."""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import BadInput
from terrazzo.planner.assemble import estimate
from terrazzo.planner.machine import devices as machine
from terrazzo.planner.machine.devices import Cluster, Device, MeasuredHost, device, device_of_row, devices, this_machine
from terrazzo.planner.machine.mesh import Mesh, group_of
from terrazzo.planner.machine.network import Network
from terrazzo.planner.machine.transfers import UnitTransfer, When
from terrazzo.planner.setup.assumptions import assumptions
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.request import Request

ROOT = Path(__file__).parents[2]
GIB = 2**30

NAMES = {
    "h100-sxm": "H100-SXM5-80GB",
    "H100": "H100-SXM5-80GB",
    "H100-SXM-80GB": "H100-SXM5-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "nvidia_h100_80gb_hbm3": "H100-SXM5-80GB",
    "H100-SXM-96GB-HBM2e": "H100-SXM-96GB-HBM2e",
    "NVIDIA H100 PCIe": "H100-PCIE-80GB",
    "A100": "A100-SXM4-80GB",
    "a100-80gb": "A100-SXM4-80GB",
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
    "A800": "A800-SXM4-80GB",
    "V100-SXM-32GB": "V100-SXM2-32GB",
    "H200-SXM-141GB": "H200-SXM-141GB",
    "NVIDIA H200": "H200-SXM-141GB",
    "B200": "B200-180GB",
    "GB200": "GB200",
    "MI300X": "MI300X",
    "AMD Instinct MI300X": "MI300X",
    "rtx 4090": "RTX4090",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "4090": "RTX4090",
    "Tesla T4": "T4",
    "NVIDIA L4": "L4",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_in_many_spellings(name: str) -> None:
    assert device(name).name == NAMES[name]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
    ],
)
def test_dense_bf16_peaks_under_the_names_that_torch_gives(name: str, tflops: float | None) -> None:
    assert device(name).peak_flops.get("bf16") == (None if tflops is None else tflops * 1e12)


def test_every_device_answers_to_its_names() -> None:
    text = (ROOT / "src/terrazzo/planner/machine/gpus.csv").read_text()
    for row in csv.DictReader(text.splitlines()):
        for name in (row["name"], row["name"].lower(), *filter(None, row["aliases"].split("; "))):
            assert device(name).name == row["name"], name
    assert len(devices()) == len({found.name for found in devices()}) == 34


@pytest.mark.parametrize(("name", "hint"), [("H1000", "H100-SXM5"), ("A1000", "A100-SXM4"), ("h200x", "H200")])
def test_unknown_names_are_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=rf"no GPU '{name}'.*Did you mean '{hint}"):
        device(name)


def test_a_word_will_do_where_only_one_device_has_it() -> None:
    assert device("hbm2e").name == "H100-SXM-96GB-HBM2e"
    assert device("Instinct MI355X").name == "MI355X"


def test_a_piece_of_a_word_will_not_do() -> None:
    assert device("NVIDIA L40").name == "L40"
    for name in ("MI300", "NVIDIA L400", "L4S", "NVIDIA A2"):
        with pytest.raises(BadInput, match="no GPU"):
            device(name)


@pytest.mark.parametrize("name", ["", "  ", "GPU of the future", "NVIDIA"])
def test_nonsense_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="There is no GPU"):
        device(name)


def test_ambiguous_names_are_refused_with_the_candidates() -> None:
    with pytest.raises(BadInput, match="RTX3090 or RTX4090 or RTX5090"):
        device("RTX")


@pytest.mark.parametrize(
    ("name", "peak", "gib"),
    [
        ("H100", 989, 79.11),
        ("A100", 312, 79.15),
        ("H200", 989, 139.8),
        ("B200", 2250, 178.35),
        ("MI300X", 1307, 191.98),
    ],
)
def test_figures(name: str, peak: float, gib: float) -> None:
    found = device(name)
    assert found.peak_flops["bf16"] == peak * 1e12
    assert found.memory_bytes == int(gib * GIB)
    assert found.source


def test_an_80_gb_card_is_not_80e9_bytes() -> None:
    assert device("H100").memory_bytes == pytest.approx(84.9e9, rel=1e-3)


def test_every_device_has_memory_a_source_and_a_node() -> None:
    for found in devices():
        assert found.memory_bytes and found.memory_bytes > 10e9
        assert found.source and found.per_node >= 1 and found.scaleup_domain >= 1
        assert found.memory_bandwidth


@pytest.mark.parametrize(("column", "table"), [("arch", "ARCHITECTURES"), ("scaleup_kind", "SCALEUP_KINDS")])
def test_a_row_of_an_unknown_kind_is_refused_by_name(column: str, table: str) -> None:
    text = (ROOT / "src/terrazzo/planner/machine/gpus.csv").read_text()
    row = {**next(csv.DictReader(text.splitlines())), "name": "X1", column: "Rubin"}
    with pytest.raises(BadInput, match=f"X1 has {column} 'Rubin', and {table} in"):
        device_of_row(row)


def test_a_domain_may_be_larger_than_a_host() -> None:
    found = device("gb200")
    assert (found.per_node, found.scaleup_domain) == (4, 72)


def test_no_peak_where_sources_disagree() -> None:
    assert "bf16" not in device("A10G").peak_flops
    assert "bf16" not in device("V100").peak_flops
    assert device("V100").peak_flops["fp16"] == 125e12


def test_this_machine_is_its_cpus_where_it_has_no_gpu() -> None:
    here = this_machine()
    if torch.cuda.is_available():
        assert here.device.kind == "cuda" and here.count == torch.cuda.device_count()
        return
    assert here.device.kind == "cpu" and here.count == 1
    assert not here.device.peak_flops
    physical = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert here.device.memory_bytes is not None and 0 < here.device.memory_bytes <= physical * 1.01


def test_a_machine_with_gpus_may_be_planned_for_by_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB)
    monkeypatch.setattr(machine.gpus, "count", lambda: 2)
    monkeypatch.setattr(machine.gpus, "properties", lambda _: found)
    here, cpus = (build_setup(Request("gpt2", 1, gpu=each)).cluster.device for each in ("here", "cpu"))
    assert (here.kind, here.memory_bytes, here.per_node, here.scaleup_domain) == ("cuda", 80 * GIB, 2, 2)
    assert cpus.kind == "cpu"


@pytest.mark.parametrize("per_node", [1, 2, 5, 8])
def test_ranks_fill_host_by_host(per_node: int) -> None:
    for count in range(1, 41):
        cluster = Cluster(Device("any", per_node=per_node), count)
        hosts = Counter(rank // per_node for rank in range(count))
        assert cluster.nodes == len(hosts)
        assert (cluster.ranks_per_host, cluster.ranks_of_last_host) == (hosts[0], hosts[len(hosts) - 1])


@pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling to build the wheel")
def test_the_wheel_holds_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "terrazzo/planner/machine/gpus.csv" in zipfile.ZipFile(wheel).namelist()


def all_reduce_us(name: str, nodes: int, mib: int) -> float:
    ranks = 8 * nodes
    group = group_of(Mesh(dp_replicate=ranks), "dp_replicate")
    sent = 2 * mib * 2**20 * (ranks - 1) / ranks
    return 1e6 * Network(device(name)).move_s(UnitTransfer("all_reduce", "", "tensor", When.FORWARD, sent, group))


@pytest.mark.parametrize(
    ("nodes", "gb_s"),
    [
        (1, {16: 234, 64: 362, 256: 423, 1024: 466}),  # Azure/AI-benchmarking-guide
        (4, {16: 115, 64: 215, 256: 272, 1024: 337}),  # arXiv 2411.13055, read off its plot
        (16, {16: 72, 64: 160, 256: 265, 1024: 320}),
        (64, {16: 45, 64: 137, 256: 245, 1024: 303}),
        (512, {16: 40, 64: 112, 256: 220, 1024: 286}),
    ],
    ids=str,
)
def test_all_reduces_of_h100_take_what_was_measured_at_every_size_and_scale(nodes: int, gb_s: dict[int, float]) -> None:
    """Bus bandwidths, as nccl-tests defines them. No published training run says these."""
    for mib, bandwidth in gb_s.items():
        sent = 2 * mib * 2**20 * (8 * nodes - 1) / (8 * nodes)
        assert all_reduce_us("h100", nodes, mib) == pytest.approx(sent / bandwidth / 1e3, rel=0.27), mib


def test_ranks_of_a_full_mesh_have_the_links_between_them() -> None:
    """Measured 48 GB/s between two MI300X, and at most 144 among four and 336 among eight."""
    mesh = {size: group_of(Mesh(tp=size), "tp") for size in (2, 4, 8)}
    found = {size: Network(device("mi300x")).bandwidth(group) for size, group in mesh.items()}
    assert found == pytest.approx({2: 48e9, 4: 144e9, 8: 336e9}, rel=0.01)
    assert Network(device("h100")).bandwidth(mesh[2]) == Network(device("h100")).bandwidth(mesh[8])


def groups_by_number(mesh: Mesh, axis: str) -> list[list[int]]:
    """All groups along an axis, by the numbers of their ranks, of which `tp` counts fastest."""
    order = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
    along = {"cp", "dp_shard"} if axis == "dp_shard" else {axis}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        left, others = rank, []
        for name in order:
            left, place = divmod(left, getattr(mesh, name))
            others += [place] if name not in along else []
        groups.setdefault(tuple(others), []).append(rank)
    return list(groups.values())


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])


@given(
    st.builds(Mesh, tp=SIZES, cp=st.sampled_from([1, 2, 3]), dp_shard=SIZES, dp_replicate=SIZES, pp=SIZES),
    st.sampled_from(["tp", "cp", "dp_shard", "dp_replicate", "pp"]),
    st.sampled_from([1, 2, 3, 4, 6, 8, 18, 72]),
)
def test_groups_are_judged_by_the_one_that_lies_worst_on_hosts(mesh: Mesh, axis: str, per_node: int) -> None:
    groups = groups_by_number(mesh, axis)
    counts = [Counter(rank // per_node for rank in group).values() for group in groups]
    found = group_of(mesh, axis).on_hosts(per_node)
    assert found == (min(map(min, counts)), max(map(max, counts)), max(map(len, counts)))
    network = Network(replace(device("h100").in_hosts_of(8), per_node=per_node, scaleup_domain=per_node))
    alone = max(map(len, counts)) == 1
    assert network.link(group_of(mesh, axis)) == ("scaleup" if alone else "internode")
    over_hosts = min(found.fewest * 50e9 * 0.9, 450e9 * 0.8 if found.most > 1 else math.inf)
    assert network.bandwidth(group_of(mesh, axis)) == pytest.approx(450e9 * 0.8 if alone else over_hosts)


def test_a_group_that_begins_within_a_host_is_not_inside_of_one() -> None:
    """Of ranks 0 to 5, 6 to 11, 12 to 17 and 18 to 23 the second and the third have two on one of their hosts of 8."""
    network, mesh = Network(device("h100")), Mesh(dp_replicate=4, dp_shard=6)
    assert network.link(group_of(mesh, "dp_shard")) == "internode"
    assert network.bandwidth(group_of(mesh, "dp_shard")) == pytest.approx(2 * 50e9 * 0.9)
    assert Network(device("h100").in_hosts_of(6)).link(group_of(mesh, "dp_shard")) == "scaleup"


def sent_on(gpu: Device, mesh: Mesh, axis: str) -> float:
    """Bandwidth of what each rank sends to the next along an axis."""
    sent = 2.0**40
    return sent / Network(gpu).move_s(UnitTransfer("send", "", "pipeline", When.FORWARD, sent, group_of(mesh, axis)))


def test_a_message_to_the_next_rank_has_one_card_or_one_link() -> None:
    """Stages of 4 ranks: 0 to 3 send within a host of 8, 4 to 7 to the next one."""
    assert sent_on(device("h100"), Mesh(pp=4, tp=4), "pp") == pytest.approx(45e9, rel=1e-3)
    assert sent_on(device("h100"), Mesh(pp=2, tp=4), "pp") == pytest.approx(360e9, rel=1e-3)
    assert sent_on(device("mi300x"), Mesh(pp=4), "pp") == pytest.approx(48e9, rel=1e-3)


def test_hosts_of_fewer_devices_have_fewer_links_of_a_full_mesh_and_racks_whole_hosts() -> None:
    four = device("mi300x").in_hosts_of(4)
    assert Network(four).bandwidth(group_of(Mesh(tp=4), "tp")) == pytest.approx(144e9, rel=0.01)
    alone = Network(device("mi300x").in_hosts_of(1))
    assert alone.bandwidth(group_of(Mesh(dp_shard=4), "dp_shard")) == pytest.approx(45e9)
    assert [device("gb200").in_hosts_of(n).scaleup_domain for n in (4, 8, 16, 64, 72)] == [72, 72, 64, 64, 72]


def test_rings_over_hosts_of_pairs_cross_pcie_within_them() -> None:
    """A bridge joins two of eight, so that a tree over hosts waits within them as over PCIe."""
    tree = UnitTransfer("all_reduce", "", "tensor", When.FORWARD, 1.0, group_of(Mesh(dp_replicate=64), "dp_replicate"))
    pairs = device("A100-PCIE-80GB")
    waits = {gpu.scaleup_domain: Network(gpu).move_s(tree) for gpu in (pairs, replace(pairs, scaleup_domain=8))}
    assert waits[2] - waits[8] == pytest.approx(2 * 7 * (5.7e-6 - 3.4e-6), rel=1e-3)


def test_links_within_hosts_that_are_not_known_are_asked_for_where_rings_leave_them() -> None:
    asked = Request("gpt2", 16, gpu="mine", memory_bytes=80e9, peak_flops=3e14, memory_bandwidth=2e12,
                    internode_bandwidth=25e9, strategy="zero1", sequence=512)  # fmt: skip
    assert "over PCIe (--pcie-gb-s) is not known" in estimate(build_setup(asked)).no_time
    for known in ({"pcie_bandwidth": 30e9}, {"scaleup_bandwidth": 300e9}, {"per_node": 1}):
        assert estimate(build_setup(replace(asked, **known))).time is not None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 0, "8", True])
@pytest.mark.parametrize(
    "field",
    ["memory_bytes", "memory_bandwidth", "scaleup_bandwidth", "internode_bandwidth", "pcie_bandwidth", "watts",
     "capability", "flash_share", "per_node", "scaleup_domain"],
)  # fmt: skip
def test_a_figure_of_a_device_that_none_has_is_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(BadInput, match=f"Device 'mine': {field} is {re.escape(repr(wrong))}; give an? "):
        Device("mine", **{field: wrong})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("mine", kind="tpu"), "kind is 'tpu'; give one of cuda, cpu"),
        (lambda: Device("mine", peak_flops={"bf16": math.nan}), r"peak_flops\['bf16'\] is nan"),
        (lambda: Device("mine", peak_flops={"bf61": 1e12}), "peak_flops has 'bf61'; keys are .* Did you mean 'bf16'"),
        (lambda: Device("mine", matmul_flops={"fp8": 0}), r"matmul_flops\['fp8'\] is 0"),
        (lambda: Device("mine", peak_flops=1e15), "peak_flops is 1000000000000000.0; give a number for each"),
        (lambda: Device("mine", recipe_shares={"mx": -1}), r"recipe_shares\['mx'\] is -1"),
        (lambda: Device("mine", flash_share=1.5), "flash_share is 1.5; give a finite number, above 0 and up to 1"),
        (lambda: Device("mine", launch_s=-1), "launch_s is -1; give a finite number, 0 or more, or None if not known"),
        (lambda: Cluster(Device("mine"), 0), "Cluster: count is 0; give an int, 1 or more"),
        (lambda: Cluster(Device("mine"), price_per_hour=math.nan), "price_per_hour is nan"),
        (lambda: Cluster(Device("mine"), host_memory_bytes=0), "host_memory_bytes is 0"),
        (lambda: Cluster(Device("mine"), disk_bandwidth=-1), "disk_bandwidth is -1"),
        (lambda: MeasuredHost(call_s=math.nan), "MeasuredHost: call_s is nan; give a finite number, 0 or more"),
        (lambda: MeasuredHost(cores=0), "cores is 0; give an int, 1 or more, or None if not known"),
    ],
)
def test_what_no_machine_has_is_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


@pytest.mark.parametrize(("name", "least"), [("V100-SXM2-16GB", 15.6), ("GH200-96GB", 93.0), ("A40", 43.0)])
def test_memory_that_is_not_known_is_that_of_its_kind_and_said(name: str, least: float) -> None:
    asked = Request("llama3-8b", 8, gpu=name, strategy="zero3")
    (note,) = (each for each in assumptions(asked, build_setup(asked)) if "torch sees" in each)
    assert "--memory-gb" in note
    assert least < (device(name).memory_bytes or 0) / 2**30 < 1.03 * least
    given = replace(asked, memory_bytes=10**11)
    assert not any("torch sees" in each for each in assumptions(given, build_setup(given)))


def test_no_more_memory_is_assumed_than_torch_sees_of_the_same_generation() -> None:
    """And of a generation of which it is known of none, no more than the GB that are sold. Known are public logs."""
    text = (ROOT / "src/terrazzo/planner/machine/gpus.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    shares: dict[str, float] = {}
    for row in rows:
        if row["torch_total_gib"]:
            share = float(row["torch_total_gib"]) * GIB / (float(row["mem_gb_marketing"]) * 1e9)
            shares[row["arch"]] = min(share, shares.get(row["arch"], share))
    assumed = {row["arch"]: device_of_row(row).assumed_share for row in rows if not row["torch_total_gib"]}
    assert all(share is not None and share <= shares.get(arch, 1.0) for arch, share in assumed.items())
    assert {device(name).memory_bytes for name in ("B300", "GB300")} == {int(267.69 * GIB), int(276.5 * GIB)}
    for name, why in (("GH200-96GB", "its generation of the table is below"), ("MI355X", "known of no device of its")):
        notes = assumptions(asked := Request("llama3-8b", 8, name), build_setup(asked))
        assert any(why in note for note in notes)
