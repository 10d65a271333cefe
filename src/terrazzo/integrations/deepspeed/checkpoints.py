"""Checkpoints in DeepSpeed's order of folders, `DIR/TAG` with a file `DIR/latest`, in Terrazzo's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.checkpoint import Source
from terrazzo.checkpoint.exporters.full_state import full_state_dict
from terrazzo.errors import BadInput
from terrazzo.exchange import broadcast_json, on_first
from terrazzo.files import replace_file, replacing
from terrazzo.integrations.deepspeed.requested import Configuration
from terrazzo.integrations.shared.checkpoints import opened, resume, save_over, settle
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["Checkpoints"]

_COUNTS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
_OWN = "deepspeed"
"""Under which counts, schedule and the script's state are kept."""


class Checkpoints:
    """Mixed into the engine."""

    module: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    configuration: Configuration
    global_steps: int

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save weights, optimizer, schedule and counts as `save_dir/tag`. Collective.

        Args:
            tag: rank 0's holds; default `global_step<N>`. An older checkpoint of that name is replaced.
            client_state: plain JSON values that `load_checkpoint` gives back; those of rank 0.
            save_latest: name it in `save_dir/latest`.

        Raises: `BadInput` for state that JSON cannot hold, and for `exclude_frozen_parameters`.
        """
        if exclude_frozen_parameters:
            raise BadInput("save_checkpoint(exclude_frozen_parameters=True): a checkpoint here is whole; leave it out.")
        name = str(broadcast_json(f"global_step{self.global_steps}" if tag is None else str(tag)))
        path = Path(save_dir) / name
        own: dict[str, Any] = {count: getattr(self, count) for count in _COUNTS}
        if hasattr(self.lr_scheduler, "state_dict"):
            own["lr_scheduler"] = self.lr_scheduler.state_dict()

        def extra() -> dict[str, Any]:
            return {"step": self.global_steps, _OWN: own | {"client_state": dict(client_state or {})}}

        save_over(path, self.module, self.optimizer, extra)
        if save_latest:
            on_first(lambda: replace_file(Path(save_dir, "latest"), name, sync=True))
        return True

    def load_checkpoint(  # structure: signature fixed by DeepSpeed
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag`, saved by this integration, or by DeepSpeed itself on any number of ranks. Collective.

        Args:
            tag: rank 0's holds; default: what `load_dir/latest` names; without that file nothing is loaded.
            load_optimizer_states, load_lr_scheduler_states: take these along.
            load_module_only: weights, and nothing else.

        Returns:
            The path and the script's own state; None twice where there was no `latest`.

        Raises: `BadInput` for arguments that cannot be honoured, and for what does not fit; `Damaged`.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise BadInput("load_checkpoint takes no custom_load_fn, and loads strictly: leave both out.")
        name = on_first(lambda: _latest(Path(load_dir)) if tag is None else str(tag), BadInput)
        if name is None:
            warn_once(f"load_checkpoint: '{load_dir}' has no file 'latest', and no tag was given: nothing was loaded.")
            return None, None
        path = Path(load_dir) / name
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        settle(path)
        source = opened(path, None if optimizer is None else self.module)
        resume(source, self.module, optimizer)
        own = source.extra.get(_OWN) or _of_deepspeed(source)
        if not load_module_only:
            self._go_on(own, load_lr_scheduler_states)
        return str(path), own["client_state"]

    def _go_on(self, own: Mapping[str, Any], with_schedule: bool) -> None:
        """Take over counts, and the schedule's."""
        for count in _COUNTS:
            setattr(self, count, int(own.get(count, 0)))
        if with_schedule and self.lr_scheduler is not None and own.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(own["lr_scheduler"])

    # -- whole weights -------------------------------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights in the compute dtype, with buffers, under their original names. Collective.

        Args:
            save_filename: what ends in `.safetensors` is that, anything else a `torch.save` of a state dict.

        Returns:
            Whether it was saved: stage 3 wants `stage3_gather_16bit_weights_on_model_save`, as in DeepSpeed.
        """
        if not self.configuration.gathers_on_save:
            warn_once(
                "save_16bit_model saved nothing: at stage 3 it needs "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save."
            )
            return False
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        path = Path(save_dir) / save_filename
        on_first(lambda: _write(path, state))
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Full weights and buffers in host memory on rank 0; on other ranks nothing. Collective."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        dtype = self.configuration.setup.precision.compute
        state = full_state_dict(self.module)
        if exclude_frozen_parameters:
            state = {name: value for name, value in state.items() if name not in named or named[name].requires_grad}
        return {
            name: value.to(dtype) if name in named and value.is_floating_point() else value
            for name, value in state.items()
        }

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict


def _write(path: Path, state: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=True) as beside:
        if path.suffix == ".safetensors":
            apart = {name: value.clone() for name, value in state.items()}  # tied ones share memory
            save_file(apart, beside, metadata={"format": "pt"})
        else:
            torch.save(state, beside)


def _latest(folder: Path) -> str | None:
    """What the file `latest` names; None where there is none."""
    file = folder / "latest"
    return file.read_text().strip() if file.is_file() else None


def _of_deepspeed(source: Source) -> dict[str, Any]:
    """The same of a checkpoint that DeepSpeed wrote: the script's state lies among its own."""
    known = ("lr_scheduler", *_COUNTS)
    state = {key: value for key, value in source.extra.items() if key not in known}
    return {**source.extra, "global_steps": source.step, "client_state": state}
