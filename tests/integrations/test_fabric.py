"""`Fabric(strategy="terrazzo")` against strategy="ddp", on the same loop and two gloo ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.helpers import programs
from tests.helpers.processes import Pool

pytest.importorskip("lightning.fabric")
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from terrazzo.integrations.lightning.fabric import TerrazzoStrategy

pytestmark = pytest.mark.processes
Weights = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """A method of its own that uses a child, and the forward."""
        return nn.functional.mse_loss(self(x) + self.head(self.embed(x)), y)


class CheckpointsElsewhere(TorchCheckpointIO):
    """One that a user brings."""


def fabric(strategy: Any = "terrazzo", **options: Any) -> Any:
    warnings.filterwarnings("ignore", module="lightning")
    chosen = {"plugins": [TorchElasticEnvironment()], **options}
    made = Fabric(strategy=strategy, accelerator="cpu", devices=2, **chosen)
    made.launch()
    return made


def data() -> DataLoader[Any]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)


class Run:
    """A script's loop: every second batch steps, with clipping and a schedule."""

    def __init__(self, running: Any, apart: bool = False) -> None:
        torch.manual_seed(0)
        self.fabric, model = running, Net()
        if apart:
            self.model = running.setup_module(model)
            self.optimizer = running.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        else:
            self.model, self.optimizer = running.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.model.mark_forward_method("loss")
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.steps = 0

    def epoch(self) -> list[float]:
        losses = []
        for index, (x, y) in enumerate(self.fabric.setup_dataloaders(data())):
            with self.fabric.no_backward_sync(self.model, enabled=index % 2 == 0):
                loss = self.model.loss(x, y) if index % 4 < 2 else nn.functional.mse_loss(self.model(x), y)
                self.fabric.backward(loss / 2)
            losses.append(self.fabric.all_reduce(loss.detach()).item())
            if index % 2:
                norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                losses.append(norm.item())
                self.fabric.clip_gradients(self.model, self.optimizer, clip_val=0.05)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.steps += 1
        return losses

    def weights(self) -> Weights:
        if not isinstance(self.fabric.strategy, TerrazzoStrategy):
            return {name: value.detach().clone() for name, value in self.model.module.named_parameters()}
        with tz.gathered(self.model) as full:
            return {name: value.detach().clone() for name, value in full.items()}

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "steps": self.steps}


def both() -> None:
    plain = Run(fabric("ddp"))
    losses, expected = plain.epoch(), plain.weights()
    for plan, apart in (("zero1", False), ("zero3", True)):
        ours = Run(fabric(TerrazzoStrategy(plan, accumulate_locally=True)), apart)
        assert engine_of(ours.model).plan.name == plan
        torch.testing.assert_close(torch.tensor(ours.epoch()), torch.tensor(losses), rtol=2e-6, atol=1e-6)
        found = ours.weights()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


def test_losses_norms_and_weights_are_those_of_ddp(two_processes: Pool) -> None:
    two_processes.run(both)


def resumed(folder: str) -> None:
    straight = Run(fabric())
    straight.epoch()
    expected = straight.epoch()
    first = Run(fabric())
    first.epoch()
    for _ in range(2):  # the second replaces the first
        first.fabric.save(f"{folder}/a.ckpt", first.state() | {"note": ("x", 1.5)})
    second = Run(fabric(TerrazzoStrategy("zero1")))
    torch.manual_seed(9)
    state = second.state()
    assert second.fabric.load(f"{folder}/a.ckpt", state) == {"note": ("x", 1.5)}
    assert state["steps"] == 4
    assert second.scheduler.last_epoch == 4
    torch.testing.assert_close(torch.tensor(second.epoch()), torch.tensor(expected), rtol=2e-6, atol=1e-6)
    assert second.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]
    third = Run(fabric())
    third.fabric.load_raw(f"{folder}/a.ckpt", third.model)
    assert all(torch.equal(value, first.weights()[name]) for name, value in third.weights().items())


def test_a_checkpoint_resumes_under_another_plan(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(resumed, str(tmp_path))
    source = tz.checkpoint.open_source(tmp_path / "a.ckpt")
    assert "layers.0.0.weight" in source.tensors  # names are the module's own


def _kept(run: Run) -> list[dict[str, Any]]:
    return [*run.optimizer.state_dict()["state"].values()]


def files_of_ddp(folder: str) -> None:
    plain, ours = Run(fabric("ddp")), Run(fabric())
    plain.epoch()
    plain.fabric.save(f"{folder}/ddp.ckpt", plain.state())
    plain.fabric.save(f"{folder}/raw.ckpt", plain.model.state_dict())
    state: dict[str, Any] = {"model": ours.model, "steps": 0}
    ours.fabric.load(f"{folder}/ddp.ckpt", state)
    assert state["steps"] == 4
    assert all(torch.equal(value, plain.weights()[name]) for name, value in ours.weights().items())
    assert {name: value.tolist() for name, value in ours.model.state_dict().items()} == {
        name: value.tolist() for name, value in plain.model.state_dict().items()
    }
    assert ours.fabric.load(f"{folder}/ddp.ckpt", ours.state()) == {}
    for found, wanted in zip(ours.optimizer.state_dict()["state"].values(), _kept(plain), strict=True):
        assert all(torch.equal(found[kind], value) for kind, value in wanted.items())
    torch.testing.assert_close(torch.tensor(ours.epoch()), torch.tensor(plain.epoch()), rtol=2e-6, atol=1e-6)
    plain.fabric.load(f"{folder}/ddp.ckpt", plain.state())
    other = Run(fabric())
    other.fabric.load_raw(f"{folder}/raw.ckpt", other.model)
    assert all(torch.equal(value, plain.weights()[name]) for name, value in other.weights().items())


def test_files_that_ddp_wrote_are_gone_on_from(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(files_of_ddp, str(tmp_path))


def precisions() -> None:
    for precision, expected in (("bf16-mixed", "bf16"), ("bf16-true", "bf16-pure"), ("32-true", "fp32")):
        running = fabric(precision=precision)
        with running.init_module(empty_init=True):
            net = Net()
        assert net.head.weight.is_meta
        model, optimizer = running.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        assert engine_of(model).precision == tz.Precision.named(expected)
        losses = []
        for _ in range(30):
            output = model(torch.ones(2, 4))
            assert output.dtype == torch.float32  # as Fabric's own precisions have it
            with running.autocast():
                assert nn.functional.mse_loss(output.bfloat16(), output.bfloat16()).dtype == (
                    torch.float32 if precision == "bf16-mixed" else torch.bfloat16
                )
            losses.append((output - 1).square().mean())
            running.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.1 * losses[0]
    assert engine_of(fabric(TerrazzoStrategy("zero2", dp_replicate=2)).setup(Net())).axes.data[1] == "dp_replicate"


def test_precisions_and_deferred_models(two_processes: Pool) -> None:
    two_processes.run(precisions)


def refusals(folder: str) -> None:
    run = Run(fabric())
    running, other = run.fabric, Net()
    halves = [torch.optim.SGD(other.head.parameters(), 0.1), torch.optim.SGD(other.embed.parameters(), 0.1)]
    Path(folder, "kept").mkdir(exist_ok=True)
    running.barrier()
    saved, rank = {"model": run.model, "optimizer": run.optimizer}, dist.get_rank()
    running.save(f"{folder}/a.ckpt", saved | {"loss": (2, {2})[rank]})  # of values the first rank's
    for words, call in (
        ("2 optimizers for one Net", lambda: running.setup(other, *halves)),
        ("parameters of 0 models", lambda: running.setup_optimizers(halves[0])),
        ("filter=", lambda: running.save(f"{folder}/b", saved, filter={"model": lambda name, value: True})),
        ("0 models and 0", lambda: running.save(f"{folder}/b", {"step": 1})),
        ("0 models and 0", lambda: running.save(f"{folder}/b", {"step": 1} if rank else saved)),
        ("2 models", lambda: running.save(f"{folder}/b", {**saved, "other": running.setup(Net())})),
        (r"state\['ema'\] is a Net", lambda: running.save(f"{folder}/b", {**saved, "ema": Net()})),
        (r"state\['loss'\]\[0\] is a type", lambda: running.save(f"{folder}/b", {**saved, "loss": [nn.MSELoss]})),
        (r"state\['loss'\] is a set", lambda: running.save(f"{folder}/b", saved | {"loss": ({2}, 2)[rank]})),
        ("is not replaced", lambda: running.save(f"{folder}/kept", saved)),
        ("There is no checkpoint", lambda: running.load(f"{folder}/none", saved)),
        ("a.ckpt' has no epoch", lambda: running.load(f"{folder}/a.ckpt", {**saved, "epoch": 0})),
        ("to load into", lambda: running.load(f"{folder}/a.ckpt")),
        ("not a checkpoint of Terrazzo's", lambda: running.load(f"{folder}/kept", saved)),
        ("precision='64-true'|'64-true'", lambda: fabric(precision="64-true")),
        ("both given", lambda: fabric(TerrazzoStrategy(precision="bf16"), precision="bf16-mixed")),
        ("must divide the 2 ranks", lambda: fabric(TerrazzoStrategy(dp_replicate=3)).setup(Net())),
        (
            "CheckpointsElsewhere",
            lambda: fabric(plugins=[TorchElasticEnvironment(), CheckpointsElsewhere()]).setup(Net()),
        ),
    ):
        with pytest.raises((tz.BadInput, tz.Misuse), match=words) as told:
            call()
        assert str(told.value).endswith((".", "again"))


def test_what_cannot_be_honoured_is_refused(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(refusals, str(tmp_path))


@pytest.mark.long
def test_the_example_starts_its_own_ranks(tmp_path: Path) -> None:
    script = Path("examples/integrations/fabric_script.py").resolve()
    done = programs.run(str(script), cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "after 24 steps" in done.stdout
