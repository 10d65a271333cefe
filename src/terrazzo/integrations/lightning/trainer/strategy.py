"""The strategy: what Lightning asks of one, answered by `tz.shard` and `tz.checkpoint`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from terrazzo.engine import accumulate, attach, engine_of
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.lightning.precision import TerrazzoPrecision
from terrazzo.integrations.lightning.sharded_strategy import ShardedStrategy
from terrazzo.integrations.lightning.trainer.checkpoint import load_checkpoint, save_checkpoint
from terrazzo.integrations.lightning.trainer.root import Root

__all__ = ["TerrazzoStrategy"]


class TerrazzoStrategy(ShardedStrategy, ParallelStrategy):
    """A Trainer's strategy that shards the LightningModule and its one optimizer. Arguments: `ShardedStrategy`'s.

    Raises:
        BadInput: what the engine cannot do, when the Trainer starts.
    """

    launches = _SubprocessScriptLauncher
    _sharded: nn.Module | None = None
    _sharded_module: LightningModule | None = None
    _fitting = False

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()

    reduce = ShardedStrategy.all_reduce

    # -- the model ---------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> TerrazzoPrecision:
        """What stands for Lightning's plugin: the engine casts weights and scales by itself."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, TerrazzoPrecision) else TerrazzoPrecision(None, self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, TerrazzoPrecision):
            self._take_precision(plugin)
            plugin = TerrazzoPrecision(plugin, self)
        self._precision_plugin = plugin

    def setup(self, trainer: Any) -> None:
        """Shard the module with its optimizer, after `configure_model` and `configure_optimizers`."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check_plugins()
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        if self._fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self._shard(self.lightning_module, self._one_optimizer() if self._fitting else None)
        self.optimizers = self._optimizers  # anew: Lightning's wrappers get the class that the optimizer has now
        self.model_to_device()
        self.barrier()

    def _check_plugins(self) -> None:
        if self._layer_sync is not None:
            raise BadInput(
                "Trainer(sync_batchnorm=True): batch norm's statistics stay local to each rank. Leave it out."
            )
        self._check_checkpoint_io()

    def _one_optimizer(self) -> Optimizer | None:
        optimizer = self._only(self.optimizers, "configure_optimizers returned")
        return None if isinstance(optimizer, _MockOptimizer) else optimizer

    def _shard(self, module: LightningModule, optimizer: Optimizer | None) -> None:
        if self._sharded is None or self._sharded_module is not module:
            if "_terrazzo_sharded" in module.__dict__:
                raise Misuse(
                    f"This {type(module).__name__} has been sharded by another Trainer. Go on with that one, or load a "
                    "checkpoint into a new module."
                )
            root = Root(module)
            self._setup().shard(root, optimizer)
            self._sharded, self._sharded_module = root, module
            module.__dict__["_terrazzo_sharded"] = True
        elif optimizer is not None:
            engine_of(self._sharded).release_optimizer()  # of an earlier fit
            attach(self._sharded, optimizer)
        self.model = self._sharded

    def model_to_device(self) -> None:
        """Bring what has no parameters, such as metrics, to the device; the engine has brought the rest."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if next(module.parameters(), None) is None:
                module.to(self.root_device)

    tensor_init_context = ShardedStrategy.module_init_context

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Micro-batches that are not a step's last."""
        assert self.model is not None
        with accumulate(self.model, local=self._local):
            yield

    def teardown(self) -> None:
        """The module stays sharded: `tz.gathered(trainer.model)` has its weights."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step inside the root's forward; in manual optimization each call of the module is one of its own."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        return self.lightning_module.training_step(*args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the weights from where they are."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the optimizer's state from where it is."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights that lie in the checkpoint itself: of a file, or from `on_load_checkpoint`; a folder's are there."""
        if checkpoint["state_dict"]:
            assert self.model is not None
            self.model.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has restored the optimizer."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise BadInput(
                "save_checkpoint: storage_options are those of a CheckpointIO, which is not used. Leave it out."
            )
        assert self.model is not None
        weights_only = "optimizer_states" not in checkpoint
        optimizer = None if weights_only else self._one_optimizer()
        save_checkpoint(self.broadcast(str(filepath)), self.model, optimizer, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        path = self.broadcast(str(checkpoint_path))
        return load_checkpoint(path, self.model, self._one_optimizer() if self._fitting else None)
