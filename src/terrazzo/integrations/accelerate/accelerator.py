"""The drop-in: Accelerate's class, whose models and optimizers are sharded instead of wrapped."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_compiled_module
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.checkpoint.exporters.full_state import full_state_dict
from terrazzo.engine import Offload, Plan, Precision, Units, accumulate, attach, clip_grad_norm_, data_mesh, engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.accelerate import checkpoints
from terrazzo.integrations.accelerate.optimizer import SteppedOptimizer, has_engine
from terrazzo.integrations.accelerate.requested import RequestedSetup, hidden
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup
from terrazzo.integrations.shared.first_rank import warn_once
from terrazzo.integrations.shared.owners import owner_of

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator`, with Terrazzo's engine in place of DDP, FSDP and DeepSpeed.

    `prepare` shards each model together with its optimizer, in place, and returns the model itself. What to do comes
    from the arguments here, or from the settings of FSDP or DeepSpeed in Accelerate's own arguments and environment;
    without either the plan is `zero2`. `distributed_type` stays that of plain replicas (`MULTI_CPU`, `MULTI_GPU`, or
    `NO` for one process), so code that branches on it calls no API of another engine.

    Args:
        plan: as for `tz.shard`, and so are `units` and `offload`.
        precision: as for `tz.shard`; `mixed_precision` is something else, see `arguments`.
        setup: all of that at once, in place of any other source; kept as an attribute, which `prepare` reads.
        arguments: Accelerate's own. `mixed_precision="bf16"` is autocast over fp32 weights, as there;
            `precision="bf16"` is Terrazzo's, with 16-bit weights and fp32 masters.

    Raises:
        BadInput: something was asked that cannot be honoured; the message names the setting.
    """

    def __init__(  # structure: signature fixed by Accelerate and tz.shard
        self,
        *positional: Any,
        plan: Plan | str | None = None,
        precision: Precision | str | torch.dtype | None = None,
        units: Units | None = None,
        offload: Offload | None = None,
        setup: EngineSetup | None = None,
        **arguments: Any,
    ) -> None:
        bound = inspect.signature(super().__init__).bind(*positional, **arguments).arguments
        words = TerrazzoArguments(plan, precision, units, offload=offload)
        self._requested, self.setup = RequestedSetup(bound, words, setup is not None), setup
        if self._requested.deepspeed:
            bound["mixed_precision"] = "no"
        if not torch.accelerator.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            bound["cpu"] = True  # else Accelerate starts one lone training on each rank
        with hidden():
            super().__init__(**bound)
        self.scaler = None  # the engine scales
        _open_group(self.device)
        self._set_up()
        self._partners: dict[nn.Module, Optimizer] = {}

    def _set_up(self, model: nn.Module | None = None) -> EngineSetup:
        """What the engine is told of a model, or of a model in fp32; with clipping and accumulation noted here."""
        setup = self.setup or self._requested.setup(self.device, dist.get_world_size(), model)
        if setup.arguments.mesh is None:  # not by what the group could do: `cpu=True` holds beside a GPU
            setup = setup.overridden_by(TerrazzoArguments(mesh=data_mesh(self.device.type, dist.get_world_size())))
        if setup.autocast is not None and not self.native_amp:
            raise BadInput(f"The configuration asks for autocast: pass mixed_precision='bf16' ({setup.autocast}), too.")
        steps: int = self.gradient_state.num_steps
        if setup.accumulation != 1 and steps not in (1, setup.accumulation):
            raise BadInput(
                f"gradient_accumulation_steps is {steps} here and {setup.accumulation} in the engine's configuration: "
                "make them equal."
            )
        self.gradient_state.plugin_kwargs["num_steps"] = max(steps, setup.accumulation)
        self._clip = setup.clip
        if setup.plan.weight.axes and self.num_processes > 1 and not self.even_batches:
            raise BadInput(
                f"Plan {setup.plan.name} splits weights, and even_batches=False gives ranks different numbers of "
                "batches, where each gathers weights: leave it True, or use zero2."
            )
        return setup

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models with their optimizers, and wrap loaders, optimizers and schedulers, as Accelerate does.

        An optimizer comes with the model whose parameters it has, or later.
        """
        models = [each for each in args if isinstance(each, nn.Module)]
        self._check(args, models)
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        self._partners = self._match(models, optimizers)
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._partners = {}

    def _match(self, models: list[nn.Module], optimizers: list[Optimizer]) -> dict[nn.Module, Optimizer]:
        """Which new optimizer is whose: of these models, or of one that was prepared before."""
        known = dict.fromkeys([*models, *filter(has_engine, self._models)])
        return _partners(list(known), [each for each in optimizers if not has_engine(each)])

    def _check(self, args: Iterable[Any], models: list[nn.Module]) -> None:
        for each in args:
            if isinstance(each, DummyOptim | DummyScheduler):
                raise BadInput(
                    f"{type(each).__name__} stands for what DeepSpeed builds from its own configuration: build the "
                    "torch optimizer and scheduler in the script."
                )
        for model in models:
            if is_compiled_module(model):
                raise BadInput(
                    "The model is compiled as a whole, and sharding comes before compilation: leave torch.compile out "
                    "and pass dynamo_backend='inductor', which compiles each unit."
                )
            norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
            if norms and self.num_processes > 1 and not all(isinstance(each, nn.SyncBatchNorm) for each in norms):
                warn_once(
                    "The model has batch norms. DDP sends rank 0's running statistics to all ranks before each "
                    "forward; here each rank keeps its own. nn.SyncBatchNorm.convert_sync_batchnorm makes them equal."
                )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, with its optimizer if that is being prepared, too; with `evaluation_mode`, leave it whole."""
        if any(parameter.is_meta for parameter in model.parameters()):
            device_placement = False  # sharding gives it its values
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode and not has_engine(prepared):
            self._set_up(model).shard(prepared, self._partners.get(model))
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer that is sharded, or about to be."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        if not has_engine(optimizer):
            partners = self._partners or self._match([], [optimizer])
            model = next(model for model, partner in partners.items() if partner is optimizer)
            if has_engine(model):
                attach(model, optimizer)
        wrapped = SteppedOptimizer(optimizer, self)
        self._optimizers.append(wrapped)
        return wrapped

    # -- a step ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Micro-batches inside are not the step's last: see `tz.accumulate`."""
        with accumulate(model) if has_engine(model) else contextlib.nullcontext():
            yield

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of one whole model by their global norm, and return that norm, fp32.

        Raises:
            BadInput: a part of a sharded model's parameters, or those of several models.
        """
        tensors, model = self._owned(parameters)
        if model is None:
            norm: Tensor = super().clip_grad_norm_(tensors, max_norm, norm_type)
            return norm
        if self._clip is not None and max_norm not in (self._clip, float("inf")):
            raise BadInput(
                f"clip_grad_norm_ was called with {max_norm}, and the engine's configuration clips at {self._clip}: "
                "make them equal, or leave gradient_clipping out of the configuration."
            )
        for optimizer in self._optimizers:
            if optimizer.optimizer is engine_of(model).optimizer:
                optimizer.clipped = max_norm == self._clip
        return clip_grad_norm_(model, float(max_norm), float(norm_type))

    def _owned(self, parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], nn.Module | None]:
        """Parameters as a list, and the sharded model that trains just these; None where they are of no such model."""
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {each for each in tensors if each.requires_grad}
        models: list[nn.Module] = [model for model in self._models if has_engine(model)]
        for model in models:
            own: set[Tensor] = {each for each in model.parameters() if each.requires_grad}
            if own == wanted:
                return tensors, model
            optimizer = engine_of(model).optimizer
            own |= {each for group in (optimizer.param_groups if optimizer else ()) for each in group["params"]}
            if own & wanted:
                raise BadInput(
                    f"{len(wanted)} parameters were given to be clipped, and they are not those that one model trains: "
                    "pass model.parameters() of one prepared model."
                )
        return tensors, None

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Nothing is to be done: gradients are never seen scaled."""

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Refused on several ranks: each of them takes part in every forward and backward."""
        if self.num_processes > 1:
            raise Misuse("join_uneven_inputs cannot work on sharded models: leave even_batches on, and the call out.")
        yield

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Full weights in master precision, on the CPU of the main process; elsewhere the dict is empty. Collective.

        With `save_on_each_node` the first rank of every node has them.
        """
        if not has_engine(model):
            return super().get_state_dict(model, unwrap)
        each_node = self.project_configuration.save_on_each_node
        return full_state_dict(model, keep=self.is_local_main_process if each_node else self.is_main_process)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Accelerate's folder, with a Terrazzo checkpoint inside in place of model and optimizer files. Collective."""
        _refuse_keywords(save_model_func_kwargs, "save_state")
        with checkpoints.saving(self):
            return super().save_state(output_dir, safe_serialization)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Resume from `save_state`, on any number of ranks and under any plan; or from Accelerate's own folder.

        Random generators and samplers continue only where ranks are as many as they were. Collective.
        """
        _refuse_keywords(load_model_func_kwargs, "load_state")
        with checkpoints.loading(self):
            super().load_state(input_dir, load_kwargs)


def _refuse_keywords(keywords: dict[str, Any], name: str) -> None:
    if keywords:
        raise BadInput(f"{name} was given {', '.join(keywords)}, for another engine: leave it out.")


def _partners(models: list[nn.Module], optimizers: list[Optimizer]) -> dict[nn.Module, Optimizer]:
    """Which optimizer is which model's. Raises: `BadInput` where that is not one to one."""
    partners: dict[nn.Module, Optimizer] = {}
    for optimizer in optimizers:
        owner = owner_of(
            optimizer,
            models,
            "prepared models",
            "build an optimizer over model.parameters() of each model, and pass both to accelerator.prepare",
        )
        if owner in partners or (has_engine(owner) and engine_of(owner).optimizer is not None):
            raise BadInput(
                f"{type(optimizer).__name__} is a second optimizer of one {type(owner).__name__}, and through "
                "Accelerate a model has one: give it several param groups."
            )
        partners[owner] = optimizer
    return partners


def _open_group(device: torch.device) -> None:
    """The group of a single process, where Accelerate makes none."""
    if not dist.is_initialized():
        dist.init_process_group(devices.backend_for(device.type), store=dist.HashStore(), rank=0, world_size=1)
