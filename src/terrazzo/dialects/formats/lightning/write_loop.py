"""Writing what Lightning's Trainer and LightningCLI say of the training loop."""

from __future__ import annotations

import inspect

import torch

from terrazzo.dialects.core.description import PATHS
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.lightning.model_checkpoint import write_saving

__all__ = ["write_clip", "write_loop", "write_optimizer", "write_schedule"]

_OPTIONS = "optimizer.init_args"


def write_loop(draft: Draft) -> None:
    """Accumulation, length, seed, saving, device."""
    draft.option("batch.accumulation", "trainer.accumulate_grad_batches")
    draft.option("schedule.total_steps", "trainer.max_steps")
    draft.option("training.seed", "seed_everything")
    for path in ("batch.micro_batch", "batch.global_batch", "batch.sequence_length"):
        draft.lossy(path, "the data loader decides it there")
    if draft.value("training.compile"):
        draft.lossy("training.compile", "compile the model in configure_model")
    write_saving(draft)
    if draft.value("loading.low_memory"):
        draft.lossy("loading.low_memory", "build the model in configure_model")
    if draft.value("training.device") is not None:
        draft.put("training.device", "trainer.accelerator", "cpu" if draft.value("training.device") == "cpu" else "gpu")


def write_optimizer(draft: Draft) -> None:
    """A class of torch.optim, which LightningCLI calls with all parameters and these arguments."""
    paths = tuple(f"optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay"))
    name = draft.value("optimizer.name")
    if name is None:
        draft.lossy((*paths, "optimizer.options"), "the optimizer comes from the LightningModule there")
        return
    kind = getattr(torch.optim, name, None)
    if name == "Muon" or not isinstance(kind, type):
        fault = "Muon is for matrices alone, and gets every parameter" if kind else f"torch.optim has no {name}"
        draft.refuse("optimizer.name", f"{fault}: return your own from configure_optimizers")
        return
    draft.put("optimizer.name", "optimizer.class_path", f"torch.optim.{name}")
    draft.does("optimizer.decay", "all")
    known = inspect.signature(kind).parameters
    for path in paths:
        field = path.partition(".")[2]
        if draft.value(path) is not None and field not in known:
            draft.lossy(path, f"torch.optim.{name} has no {field}")
        elif draft.value(path) is not None:
            draft.copy(path, f"{_OPTIONS}.{field}")
    options = draft.value("optimizer.options", {})
    for field in (field for field in options if field in known):
        draft.write(f"{_OPTIONS}.{field}", options[field])
    if unknown := [field for field in options if field not in known]:
        draft.lossy("optimizer.options", f"torch.optim.{name} has no {', '.join(unknown)}", _OPTIONS)
    elif options:
        draft.implied("optimizer.options", key=_OPTIONS)


def write_schedule(draft: Draft) -> None:
    """LightningCLI makes none, or one that it steps once an epoch; beside `optimizer` the module's own is not asked."""
    paths = [path for path in PATHS if path.startswith("schedule.") and path != "schedule.total_steps"]
    warm = [path for path in ("schedule.warmup_steps", "schedule.warmup_fraction") if draft.value(path)]
    if not draft.has("optimizer"):
        draft.lossy(paths, "the LightningModule returns its schedule from configure_optimizers")
    elif draft.value("schedule.name", "constant") == "constant" and not warm:
        draft.holds(paths, "no lr_scheduler: the rate stays as it is")
    else:
        edit = "return it with the optimizer from configure_optimizers instead"
        draft.lossy(paths, f"LightningCLI steps a schedule once an epoch: {edit}")


def write_clip(draft: Draft, *, sharded: bool) -> None:
    """Clipping by norm. `sharded`: by FSDPStrategy, which has none."""
    clip = draft.value("training.clip")
    if clip is None:
        draft.implied("training.clip")
    elif sharded:
        why = (
            "FSDPStrategy raises on clipping by norm: override configure_gradient_clipping and call clip_grad_norm_ of"
        )
        draft.refuse("training.clip", f"{why} the FSDP module there")
    else:
        draft.put("training.clip", "trainer.gradient_clip_val", clip)
