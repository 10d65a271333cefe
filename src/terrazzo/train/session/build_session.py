"""A run opened: its data and model made and sharded, and what the newest checkpoint has of it taken up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, TerrazzoError, listed
from terrazzo.exchange import gather_json, on_first, patiently, together
from terrazzo.parallel import context_of
from terrazzo.telemetry import RunConsole, resident_bytes
from terrazzo.train.checkpoints.resume import (
    clear_checkpoints,
    is_restored,
    resume_from,
    resume_notes,
    seeded_anew,
    suspect_notes,
)
from terrazzo.train.checkpoints.run_checkpoints import RunCheckpoints
from terrazzo.train.data import Loader, Prompt, TokenData, evaluated, load_chat, load_data
from terrazzo.train.data.sources import named_sources
from terrazzo.train.launch.process_group import Ranks, agree_on_data
from terrazzo.train.model.causal_lm import num_flops_per_token
from terrazzo.train.model.expert_load import count_rows
from terrazzo.train.model.huggingface import weight_files
from terrazzo.train.model.linears import linears_note, try_linears
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.model.parallel import parallelize_model
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.session.data_share import share_of
from terrazzo.train.session.dpo_reference import (
    Due,
    check_same_initial,
    compute_reference,
    initial_model,
    reference_due,
)
from terrazzo.train.session.session import Origin, Sampling, Session
from terrazzo.train.session.warm_kernels import load_kernels
from terrazzo.train.settings.folders import absent_folders, make_log_folder, make_swap_folders, remove_empty
from terrazzo.train.settings.optimizer import build_optimizer, build_schedule, division_of, steps_matrices
from terrazzo.train.settings.plan import (
    build_offload,
    build_plan,
    build_precision,
    evaluation_limit,
    mesh_shape,
    scaled_for_sums,
)

__all__ = ["open_session"]


def open_session(
    config: Config, ranks: Ranks, notes: list[str] | None = None, claimed: Callable[[], object] = lambda: None
) -> Session:
    """Build a run, or take up the one that the newest checkpoint holds. Collective.

    Args:
        notes: what is to be said of it before its first step.
        claimed: called once no other run may use its folders.
    """
    absent = absent_folders(config) if ranks.is_first else []
    try:
        on_first(lambda: make_log_folder(config), BadInput)
        checkpoints = RunCheckpoints(config, ranks)
        try:
            claimed()
            begin = _begin(config, ranks, checkpoints)
            return _build(config, ranks, checkpoints, begin, list(notes or ()))
        except BaseException:
            checkpoints.abandon()
            raise
    except BaseException:
        remove_empty(absent)
        raise


@dataclass(frozen=True)
class _BeforeModel:
    """What is known before there is a model.

    Attributes:
        newest: the checkpoint that the run continues from; empty for a new run.
        saved: its extra values, where they hold a reference of DPO.
        due: pairs whose reference is to be computed before the first step.
    """

    newest: str
    data: TokenData
    question: Prompt | None
    saved: dict[str, Any]
    due: list[Due]


def _begin(config: Config, ranks: Ranks, checkpoints: RunCheckpoints) -> _BeforeModel:
    local = checkpoints.find_local()
    here = together(lambda: resume_from(config, local) or "", BadInput)
    newest = gather_json(here)[0]  # rank 0 decides: file systems may lag
    data = load_data(
        config, builds=ranks.builds_shared_files, together=partial(patiently, failed=BadInput), say=_saying(ranks)
    )
    agree_on_data(data.described, named_sources(config.data))
    limit = evaluation_limit(config, share_of(config, ranks).readers)
    _check_validation(data, limit)
    question = on_first(lambda: _question(config, data), BadInput)
    saved = gather_json(_saved_with_reference(checkpoints, newest) if newest and ranks.is_first else {})[0]
    due = reference_due(config, data, limit, saved)
    check_same_initial(due, config, saved)
    return _BeforeModel(newest, data, None if question is None else Prompt(*question), saved, due)


def _base_bytes(config: Config) -> int:
    """What the process has resident that is not of its model."""
    load_kernels(build_precision(config).compute)
    return resident_bytes() or 0


def _build(config: Config, ranks: Ranks, checkpoints: RunCheckpoints, begin: _BeforeModel, notes: list[str]) -> Session:
    mesh = tz.mesh(**mesh_shape(config.plan.mesh, ranks.world_size), device=ranks.device.type)
    torch.manual_seed(config.train.seed)  # the same on every rank: initial weights do not depend on the plan
    sampling = Sampling(_prompt(config, begin.data, begin.question), begin.question)
    together(lambda: try_linears(config, ranks.device), BadInput)
    model, flops_per_token = _model(config, begin.data, sampling.prompt)
    notes += linears_note(model)
    if blind := count_rows(model):
        notes.append(
            f"router_entropy is not said of {listed(blind)}: transformers does not name the module that gives their"
            " router_logits"
        )
    parallelize_model(model, config, mesh)
    share = share_of(config, ranks, context_of(model))
    loader = Loader(begin.data.train, config, share.reader, share.readers, share.of)
    make_swap_folders(config)
    optimizer = build_optimizer(config.optimizer, model)
    notes += _division_notes(config, model)
    base_bytes = _base_bytes(config) if ranks.device.type == "cpu" else 0  # the model is still without memory
    model, sharded = tz.shard(
        model,
        optimizer,
        plan=build_plan(config),
        units=config.plan.units,
        precision=scaled_for_sums(build_precision(config), config),
        mesh=mesh,
        prefetch=config.plan.prefetch,
        offload=build_offload(config),
    )
    try:
        session = Session(
            config=config,
            ranks=ranks,
            share=share,
            data=begin.data,
            loader=loader,
            model=model,
            optimizer=sharded,
            schedule=build_schedule(config.schedule, config.train.steps, sharded),
            checkpoints=checkpoints,
            sampling=sampling,
            flops_per_token=flops_per_token,
            base_bytes=base_bytes,
            notes=notes,
            origin=Origin(initial=initial_model(config, begin.saved)),
        )
        _fill(session, begin)
    except BaseException:
        engine_of(model).close()  # its files would stay: ranks end without the interpreter's help
        raise
    return session


def _fill(session: Session, begin: _BeforeModel) -> None:
    """Give the model its weights, the given ones or the checkpoint's, and what follows from the given ones."""
    config, model = session.config, session.model
    session.notes += on_first(lambda: suspect_notes(config), BadInput)
    if begin.due or not begin.newest:
        _load_pretrained(config, model)
    if begin.due:
        if (say := _saying(session.ranks)) is not None:
            say(f"computing the reference of {sum(len(part.pairs) for part in begin.due):,} pairs ...")
        compute_reference(begin.due, model, config, session.share, session.ranks.device)
    torch.manual_seed(session.seed_from(0))  # dropout must differ between data
    if begin.newest:
        _resume(session)
    else:  # last, so that nothing is lost to a run that cannot start
        on_first(lambda: clear_checkpoints(config), BadInput)
        session.checkpoints.begin_new_run()


def _resume(session: Session) -> None:
    """Continue from the newest whole checkpoint, and note what is not as in there. Collective."""
    config, restored = session.config, session.restore()
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
    origin.optimizer = _restored(config, extra["config"]["optimizer"])
    origin.same_evaluation = session.evaluation == extra["evaluation"]
    if not origin.same_evaluation:
        notes.append("resume: the validation data are not those of the checkpoint")
    if restored.draws_anew and goes_on:
        here = session.ranks.world_size, config.plan.mesh.tp
        notes.append(seeded_anew((resumed.world_size, restored.tp), here))


def _restored(config: Config, saved: dict[str, Any]) -> dict[str, Any]:
    """Of the optimizer's settings, those that come with its state."""
    settings = {key: it for key, it in saved.items() if is_restored(f"optimizer.{key}")}
    if "muon" in settings:
        now = config.optimizer.muon.model_dump(mode="json")
        settings["muon"] |= {key: it for key, it in now.items() if not is_restored(f"optimizer.muon.{key}")}
    return settings


def _division_notes(config: Config, model: nn.Module) -> list[str]:
    """Which parameters are updated as whole matrices, and what the others are."""
    if not steps_matrices(config.optimizer):
        return []
    division = division_of(config.optimizer, model)
    edit = division.unknown_note.replace("`muon`", "optimizer.muon.matrices").replace(
        "`adamw`", "optimizer.muon.others"
    )
    stage = "optimizer, of the first stage: " if config.plan.mesh.pp > 1 else "optimizer: "
    lines = [*division.lines(), *([edit] if division.unknown else [])]
    rate, of_matrices = config.optimizer.lr, config.optimizer.muon.lr
    if of_matrices not in (None, rate):
        lines.append(
            f"the column lr is of Muon, up to {of_matrices:.1e}; AdamW's is {rate / of_matrices:.3g} times that"
        )
    return [f"{stage}{line}" for line in lines]


def _saying(ranks: Ranks) -> Callable[[str], None] | None:
    return RunConsole().say if ranks.is_first else None


def _check_validation(data: TokenData, limit: int) -> None:
    """Raise `BadInput` where an evaluation would have no token to measure."""
    dataset = data.validation
    if dataset is not None and not dataset.valid_tokens(evaluated(dataset, limit)):
        raise BadInput(
            f"The validation data have no token to learn in the {min(limit, len(dataset))} of their {len(dataset)}"
            " sequences that an evaluation reads, so there is no validation loss. Raise train.eval_batches or"
            " batch.sequence_length, or set data.packing to 'whole' or 'single'."
        )


def _load_pretrained(config: Config, model: nn.Module) -> None:
    """The weights that a run begins with, where they are given. Collective."""
    if config.model.weights == "pretrained" and config.model.path is not None:
        weight_files(config.model.path)
        objective_of(config).load_pretrained(model, config.model.path)


def _question(config: Config, data: TokenData) -> Prompt | None:
    """The message that samples answer, as the chat template has it."""
    settings, question = config.data, config.train.sample_chat
    if question is None:
        return None
    return load_chat(data.tokenizer, settings.tokenizer, settings.chat_template, settings.loss_on).ask(question)


def _prompt(config: Config, data: TokenData, question: Prompt | None) -> list[int]:
    """What samples go on from. A score is no text, and a model in stages writes none."""
    if not config.train.sample_tokens or config.objective.kind.scored or config.plan.mesh.pp > 1:
        return []
    if question is not None:
        return question.tokens
    tokens: list[int] = data.tokenizer.encode([config.train.sample_prompt])[0].tolist()
    return tokens or [data.tokenizer.end_of_document]


def _saved_with_reference(checkpoints: RunCheckpoints, path: str) -> dict[str, Any]:
    """A checkpoint's extra values; nothing where it has no reference, or cannot be read, which `resume` tells of."""
    try:
        extra = checkpoints.extra_of(path)
    except TerrazzoError:
        return {}
    return extra if extra.get("reference") and "config" in extra else {}


def _model(config: Config, data: TokenData, prompt: list[int]) -> tuple[nn.Module, int]:
    """The model before it is sharded, and what a token costs in floating-point operations."""
    model = prepare_model(config, data.tokenizer)
    vocab_size = cast(Any, model).config.vocab_size
    data.check_vocabulary(vocab_size)
    if max(prompt, default=0) >= vocab_size:
        key = "sample_prompt" if config.train.sample_chat is None else "sample_chat"
        raise BadInput(
            f"train.{key} has token id {max(prompt)}, but the model's vocabulary has ids 0 to {vocab_size - 1} only."
            f" Set model.vocab_size to at least {data.tokenizer.vocab_size}, use the model's own tokenizer, or set"
            " train.sample_tokens to 0."
        )
    return model, num_flops_per_token(model, config.batch.sequence_length)
