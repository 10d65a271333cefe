"""The migration guides say what the code does, and their programs do before and after what the guides say."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.config import config_from_dict
from terrazzo.dialects.registry import dialect
from tests.helpers.processes import Pool
from tools import migration_pages as pages
from tools.migration.fates import ELSEWHERE, fates, spellings

pytestmark = pytest.mark.xdist_group("migration")  # what becomes of a key is found out once
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_the_code_gives(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.update(text) == text, "python -m tools.migration_pages"
    marks = re.findall(r"<!-- (\w+) \w+: python", text)
    assert marks == re.findall(r"<!-- end of (\w+) -->", text)
    assert set(marks) <= set(pages.MAKERS)


@pytest.mark.parametrize("name", pages.CONFIGS)
def test_every_key_of_a_dialect_is_on_its_page(name: str) -> None:
    text = page_with(f" taken {name}:").replace("|", ",").replace(":", ",")
    words = set(re.findall(r"`([^`,]+)[`,]", text))
    whole = set(re.findall(r"^, `([\w.]+)` , all \d+ ,$", text, re.MULTILINE))
    for key in dialect(name).keys:
        section, _, last = key.removesuffix(".*").rpartition(".")
        prefix = section.removesuffix("config")  # Accelerate's keys stand with it, the Trainer's without
        names = {last, f"{prefix}{last}", last.removeprefix(prefix)}
        written = names | {f"{section}.{each}" for each in names} | {f"{each}.*" for each in names} | {key}
        assert written & words or section in whole or key in ELSEWHERE, key


def page_with(mark: str) -> str:
    (text_with_mark,) = [text for text in (page.read_text(encoding="utf-8") for page in pages.PAGES) if mark in text]
    return text_with_mark


@pytest.mark.parametrize("name", pages.CONFIGS)
def test_the_command_on_the_page_writes_what_the_page_shows_and_it_trains(name: str, tmp_path: Path) -> None:
    page = next(
        text for text in (page.read_text(encoding="utf-8") for page in pages.PAGES) if f"config {name}:" in text
    )
    file = pages.CONFIGS[name].name
    (command,) = re.findall(rf"^\$ terrazzo (config convert \S+/{file} .*) -o run\.yaml$", page, re.MULTILINE)
    words = shlex.split(command)
    words[2] = str(ROOT / words[2])
    result = CliRunner().invoke(cli.app, [*words, "-o", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    written = (tmp_path / "run.yaml").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^--- {file}\n\+\+\+ run\.yaml\n@@.*?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = shown.splitlines()
    assert [line[1:] for line in lines if line[:1] in "+ "] == written.splitlines()
    assert [line[1:] for line in lines if line[:1] in "- "] == pages.CONFIGS[name].read_text().splitlines()
    config_from_dict(yaml.safe_load(written))


# Bytes per parameter by hand: weight, gradient, master and two moments, over the ranks that share them.
BY_HAND = {
    "deepspeed": (2 + 2 + 4 + 8) / 8,
    "fsdp1": (4 + 4 + 8) / 8,  # the weight is the master
    "fsdp2": (4 + 4 + 8) / 4,  # two replicas of four shards
    "accelerate": (4 + 4 + 8) / 8,
    "trainer": (4 + 2 + 8) / 8,  # gradients are accumulated in bf16
    "megatron": (2 + 4 + (4 + 8) / 4) / 2,  # two ranks share each matrix, and four the optimizer of a half
}


@pytest.mark.parametrize("name", pages.CONFIGS)
def test_memory_is_as_worked_out_by_hand(name: str) -> None:
    expected = f"{BY_HAND[name] * 8_030_261_248 / 2**30:.1f}"  # Llama 3 8B has so many parameters
    rows = pages.dtypes(name).splitlines()[2:]
    assert [row.split(" | ")[-1].removesuffix(" |") for row in rows] == [expected, expected]


def test_what_is_certain_about_some_keys_is_on_the_pages() -> None:
    told = {(name, fate.key): fate for name in pages.CONFIGS for fate in fates(name)}
    certain = {
        ("deepspeed", "zero_optimization.stage"): ("renamed", "plan.name: zero2"),
        ("deepspeed", "zero_optimization.zero_quantized_nontrainable_weights"): ("refused", ""),
        ("deepspeed", "wall_clock_breakdown"): ("defaulted", ""),
        ("fsdp1", "sharding_strategy"): ("renamed", "plan.name: shard_grad_op"),
        ("fsdp2", "reshard_after_forward"): ("renamed", "plan.name: hpz; plan.mesh.dp_shard: 2"),
        ("fsdp2", "ignored_params"): ("refused", ""),
        ("accelerate", "deepspeed_config.offload_param_nvme_path"): ("lossy", "offload.path: /swap"),
        ("accelerate", "parallelism_config.parallelism_config_tp_size"): ("renamed", "plan.mesh.tp: 2"),
        ("trainer", "max_grad_norm"): ("renamed", "train.clip: 0.5"),
        ("trainer", "label_smoothing_factor"): ("refused", ""),
        ("trainer", "logging_steps"): ("defaulted", ""),
        ("megatron", "use-distributed-optimizer"): ("renamed", "plan.name: zero1"),
        ("megatron", "num-virtual-stages-per-pipeline-rank"): ("renamed", "parallel.pipeline.chunks: 2"),
        ("megatron", "fp8-format"): ("refused", ""),
        ("megatron", "overlap-grad-reduce"): ("defaulted", ""),
    }
    assert {key: (told[key].kind, told[key].target) for key in certain} == certain
    assert spellings("deepspeed")["bfloat16.enabled"] == "bf16.enabled"


# -- the programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages.SCRIPTS)
def test_a_program_is_right_before_and_its_like_runs_in_the_tests_after(name: str) -> None:
    before, after = pages.SCRIPTS[name]
    for path in (before, after):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert "terrazzo" not in before.read_text(encoding="utf-8")
    assert "terrazzo" in after.read_text(encoding="utf-8")
    if after.parent == pages.EXAMPLES:
        tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "integrations").glob("test_*.py")]
        assert any(after.name in text for text in tests), f"no test runs {after.name}"


def losses(path: str) -> list[float]:
    """On one rank, of every step."""
    values: list[float] = runpy.run_path(path)["train"](10)
    return values


@pytest.mark.long
@pytest.mark.processes
def test_fsdp1_and_what_it_became_have_the_same_losses(two_processes: Pool) -> None:
    before, after = (two_processes.run(losses, str(path)) for path in pages.SCRIPTS["fsdp1"])
    for theirs, ours in zip(before, after, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert before[0] != before[1]  # each rank has data of its own
    assert sum(before[0][-3:]) < sum(before[0][:3])
