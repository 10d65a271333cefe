"""Opens a run: reads its data, makes and shards its model, and fills it with new weights or the newest checkpoint's.

`open_session` calls, in this order: `_before_model`, `_build`, `_fill`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.exchange import broadcast_json, on_first, patiently, together
from terrazzo.launch.rank.process_group import Ranks, agree_on_data
from terrazzo.launch.rank.restart_note import Restart
from terrazzo.messages import listed
from terrazzo.parallel import context_of
from terrazzo.telemetry import RunConsole, resident_bytes
from terrazzo.train.checkpoints.resume import (
    clear_checkpoints,
    resume_from,
    suspect_notes,
)
from terrazzo.train.checkpoints.run_checkpoints import RunCheckpoints
from terrazzo.train.data import Loader, Prompt, TokenData, evaluated, load_data
from terrazzo.train.data.sources import named_sources
from terrazzo.train.model.expert_load import count_rows
from terrazzo.train.model.huggingface import weight_files
from terrazzo.train.model.linears import linears_note, try_linears
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.model.parallel import parallelize_model
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.planning.as_setup import run_flops_per_token
from terrazzo.train.session.data_share import share_of
from terrazzo.train.session.dpo_reference import (
    DueReference,
    check_same_initial,
    compute_reference,
    initial_model,
    reference_due,
)
from terrazzo.train.session.resume_session import resume_session
from terrazzo.train.session.sampling import Sampling, question_of, sampling_of
from terrazzo.train.session.session import Origin, Session
from terrazzo.train.session.warm_kernels import load_kernels
from terrazzo.train.settings.folders import absent_folders, make_log_folder, make_swap_folders, remove_empty
from terrazzo.train.settings.optimizer import build_optimizer, build_schedule, division_of, group_names, steps_matrices
from terrazzo.train.settings.plan import (
    build_diloco,
    build_offload,
    build_plan,
    build_precision,
    evaluation_limit,
    mesh_shape,
    precision_of_run,
    scaled_for_sums,
)

__all__ = ["open_session"]


def open_session(
    config: Config,
    ranks: Ranks,
    notes: list[str] | None = None,
    restart: Restart | None = None,
    on_claimed: Callable[[], object] = lambda: None,
) -> Session:
    """Build a new run, or continue the one in the newest checkpoint. Collective.

    Args:
        notes: lines to be said before the first step.
        restart: what these ranks were told, if they were started again after a failure.
        on_claimed: is called as soon as no other run may use the run's folders.
    """
    absent = absent_folders(config) if ranks.is_first else []
    try:
        on_first(lambda: make_log_folder(config), BadInput)
        checkpoints = RunCheckpoints(config, ranks)
        try:
            on_claimed()
            before = _before_model(config, ranks, checkpoints)
            session = _build(config, ranks, checkpoints, before, list(notes or ()))
            session.origin.restart = restart
            return session
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
        data: the training and validation sequences.
        question: the message that text samples answer, if any.
        saved: the checkpoint's extra values, if they have a reference of DPO.
        due: pairs whose reference is to be computed before the first step.
    """

    newest: str
    data: TokenData
    question: Prompt | None
    saved: dict[str, Any]
    due: list[DueReference]


def _before_model(config: Config, ranks: Ranks, checkpoints: RunCheckpoints) -> _BeforeModel:
    """Find the checkpoint to continue from, and read the data: what may be refused before a model takes memory."""
    local = checkpoints.find_local()
    here = together(lambda: resume_from(config, local) or "", BadInput)
    newest = broadcast_json(here)  # rank 0 decides: file systems may lag
    data = load_data(
        config, builds=ranks.builds_shared_files, together=partial(patiently, failed=BadInput), say=_saying(ranks)
    )
    agree_on_data(data.described, named_sources(config.data))
    limit = evaluation_limit(config, share_of(config, ranks).readers)
    _check_validation(data, limit)
    question = on_first(lambda: question_of(config, data), BadInput)
    saved = broadcast_json(_saved_with_reference(checkpoints, newest) if newest and ranks.is_first else {})
    due = reference_due(config, data, limit, saved)
    check_same_initial(due, config, saved)
    return _BeforeModel(newest, data, None if question is None else Prompt(*question), saved, due)


def _base_bytes(config: Config) -> int:
    """Resident bytes of this process before it has a model."""
    load_kernels(build_precision(config).compute)
    return resident_bytes() or 0


def _build(
    config: Config, ranks: Ranks, checkpoints: RunCheckpoints, before: _BeforeModel, notes: list[str]
) -> Session:
    """The session: model made, cut, sharded; then its weights, new ones or the checkpoint's."""
    mesh = tz.mesh(**mesh_shape(config.plan.mesh, ranks.world_size), device=ranks.device.type)
    torch.manual_seed(config.train.seed)  # the same on every rank: initial weights do not depend on the plan
    sampling = sampling_of(config, before.data, before.question)
    together(lambda: try_linears(config, ranks.device), BadInput)
    model, flops_per_token = _model(config, before.data, sampling)
    notes += _model_notes(model)
    groups = group_names(config.optimizer, model)
    parallelize_model(model, config, mesh)
    share = share_of(config, ranks, context_of(model))
    loader = Loader(before.data.train, config, share.reader, share.readers, share.of)
    make_swap_folders(config)
    optimizer = build_optimizer(config.optimizer, model, groups)
    notes += _division_notes(config, model)
    base_bytes = _base_bytes(config) if ranks.device.type == "cpu" else 0  # the model is still without memory
    model, sharded = _shard(model, optimizer, config, mesh)
    try:
        session = Session(
            config=config,
            ranks=ranks,
            share=share,
            data=before.data,
            loader=loader,
            model=model,
            optimizer=sharded,
            schedule=build_schedule(config.schedule, config.train.steps, sharded),
            checkpoints=checkpoints,
            sampling=sampling,
            flops_per_token=flops_per_token,
            base_bytes=base_bytes,
            notes=notes,
            origin=Origin(initial=initial_model(config, before.saved)),
        )
        _fill(session, before)
    except BaseException:
        engine_of(model).close()  # its files would stay: ranks end without the interpreter's help
        raise
    return session


def _shard(model: nn.Module, optimizer: Any, config: Config, mesh: Any) -> tuple[nn.Module, Any]:
    return tz.shard(
        model,
        optimizer,
        plan=build_plan(config),
        units=config.plan.units,
        precision=scaled_for_sums(precision_of_run(config, mesh.size()), config),
        mesh=mesh,
        prefetch=config.plan.prefetch,
        offload=build_offload(config),
        diloco=build_diloco(config),
    )


def _fill(session: Session, before: _BeforeModel) -> None:
    """Give the model its weights, as configured or from the checkpoint, and compute what depends on them."""
    config, model = session.config, session.model
    session.notes += on_first(lambda: suspect_notes(config), BadInput)
    if before.due or not before.newest:
        _load_pretrained(config, model)
    if before.due:
        if (say := _saying(session.ranks)) is not None:
            say(f"computing the reference of {sum(len(part.pairs) for part in before.due):,} pairs ...")
        compute_reference(before.due, model, config, session.share, session.ranks.device)
    torch.manual_seed(session.seed_from(0))  # dropout must differ between data
    if before.newest:
        resume_session(session)
    else:  # last, so that nothing is lost to a run that cannot start
        session.notes += on_first(lambda: clear_checkpoints(config), BadInput)
        session.checkpoints.begin_new_run()


def _model_notes(model: nn.Module) -> list[str]:
    """Notes on layers that compute in 8 bits, and on routers whose entropy is not known."""
    notes = linears_note(model)
    if blind := count_rows(model):
        notes.append(
            f"router_entropy is not said of {listed(blind)}: transformers does not name the module that gives their"
            " router_logits"
        )
    return notes


def _division_notes(config: Config, model: nn.Module) -> list[str]:
    """Notes on which parameters are updated as whole matrices, and how the others are."""
    if not steps_matrices(config.optimizer):
        return []
    division = division_of(config.optimizer, model)
    edit = division.unknown_note("optimizer.muon.matrices", "optimizer.muon.others")
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
    """Load the weights that the run begins with, if they are given. Collective."""
    if config.model.weights == "pretrained" and config.model.path is not None:
        weight_files(config.model.path)
        objective_of(config).load_pretrained(model, config.model.path)


def _saved_with_reference(checkpoints: RunCheckpoints, path: str) -> dict[str, Any]:
    """A checkpoint's extra values; empty if it has no reference, or cannot be read, which `restore` will report."""
    try:
        extra = checkpoints.extra_of(path)
    except TerrazzoError:
        return {}
    return extra if extra.get("reference") and "config" in extra else {}


def _model(config: Config, data: TokenData, sampling: Sampling) -> tuple[nn.Module, int]:
    """The model before it is sharded, and the floating-point operations of training on a token."""
    model = prepare_model(config, data.tokenizer)
    vocab_size = cast(Any, model).config.vocab_size
    data.check_vocabulary(vocab_size)
    sampling.check_vocabulary(config, data, vocab_size)
    return model, run_flops_per_token(config, model)
