"""The Trainer's checkpoints under Terrazzo: resuming, the best, and what is left for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from terrazzo.checkpoint import open_source
from terrazzo.checkpoint.saving.job import SaveJob
from terrazzo.errors import SaveFailed
from tests.helpers.processes import Pool
from tests.integrations import killed
from tests.integrations.trainers import PATIENCE_S, Run, apart, sequences, tiny_model, tiny_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "gradient_accumulation_steps": 2}
"""Of six steps the last two are in a second pass over the data."""


def _dropping() -> dict[str, Any]:
    return {"model": tiny_model(attention_dropout=0.2), "processing_class": tiny_tokenizer()}


def _continued(folder: Path) -> dict[str, Any]:
    """A run, and the same one from its checkpoint at step 4 under the same and another plan."""
    whole_run = Run(folder, "zero3", SAVING, _dropping())
    found: dict[str, Any] = {"losses": whole_run.logged(), "kept": sorted(each.name for each in folder.iterdir())}
    if dist.get_rank() == 0:
        (folder / "checkpoint-6" / "trainer_state.json").unlink()  # as if the run had ended while saving it
    dist.barrier()
    again = Run(folder, "zero3", SAVING, _dropping(), resume=True)
    found["same"] = again.logged() == whole_run.logged(), apart(again.weights(), whole_run.weights())
    other = Run(folder, "zero1", SAVING, _dropping(), resume=str(folder / "checkpoint-4"))
    found["other plan"] = max(abs(a - b) for a, b in zip(other.logged(), whole_run.logged(), strict=True))
    theirs = Run(folder / "theirs", None, SAVING, _dropping())
    dist.barrier()
    moved = Run(folder / "moved", "zero3", SAVING, _dropping(), resume=str(folder / "theirs" / "checkpoint-4"))
    found["from the Trainer's"] = max(abs(a - b) for a, b in zip(moved.logged(), theirs.logged(), strict=True))
    found["without dropout"] = Run(folder / "plain", "zero3", SAVING).logged()
    return found


def _saved(folder: Path) -> dict[str, Any]:
    """The best checkpoint at the end, and the model for others to load."""
    import transformers

    given = {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "learning_rate": 0.3}
    given |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }  # an early one
    run = Run(folder, "zero3", given, {**_dropping(), "eval_dataset": sequences(6)})
    trainer = run.trainer
    best = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "final"))
    dist.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "final", dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "final")
    return {
        "best": (best, trainer.state.best_metric, max(run.logged("eval_loss"))),
        "left": sorted(each.name for each in folder.glob("checkpoint-*")),
        "final": apart({name: value.detach() for name, value in loaded.named_parameters()}, run.weights()),
        "tokens": tokenizer("w3 w4")["input_ids"],
        "masters": _masters(folder),
    }


def _masters(folder: Path) -> tuple[set[str], bool]:
    """Dtypes that `from_pretrained` gives weights trained in bf16, and whether they are the masters."""
    import transformers

    from terrazzo.integrations.transformers import TerrazzoArguments

    run = Run(folder, "", {}, {"terrazzo": TerrazzoArguments(plan="zero3", precision="bf16")})
    run.trainer.save_model(str(folder / "bf16"))
    masters = run.trainer.accelerator.get_state_dict(run.trainer.model)
    dist.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "bf16").state_dict()
    equal = all(torch.equal(value, loaded[name]) for name, value in masters.items())
    return {str(value.dtype) for value in loaded.values()}, equal


def _failing(folder: Path) -> tuple[int, bool]:
    """The step that is left where a save in its place fails, and whether one that works replaces it."""
    trainer = Run(folder, "zero3", {**SAVING, "max_steps": 2}, _dropping()).trainer
    trainer.state.global_step = 3
    checkpoint = folder / "checkpoint-2"
    with patch.object(SaveJob, "write", side_effect=OSError("no space")), pytest.raises(SaveFailed):
        trainer._save_optimizer_and_scheduler(str(checkpoint))
    step = open_source(checkpoint / "terrazzo").step
    trainer._save_optimizer_and_scheduler(str(checkpoint))
    killed.between_renames(checkpoint / "terrazzo")
    trainer._load_from_checkpoint(str(checkpoint))
    clean = [each.name for each in checkpoint.iterdir() if "terrazzo" in each.name] == ["terrazzo"]
    return step, clean and open_source(checkpoint / "terrazzo").step == 3


def test_a_save_that_fails_leaves_the_checkpoint_that_it_would_replace(two_processes: Pool, tmp_path: Path) -> None:
    assert two_processes.run(_failing, tmp_path, timeout_s=PATIENCE_S) == [(2, True)] * 2


def test_runs_continue_to_the_bit(two_processes: Pool, tmp_path: Path) -> None:
    """With dropout, into a second pass over the data, past a checkpoint that was not finished."""
    for found in two_processes.run(_continued, tmp_path, timeout_s=PATIENCE_S):
        assert found["kept"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert found["same"] == (True, 0.0)
        assert found["other plan"] <= 1e-6
        assert found["from the Trainer's"] <= 1e-6
    _continued_on_one_rank(tmp_path, found["without dropout"])


def _continued_on_one_rank(folder: Path, losses: list[float]) -> None:
    """In this process, and with as many sequences in a step. Dropout would draw from another generator."""
    given = {**SAVING, "per_device_train_batch_size": 4}
    try:
        again = Run(folder / "one", "zero2", given, resume=str(folder / "plain" / "checkpoint-4"))
        assert again.trainer.args.world_size == 1
        assert again.logged() == pytest.approx(losses, abs=1e-5)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_best_is_loaded_and_from_pretrained_reads_what_is_saved(two_processes: Pool, tmp_path: Path) -> None:
    for found in two_processes.run(_saved, tmp_path, timeout_s=PATIENCE_S):
        evaluated, best, largest = found["best"]
        assert evaluated == best == largest
        assert found["left"] == ["checkpoint-2"]
        assert found["final"] == 0
        assert found["tokens"] == [3, 4]
        assert found["masters"] == ({"torch.float32"}, True)
