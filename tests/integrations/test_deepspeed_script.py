"""Whole scripts on two ranks: unmodified ones by the runner, against a plain loop and DeepSpeed's own losses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from terrazzo.errors import BadInput
from terrazzo.integrations.deepspeed.__main__ import main
from terrazzo.integrations.shared.script_runner import run_and_exit
from terrazzo.processes.tether import become
from tests.helpers import programs

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "data" / "deepspeed_training.py"
EXAMPLE = ROOT / "examples" / "integrations" / "deepspeed_script.py"
BOTH = f"""
import runpy
for script in ({str(SCRIPT)!r}, {str(EXAMPLE)!r}):
    runpy.run_path(script, run_name="__main__")
"""
RECORDED = HERE / "data" / "deepspeed_losses.json"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def losses(stdout: str) -> dict[int, list[float]]:
    said = re.findall(r"rank (\d) \| (-?\d\.\d+e[+-]\d\d)", stdout)
    return {rank: [float(value) for name, value in said if int(name) == rank] for rank in (0, 1)}


def plain() -> dict[int, list[float]]:
    """The script without DeepSpeed, in one process that plays both ranks."""
    source = SCRIPT.read_text()
    namespace: dict[str, object] = {"nn": nn, "torch": torch}
    exec(source[source.index("class Net") : source.index("def main")], namespace)
    torch.manual_seed(0)
    net = namespace["Net"]()  # type: ignore[operator]
    inputs: Tensor = torch.randn(64, 12)
    labels = inputs[:, :5].argmax(dim=1)
    shares = [list(DistributedSampler(range(64), 2, rank)) for rank in (0, 1)]  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(2):
        for micro in range(8):
            for rank in (0, 1):
                chosen = shares[rank][4 * micro : 4 * micro + 4]
                loss = nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen])
                found[rank].append(loss.item())
                (loss / 4).backward()
            if micro % 2:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    total = net(inputs).double().sum().item()
    return {rank: [*each, total] for rank, each in found.items()}


@pytest.fixture(scope="module")
def by_the_runner(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script and then the example say on two ranks under the runner, and the folder they ran in."""
    folder = tmp_path_factory.mktemp("runner")
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "both.py").write_text(BOTH)
    runner = ("-m", "terrazzo.integrations.deepspeed", "both.py", "--deepspeed_config", "ds.json")
    ranks = programs.on_ranks(2, *runner, cwd=folder, timeout_s=150)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr[-2000:] for rank in ranks]
    return "".join(rank.stdout for rank in ranks), folder


def test_an_unmodified_script_has_the_plain_loops_losses(by_the_runner: tuple[str, Path]) -> None:
    found, expected = losses(by_the_runner[0]), plain()
    for rank in (0, 1):
        assert found[rank] == pytest.approx(expected[rank], rel=2e-6)


def test_an_unmodified_script_has_deepspeeds_losses(by_the_runner: tuple[str, Path]) -> None:
    found, recorded = losses(by_the_runner[0]), json.loads(RECORDED.read_text())
    assert recorded["config"] == CONFIG
    for rank in (0, 1):
        assert found[rank] == pytest.approx(recorded["losses"][rank], rel=1e-4)  # on any machine; 1e-6 where recorded


def test_the_example_runs(by_the_runner: tuple[str, Path]) -> None:
    stdout, folder = by_the_runner
    reached = [float(each) for each in re.findall(r"loss (\d\.\d{4})", stdout)]
    assert len(reached) == 3
    assert reached[-1] < reached[0]
    assert (folder / "checkpoints" / "latest").read_text() == "global_step48"
    assert (folder / "weights" / "model.safetensors").exists()


def test_the_runner_refuses_what_a_script_uses_and_the_door_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import deepspeed\nfrom deepspeed.moe.layer import MoE\ndeepspeed.zero.Init\nMoE(8)\n")
    for name in ("meta_path", "path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    without = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "deepspeed"}
    with (
        mock.patch.dict(sys.modules, without, clear=True),  # another test may have imported the real one
        pytest.raises(BadInput, match=r"deepspeed\.moe\.layer\.MoE is used"),
    ):
        main([str(script)])
    assert main([]) == 2


@pytest.mark.parametrize(
    ("kind", "code", "traced"), [("BadInput", 2, False), ("Misuse", 1, True), ("Diverged", 83, False)]
)
def test_an_error_ends_the_script_with_its_code_and_says_where_it_came_from_if_it_must(
    kind: str,
    code: int,
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import terrazzo\nraise terrazzo.{kind}('what happened')\n")
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit) as ended:
        run_and_exit(become, [str(script)])
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert said.endswith(f"{kind}: what happened\n")
    assert ("script.py" in said, said.count("\n") > 1) == (traced, traced)


@pytest.mark.parametrize("words", [("script.py",), ("-m", "script")])
def test_the_deepspeed_launchers_local_rank_is_the_scripts(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes `python -u -m terrazzo.integrations.deepspeed --local_rank=1 script.py ...`."""
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    for name in ("meta_path", "path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    with mock.patch.dict(sys.modules):
        assert main(["--local_rank=1", *words, "--deepspeed", "x"]) == 0
        assert main(["--local_rank=1"]) == 2
    assert capsys.readouterr().out == "['--local_rank=1', '--deepspeed', 'x']\n"
