"""The engine that `initialize` returns: DeepSpeed's loop, in which the engine counts micro-batches and steps."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

import terrazzo as tz
from terrazzo.engine import compile_units, engine_of
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.deepspeed.accelerator import local_device
from terrazzo.integrations.deepspeed.answers import Answers
from terrazzo.integrations.deepspeed.checkpoints import Checkpoints
from terrazzo.integrations.deepspeed.requested import Configuration
from terrazzo.integrations.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from terrazzo.integrations.shared.first_rank import is_first

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(Answers, Checkpoints, nn.Module):
    """A sharded model with its optimizer and schedule.

    Attributes:
        module: the model, sharded in place.
        optimizer: the script's or the JSON's, sharded in place; None for a model that is not trained.
        lr_scheduler: the script's or the JSON's, or None.
        training_dataloader: of `training_data`, or None.
        micro_steps, global_steps, global_samples, skipped_steps: counted by `step()`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, configuration: Configuration) -> None:
        super().__init__()
        self.module, self.optimizer, self.configuration = model, optimizer, configuration
        self.lr_scheduler: Any = None
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.collate_fn: Callable[..., Any] | None = None
        self.device, self.world_size, self.global_rank = local_device(), dist.get_world_size(), dist.get_rank()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._accumulation = configuration.setup.accumulation
        self._boundary: bool | None = None
        self._outside_sync = self._in_backward = self._step_applied = False
        self._global_grad_norm: float | None = None

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
        if not hasattr(model, name):
            raise AttributeError(f"This integration's engine has no {name!r}, and neither has {type(model).__name__}.")
        return getattr(model, name)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own forward, under torch.autocast if the JSON asks for it."""
        dtype = self.configuration.setup.autocast
        with torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext():
            output = self.module(*inputs, **kwargs)
        if self._accumulation > 1 and torch.is_grad_enabled():
            _watch(output, self._check_backward)
        return output

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of one micro-batch; gradients are reduced by the plan, at the latest at the boundary.

        Args:
            loss: a scalar.
            scale_wrt_gas: divide it by the number of micro-batches per step.

        Returns:
            The loss that was differentiated: divided, and without fp16's loss scale.
        """
        self._trained("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise Misuse(f"engine.backward was given {type(loss).__name__}; pass a loss of one element.")
        loss = loss / self._accumulation if scale_wrt_gas else loss
        last = self.is_gradient_accumulation_boundary() and not self._outside_sync
        self._in_backward = True
        try:
            with contextlib.nullcontext() if last else tz.accumulate(self.module):
                loss.backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself: fp16's loss scale is applied inside the model."""
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the boundary also clip, update, and step the schedule."""
        optimizer = self._trained("step")
        if self._outside_sync:
            raise Misuse("engine.step() was called inside engine.no_sync(): leave the context first.")
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._take_step(optimizer, lr_kwargs or {})
        self.micro_steps += 1

    def _take_step(self, optimizer: Any, lr_kwargs: dict[str, Any]) -> None:
        skipped = optimizer.skipped_steps
        norm = tz.clip_grad_norm_(self.module, self.configuration.setup.clip or math.inf)
        if not engine_of(self.module).gradients.finished:
            raise Misuse("engine.step() has nothing to update with: call engine.backward(loss) before it.")
        self._global_grad_norm = float(norm)
        if self._leaves_out(self._global_grad_norm):
            optimizer.zero_grad()
            applied = False
        else:
            optimizer.step()
            optimizer.zero_grad()
            applied = optimizer.skipped_steps == skipped
        self._step_applied = applied
        self.skipped_steps += not applied
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        every = self.configuration.get("steps_per_print")
        if every and self.global_steps % float(every) == 0 and is_first():  # perhaps infinity, which is never
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")

    def _leaves_out(self, norm: float) -> bool:
        """Whether a step in bf16 is left out for gradients that are not finite, as DeepSpeed does."""
        checked: bool = self.bfloat16_enabled() and self.configuration.get("bf16.check_grad_overflow")
        return checked and not math.isfinite(norm)

    # -- accumulation --------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the step's last."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it, instead of having it counted; before each forward and backward."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches inside are never a step's last, whatever the count says. Allowed at every stage."""
        if self._outside_sync:
            raise Misuse("engine.no_sync() was entered twice: leave it first.")
        self._outside_sync = True
        try:
            yield
        finally:
            self._outside_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the model."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients before clipping, at the last step; None before the first."""
        return self._global_grad_norm

    def _check_backward(self) -> None:
        if not self._in_backward:
            raise Misuse(
                f"loss.backward() was called with gradient_accumulation_steps {self._accumulation}: call "
                "engine.backward(loss), which divides the loss and knows the last micro-batch."
            )

    def _trained(self, what: str) -> Any:
        if self.optimizer is None:
            raise Misuse(f"engine.{what} needs an optimizer: name one in the JSON, or pass optimizer= to initialize().")
        return self.optimizer

    # -- data and life -------------------------------------------------------------------------------------------------

    def deepspeed_io(  # structure: signature fixed by DeepSpeed
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's micro-batches; `route` other than `train` does not shuffle.

        Two workers is DeepSpeed's number for one device. Random augmentation depends on it: each has a seed of its own.
        """
        return DeepSpeedDataLoader(
            dataset,
            data_sampler,
            shuffle=route == "train",
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            drop_last=self.configuration.get("dataloader_drop_last"),
            collate_fn=collate_fn or self.collate_fn,
            num_workers=2 if num_local_io_workers is None else num_local_io_workers,
            pin_memory=pin_memory,
        )

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Compile each unit's forward.

        Raises:
            BadInput: an option of DeepSpeed's own: `schedule`, for its graph passes, or `compiled_autograd_enabled`; or
                a model that is a single unit.
        """
        if asked := [name for name, value in options.items() if value not in (None, False)]:
            raise BadInput(f"engine.compile({', '.join(asked)}=...) is for DeepSpeed's own compilation: leave it out.")
        arguments = dict(compile_kwargs or {}) | ({"backend": backend} if backend is not None else {})
        names = [unit.name for unit in engine_of(self.module).units if unit.name]
        if not names:
            raise BadInput(
                f"engine.compile() compiles units, and this {type(self.module).__name__} is a single one. Name the "
                "classes of its blocks in its _no_split_modules before deepspeed.initialize, or leave this call out."
            )
        compile_units(self.module, units=names, **arguments)

    def destroy(self) -> None:
        """Finish what is under way, and remove swap files."""
        engine = engine_of(self.module)
        engine.settle()
        engine.close()


def _watch(output: object, check: Callable[[], None]) -> None:
    """Call `check` when a backward reaches one of a model's outputs."""

    def hook(grad: Tensor) -> None:
        check()

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)
