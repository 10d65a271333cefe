"""Continues a session from the newest whole checkpoint, and notes what differs from it."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.config import Config
from terrazzo.train.checkpoints.resume import is_restored, resume_notes, seeded_anew
from terrazzo.train.session.session import Session
from terrazzo.train.settings.plan import check_rounds

__all__ = ["resume_session"]


def resume_session(session: Session) -> None:
    """Continue from the newest whole checkpoint, and note what differs from it. Collective."""
    config, restored = session.config, session.restore()
    check_rounds(config, session.step)
    resumed, extra = restored.resumed, restored.resumed.extra
    notes, origin, goes_on = session.notes, session.origin, session.step < config.train.steps
    where = "" if resumed.path.startswith(f"{config.checkpoint_folder}/") else f", from {resumed.path}"
    notes.append(f"resumed at step {session.step}{where}")
    notes += [f"resume: {path} is DAMAGED, not used: {why}" for path, why in resumed.refused.items()]
    notes += resume_notes(config, extra["config"])
    rate = session.optimizer.param_groups[0]["lr"]
    if goes_on and not math.isclose(rate, restored.rate, rel_tol=1e-9):  # train.steps may stretch a schedule
        notes.append(
            f"resume: the learning rate goes on at {rate:.1e}, where this schedule has it; it was {restored.rate:.1e}"
        )
    origin.optimizer = _restored_settings(config, extra["config"]["optimizer"])
    origin.same_evaluation = session.validation_fingerprint == extra["evaluation"]
    if not origin.same_evaluation:
        notes.append(
            "resume: validations are of other sequences than the checkpoint's, in data or number (train.eval_batches ×"
            " batch.micro_batch × ranks that read): losses before and after are not compared"
        )
    if restored.draws_anew and goes_on:
        here = session.ranks.world_size, config.plan.mesh.tp
        notes.append(seeded_anew((resumed.world_size, restored.tp), here))


def _restored_settings(config: Config, saved: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's settings that are restored with its state."""
    settings = {key: it for key, it in saved.items() if is_restored(f"optimizer.{key}")}
    if "muon" in settings:
        now = config.optimizer.muon.model_dump(mode="json")
        settings["muon"] |= {key: it for key, it in now.items() if not is_restored(f"optimizer.muon.{key}")}
    return settings
