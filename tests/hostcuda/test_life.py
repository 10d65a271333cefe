"""What else happens to a run: it fails, ranks and threads are late, and `terrazzo train` starts it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cover import mostly_long
from tests.hostcuda.arriving import TOUCHES, touched
from tests.hostcuda.cases import TOLERANCES, Case
from tests.hostcuda.failing import diverges, fails_and_goes_on, overflows_and_goes_on, scaled_apart
from tests.hostcuda.programs import verdict_on
from tests.hostcuda.ranks import Ranks
from tests.hostcuda.test_engine import check

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test
ROOT = Path(__file__).parents[2]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("where", mostly_long(["forward", "backward"], "backward"))
@pytest.mark.parametrize("plan", mostly_long(["zero3", "zero2", "zero3@cpu"], "zero3@cpu"))
def test_a_step_that_fails_leaves_nothing_behind(plan: str, where: str, two_ranks: Ranks) -> None:
    for faults, left, (first, second, *on_host) in two_ranks.run(fails_and_goes_on, plan, where):
        assert faults == []
        assert left <= 0
        assert [first, second] == pytest.approx(on_host, rel=1e-6)


def test_factors_of_gradients_on_the_device_are_compared(two_ranks: Ranks) -> None:
    assert two_ranks.run(scaled_apart, [0.5, 0.5]) == ["", ""]
    for said in two_ranks.run(scaled_apart, [0.5, 0.25]):
        assert "gradients have been forgotten or changed" in said


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("touch", mostly_long(TOUCHES, "nobody", "the memory", "another step"))
@pytest.mark.parametrize(("plan", "precision"), [("zero2", "bf16"), ("zero1", "fp32")])
def test_weights_on_their_way_are_whole_for_whoever_touches_them(
    plan: str, precision: str, touch: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for faults, arriving, apart in two_ranks.run(touched, plan, precision, touch, str(tmp_path)):
        assert faults == []
        assert arriving > 0
        assert apart <= TOLERANCES[precision][0] * 4


@pytest.mark.parametrize("tier", mostly_long(["", "@cpu"], "@cpu"))
def test_a_step_that_overflows_is_left_out(tier: str, two_ranks: Ranks) -> None:
    for faults, (on_device, on_host) in two_ranks.run(overflows_and_goes_on, tier):
        assert faults == []
        assert on_device[1::3] == on_host[1::3] == [1024, 512, 512, 1024]
        assert on_device[2::3] == on_host[2::3] == [0, 1, 1, 1]
        assert on_device[::3] == pytest.approx(on_host[::3], rel=TOLERANCES["fp16"][1])
        assert on_device[3] == on_device[6]  # weights stayed what they were


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", mostly_long(range(0, 100, 2), 0))
def test_random_programs_agree_or_are_refused(first: int, two_ranks: Ranks) -> None:
    for seed in range(first, first + 2):
        program, verdict, faults = verdict_on(seed, two_ranks)
        assert verdict.good, f"{program}\n{verdict.kind}: {verdict.detail}"
        assert faults == [], program


LATE = [Case(delays=1), Case(tier="@cpu", micro=2, delays=2), Case(checkpointing="offload", side="computing", delays=3)]


@pytest.mark.parametrize("case", mostly_long(LATE, LATE[1]), ids=lambda case: case.name)
def test_whoever_is_late_nothing_changes(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("case", [Case(tier="@nvme-all", step="backward"), Case("zero2", "@cpu-all", micro=2)])
def test_however_late(case: Case, seed: int, two_ranks: Ranks, tmp_path: Path) -> None:
    check(Case(**{**vars(case), "delays": seed}), two_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["zero3", "zero3@cpu"])
def test_terrazzo_train(plan: str, tmp_path: Path) -> None:
    """Each process loads the device before its first import of torch: `site/` has a sitecustomize."""
    paths = [str(ROOT / "tests/hostcuda/site"), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "terrazzo", "train", str(ROOT / "examples/quickstart.yaml"), f"plan={plan}"]
    command += [
        "launch.device=cuda",
        "train.steps=4",
        "schedule.warmup_steps=1",
        "train.eval_every=2",
        "train.eval_batches=1",
        "model.dim=64",
    ]
    command += ["model.layers=2", "train.sample_tokens=8", "checkpoint.every=2", f"checkpoint.folder={tmp_path}/saved"]
    command += [f"log.folder={tmp_path}/log", "data.max_bytes=100000", "precision=bf16", "log.every=1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HOSTCUDA_FAULTS": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {path.name: path.read_text() for path in tmp_path.glob("faults.*")}
    assert told == {"faults.0": "", "faults.1": ""}
    lines = map(json.loads, (tmp_path / "log" / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "step"]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:  # the host does not know what the device waits for
        assert record["clock"] == "host" and "cause_s" not in record
        assert all({"n", "sent_bytes"} == set(exchanged) for exchanged in record["comm"].values())
        assert sum(record["phase_s"].values()) == pytest.approx(record["step_s"], rel=0.01)
        assert {"retries", "activations"} <= set(record["memory_bytes"])
        assert set(record["skew"]) == {"input_s", "peak_bytes"}


@pytest.mark.parametrize(("norms", "ends_at"), [([1.0, math.nan, 1.0, 1.0], 2), ([1.0, 1.0, 1.0, 1.0], None)])
def test_a_norm_that_is_not_finite_ends_all_ranks_one_step_later(
    norms: list[float], ends_at: int | None, two_ranks: Ranks
) -> None:
    said = None if ends_at is None else "The gradients' norm of step 2 is nan."
    for faults, found, text in two_ranks.run(diverges, norms):
        assert faults == []
        assert (found, text and text.split(" Lower")[0]) == (ends_at, said)
