"""TRL's SFTTrainer with LoRA on Terrazzo, on two gloo ranks, against the unmodified one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.helpers.processes import Pool
from tests.integrations.trainers import PATIENCE_S, QUIET, apart, for_accelerate, tiny_model, tiny_tokenizer, whole

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = pytest.mark.processes


def _trainer(folder: Path, plan: str | None) -> Any:
    """With plan None the unmodified one."""
    import datasets
    import peft
    import trl

    from terrazzo.integrations.transformers import TerrazzoArguments, TerrazzoTrainerMixin

    class OurSFTTrainer(TerrazzoTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        """What a user writes."""

    for_accelerate()
    pairs = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3}"} for i in range(2, 34)]
    args = trl.SFTConfig(str(folder), **{**QUIET, "save_strategy": "steps", "save_steps": 2}, max_length=16)
    return (trl.SFTTrainer if plan is None else OurSFTTrainer)(
        model=tiny_model(),
        args=args,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tiny_tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        **({} if plan is None else {"terrazzo": TerrazzoArguments(plan=plan)}),
    )


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _adapter(folder: Path) -> dict[str, Tensor]:
    """As PEFT loads it onto the base model."""
    import peft

    loaded = peft.PeftModel.from_pretrained(tiny_model(), folder)
    return {name: value.detach() for name, value in loaded.named_parameters()}


def _tuned(folder: Path) -> dict[str, Any]:
    theirs, ours = _trainer(folder / "theirs", None), _trainer(folder / "ours", "zero3")
    theirs.train()
    ours.train()
    ours.save_model(str(folder / "final"))
    dist.barrier()
    again = _trainer(folder / "ours", "zero3")
    again.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-2"))
    trained = {name for name, value in ours.model.named_parameters() if value.requires_grad}
    kept = {name: value for name, value in whole(ours.model).items() if name not in trained}
    start = dict(_trainer(folder / "start", None).model.named_parameters())
    return {
        "losses": max(abs(a - b) for a, b in zip(_losses(ours), _losses(theirs), strict=True)),
        "weights": apart(whole(ours.model), whole(theirs.model)),
        "base": max((value - start[name]).abs().max().item() for name, value in kept.items()),
        "adapter": apart(_adapter(folder / "final"), whole(ours.model)),
        "saved": sorted(path.name for path in (folder / "final").glob("*model*")),
        "resumed": (_losses(again) == _losses(ours), apart(whole(again.model), whole(ours.model))),
        "accuracy logged": all("mean_token_accuracy" in entry for entry in ours.state.log_history if "loss" in entry),
    }


def test_adapters_are_tuned_as_by_the_unmodified_trainer(two_processes: Pool, tmp_path: Path) -> None:
    for found in two_processes.run(_tuned, tmp_path, timeout_s=PATIENCE_S):
        assert found["losses"] <= 1e-6
        assert found["weights"] <= 1e-6
        assert found["base"] == 0
        assert found["adapter"] == 0
        assert found["saved"] == ["adapter_model.safetensors"]
        assert found["resumed"] == (True, 0.0)
        assert found["accuracy logged"]
