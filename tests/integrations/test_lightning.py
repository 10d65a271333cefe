"""`Trainer(strategy="terrazzo")` against strategy="ddp", on the same LightningModule and two gloo ranks."""

from __future__ import annotations

import argparse
import logging
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
from terrazzo.errors import BadInput
from tests.helpers import programs
from tests.helpers.processes import Pool
from tests.helpers.threads import run_in_threads
from tests.integrations import killed

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import AsyncCheckpointIO  # noqa: E402
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: E402

from terrazzo.integrations.lightning import TerrazzoStrategy  # noqa: E402
from terrazzo.integrations.lightning.checkpoint_folder import read_file  # noqa: E402
from terrazzo.integrations.lightning.plain_state import from_json, to_json  # noqa: E402

Weights = dict[str, Tensor]


class Regression(pl.LightningModule):
    """Alternates between its own forward and its children, as training steps do."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(dropout)
        self.losses: list[float] = []
        self.example_input_array = torch.ones(2, 4)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.log("outside", self(self.example_input_array).sum(), sync_dist=True)  # not inside a step

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.scale

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        output = self(x) if index % 2 else Regression.forward(self, x)
        loss = nn.functional.mse_loss(output.float(), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]).float(), batch[1]), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        gathered = self.all_gather(nn.functional.mse_loss(self(batch[0]), batch[1]))
        self.log("test", gathered.mean())

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 3], 0.5)]


class Manual(Regression):
    """Steps by itself, every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer, x, y = self.optimizers(), *batch
        loss = nn.functional.mse_loss(self(x), y)
        self.manual_backward(loss)
        self.losses.append(loss.item())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def data() -> DataLoader[Any]:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)


def trainer(strategy: Any = "terrazzo", **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    chosen = {**quiet, "max_epochs": 2, "plugins": [TorchElasticEnvironment()], **options}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, **chosen)


def weights_of(running: Any) -> Weights:
    with tz.gathered(running.model) as full:
        return {name: value.detach().clone() for name, value in full.items()}


def fit(
    strategy: Any, kind: type[Regression] = Regression, **options: Any
) -> tuple[list[float], Weights, dict[str, float]]:
    torch.manual_seed(0)
    module, running = kind(), trainer(strategy, **options)
    running.fit(module, data(), data())
    weights = (
        {n: p.detach().clone() for n, p in module.named_parameters()} if strategy == "ddp" else weights_of(running)
    )
    return module.losses, weights, {name: float(value) for name, value in running.callback_metrics.items()}


def both(plan: str, options: dict[str, Any], kind: type[Regression] = Regression) -> None:
    losses, weights, metrics = fit("ddp", kind, **options)
    strategy = TerrazzoStrategy(plan, accumulate_locally=True if plan == "zero3" else None)
    ours, own, measured = fit(strategy, kind, **options)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=2e-6, atol=1e-6)
    assert set(own) == set(weights)
    for name, value in weights.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=2e-6, msg=name)
    assert measured == pytest.approx(metrics, rel=2e-6)


@pytest.mark.cover(strength=1)
@pytest.mark.processes
@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_losses_and_weights_are_those_of_ddp(plan: str, accumulated: int, two_processes: Pool) -> None:
    two_processes.run(both, plan, {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.5})


@pytest.mark.processes
def test_values_are_clipped_as_under_ddp(two_processes: Pool) -> None:
    two_processes.run(both, "zero3", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})


@pytest.mark.processes
def test_manual_optimization(two_processes: Pool) -> None:
    two_processes.run(both, "zero3", {}, Manual)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def saving(folder: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True, every_n_epochs=1, **options)


def resumed(folder: str) -> None:
    torch.manual_seed(0)
    whole, straight = Regression(dropout=0.5), trainer(max_epochs=2)
    straight.fit(whole, data())
    torch.manual_seed(0)
    callback = saving(folder)
    first = trainer(max_epochs=1, enable_checkpointing=True, callbacks=[callback])
    first.fit(Regression(dropout=0.5), data())
    assert {path.name for path in Path(folder).iterdir()} == {"epoch=0.ckpt", "last.ckpt"}
    torch.manual_seed(99)
    module, second = (
        Regression(dropout=0.5),
        trainer(max_epochs=2, enable_checkpointing=True, callbacks=[saving(folder)]),
    )
    killed.between_renames(Path(folder) / "last.ckpt")
    second.fit(module, data(), ckpt_path=f"{folder}/last.ckpt")
    assert second.global_step == straight.global_step
    assert module.losses == whole.losses[len(whole.losses) // 2 :]
    expected, found = weights_of(straight), weights_of(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert second.optimizers[0].param_groups[0]["lr"] == straight.optimizers[0].param_groups[0]["lr"]
    assert module.hparams == {"width": 8, "dropout": 0.5}


@pytest.mark.processes
def test_resuming_is_exact(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(resumed, str(tmp_path / "checkpoints"))
    source = tz.checkpoint.open_source(tmp_path / "checkpoints" / "last.ckpt")
    assert source.step == 10
    assert "layers.0.0.weight" in source.tensors  # names are the module's own


class Changed(Regression):
    """Changes weights as they are loaded, and does not mind that one is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("embed.bias", None)
        checkpoint["state_dict"]["scale"] = torch.full((1,), 3.0)


def weights_only(folder: str) -> None:
    torch.manual_seed(0)
    running = trainer(max_epochs=1)
    running.fit(Regression(), data())
    running.test(running.lightning_module, data(), verbose=False)
    before, expected = dict(running.callback_metrics), weights_of(running)
    running.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    running.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)  # replaced
    torch.manual_seed(5)
    other = trainer()
    other.test(Regression(), data(), ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    assert other.callback_metrics == before
    assert all(torch.equal(weights_of(other)[name], value) for name, value in expected.items())
    (first, *_) = other.predict(other.lightning_module, data())
    assert first.shape == (4, 1)
    with pytest.raises(KeyError, match="save_weights_only"):
        trainer().fit(Regression(), data(), ckpt_path=f"{folder}/weights.ckpt")
    ddp = trainer("ddp", max_epochs=1)
    ddp.fit(Regression(), data())
    ddp.save_checkpoint(f"{folder}/ddp.ckpt")
    other.validate(Changed(), data(), ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    assert weights_of(other)["scale"].item() == 3.0
    for kind in (Regression, Changed):
        ours, theirs = trainer(), trainer("ddp")
        for each in (ours, theirs):
            torch.manual_seed(0)
            each.validate(kind(), data(), ckpt_path=f"{folder}/ddp.ckpt", verbose=False)
        assert ours.callback_metrics["val"].item() == pytest.approx(theirs.callback_metrics["val"].item(), rel=1e-6)
    fitted = [trainer(), trainer("ddp")]
    for each in fitted:
        each.fit(Regression(), data(), ckpt_path=f"{folder}/ddp.ckpt")
    assert fitted[0].global_step == fitted[1].global_step == 10
    for name, value in fitted[1].lightning_module.named_parameters():
        torch.testing.assert_close(weights_of(fitted[0])[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.processes
def test_weights_alone_and_checkpoints_of_other_strategies(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(weights_only, str(tmp_path))


def test_a_trainers_state_survives_json() -> None:
    state = {
        "a": [1, 2.5, None, True, "x", float("inf")],
        "milestones": {1: 2},
        "betas": (0.9, (0.1,)),
        "score": torch.tensor([0.5, float("nan")]),
        "steps": torch.tensor(3),
    }
    found = from_json(to_json(state))
    assert found["a"] == state["a"]
    assert found["milestones"] == {1: 2}
    assert found["betas"] == (0.9, (0.1,))
    torch.testing.assert_close(found["score"], state["score"], equal_nan=True)
    assert found["steps"].dtype == torch.int64
    for shape in ((0, 3), (2, 0), (0,)):
        assert from_json(to_json(torch.ones(shape))).shape == shape
    with pytest.raises(tz.BadInput, match=r"checkpoint\['hyper_parameters'\]\['loss'\] is a MSELoss"):
        to_json({"hyper_parameters": {"loss": nn.MSELoss()}})


# -- the rest of the loop ------------------------------------------------------------------------------------------


def stages() -> None:
    torch.manual_seed(0)
    module, running = Regression(), trainer(max_epochs=1)
    (before,) = running.validate(module, data(), verbose=False)  # sharded without an optimizer
    running.fit(module, data(), data())
    assert running.callback_metrics["val"] < before["val"]
    running.fit_loop.max_epochs, kept = 2, running.optimizers[0]
    running.fit(module, data(), data())  # with a new optimizer
    assert engine_of(running.model).optimizer is running.optimizers[0] is not kept
    assert running.global_step == 10
    with pytest.raises(tz.Misuse, match="another Trainer"):
        trainer().fit(module, data())


@pytest.mark.processes
def test_stages_follow_each_other(two_processes: Pool) -> None:
    two_processes.run(stages)


class Deferred(Regression):
    """Built in configure_model, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))


def precisions() -> None:
    for precision, expected in (("bf16-mixed", "bf16"), ("bf16-true", "bf16-pure"), ("32-true", "fp32")):
        running = trainer(precision=precision, max_epochs=3)
        module = Deferred()
        running.fit(module, data())
        assert engine_of(running.model).precision == tz.Precision.named(expected)
        assert running.precision == precision
        assert sum(module.losses[-8:]) < 0.9 * sum(module.losses[:8])
    running = trainer(TerrazzoStrategy("zero2", precision="bf16", dp_replicate=2), max_epochs=1)
    running.fit(Regression(), data())
    assert engine_of(running.model).axes.data == ("dp_shard", "dp_replicate")


@pytest.mark.long
@pytest.mark.processes
def test_precisions_and_deferred_models(two_processes: Pool) -> None:
    two_processes.run(precisions)


class Halved(Regression):
    """Its loss is of two tensors in bf16, which autocast compares in fp32."""

    first: tuple[Tensor, Tensor]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if not self.losses:
            self.first = batch
        loss = nn.functional.mse_loss(self(batch[0]), batch[1].bfloat16())
        assert loss.dtype == torch.float32
        self.losses.append(loss.item())
        return loss


def mixed() -> None:
    """The first loss is that of plain PyTorch under autocast, on weights as Lightning's FSDP and DDP have them."""
    torch.manual_seed(0)
    plain = Halved()
    for plan, dtype in (("zero1", torch.float32), ("zero3", torch.bfloat16)):
        torch.manual_seed(0)
        module = Halved()
        trainer(TerrazzoStrategy(plan), precision="bf16-mixed", max_epochs=1).fit(module, data())
        inputs, targets = module.first
        weights = {name: value.detach().to(dtype) for name, value in plain.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            output = torch.func.functional_call(plain, weights, (inputs,))
            expected = nn.functional.mse_loss(output, targets.bfloat16())
        assert module.losses[0] == expected.item(), plan
    ours, weights, _ = fit(TerrazzoStrategy("zero1"), Halved, precision="bf16-mixed")
    theirs, expected_weights, _ = fit("ddp", Halved, precision="bf16-mixed")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-3, atol=1e-4)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-3, msg=name)


@pytest.mark.processes
def test_mixed_precision_is_what_lightning_has(two_processes: Pool) -> None:
    two_processes.run(mixed)


class Averaging(Regression):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank() == 0:  # whose values are saved: all ranks are told
            checkpoint["state_dict"]["average"] = torch.ones(2)


class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


def refusals(folder: str) -> None:
    for words, module, options in (
        ("2 optimizers", TwoOptimizers(), {}),
        ("sync_batchnorm", Regression(), {"sync_batchnorm": True}),
        ("AsyncCheckpointIO", Regression(), {"plugins": [TorchElasticEnvironment(), AsyncCheckpointIO()]}),
        ("must divide the 2 ranks", Regression(), {"strategy": TerrazzoStrategy(dp_replicate=3)}),
    ):
        with pytest.raises(tz.BadInput, match=words):
            trainer(**options).fit(module, data())
    for precision in ("64-true", "16-true"):
        with pytest.raises(tz.BadInput, match=precision):
            trainer(precision=precision)
    with pytest.raises(tz.BadInput, match="both given"):
        trainer(TerrazzoStrategy(precision="bf16"), precision="bf16-mixed")
    with pytest.raises(tz.BadInput, match="There is no checkpoint"):
        trainer().fit(Regression(), data(), ckpt_path=f"{folder}/none.ckpt")
    running = trainer(max_epochs=1)
    running.fit(Regression(), data())
    averaging = trainer(max_epochs=1)
    averaging.fit(Averaging(), data())
    with pytest.raises(tz.BadInput, match=r"on_save_checkpoint.* has put average among"):
        averaging.save_checkpoint(f"{folder}/a.ckpt")
    with pytest.raises(tz.BadInput, match="storage_options"):
        running.save_checkpoint(f"{folder}/a.ckpt", storage_options={})
    Path(folder, "kept").mkdir(exist_ok=True)
    running.strategy.barrier()
    with pytest.raises(tz.BadInput, match="is not replaced"):
        running.save_checkpoint(f"{folder}/kept")
    assert dist.get_world_size() == 2


@pytest.mark.processes
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, two_processes: Pool) -> None:
    two_processes.run(refusals, str(tmp_path))


@pytest.mark.processes
def test_the_example_starts_its_own_ranks(tmp_path: Path) -> None:
    script = Path("examples/integrations/lightning_script.py").resolve()
    done = programs.run(str(script), cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "after 24 steps" in done.stdout


def test_a_file_with_objects_of_classes_is_refused_with_the_class_and_the_edit(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": argparse.Namespace(lr=0.1)}, tmp_path / "last.ckpt")
    (tmp_path / "text.ckpt").write_text("nothing of the kind")

    def body(rank: int) -> list[str]:
        said = []
        for name in ("last", "text"):
            with pytest.raises(BadInput) as caught:
                read_file(str(tmp_path / f"{name}.ckpt"))
            said.append(str(caught.value))
        return said

    (classes, text), again = run_in_threads(2, body)
    assert again == [classes, text]
    assert "holds an object of argparse.Namespace" in classes
    assert "vars(args)" in classes
    assert "is no file of tensors" in text
