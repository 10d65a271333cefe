"""Validation and text samples."""

from __future__ import annotations

import itertools

import torch

from terrazzo.parallel import whole_sequences
from terrazzo.train.data import Prompt, evaluation_batches
from terrazzo.train.model.causal_lm import generate
from terrazzo.train.model.objectives import Validation, objective_of
from terrazzo.train.session.session import Session
from terrazzo.train.settings.plan import evaluation_limit
from terrazzo.train.steps.step import measure_on

__all__ = ["evaluate", "sample_text"]

TEMPERATURE = 0.8
"""The temperature of samples: below 1, the likelier tokens are drawn more often than the model would."""


@torch.no_grad()
def evaluate(session: Session) -> Validation | None:
    """The validation over the same sequences every time, or None without validation data. Collective.

    Before the first step a model that is compared with its initial self prefers nothing: all pairs count as ties,
    whatever rounding says.
    """
    dataset, batch = session.data.validation, session.config.batch
    if dataset is None:
        return None
    share, objective = session.share, objective_of(session.config)
    limit = evaluation_limit(session.config, share.readers)
    undecided = session.step == 0 and session.config.objective.kind.against_initial
    total = torch.zeros(3, dtype=torch.float64)
    session.model.eval()
    batches = map(share.of, evaluation_batches(dataset, batch.micro_batch, share.reader, share.readers, limit))
    at_once = [[*batches]] if session.config.plan.mesh.pp > 1 else ([part] for part in batches)
    for some in at_once:
        loss, right = measure_on(session, some)
        samples = sum(each.samples for each in some)
        total += torch.tensor([float(loss), samples, samples / 2 if undecided else right], dtype=torch.float64)
    session.model.train()
    loss_sum, samples, right_sum = share.total(total).tolist()  # samples: more than 0, `open_session` has seen to it
    return objective.validation(loss_sum / samples, right_sum / samples, dataset.bytes_per_token)


def sample_text(session: Session) -> str:
    """The text that the model writes after `train.sample_prompt`, or its answer to `train.sample_chat`. Collective.

    It is the same on every rank.
    """
    train = session.config.train
    if session.sampling.question is not None:
        return f"{train.sample_chat} → {_answer(session, session.sampling.question)}"
    tokens = torch.tensor([session.sampling.prompt], device=session.ranks.device)
    generator = torch.Generator().manual_seed(train.seed + session.step)
    with whole_sequences(session.model):
        written = generate(session.model, tokens, train.sample_tokens, temperature=TEMPERATURE, generator=generator)
    return session.data.tokenizer.decode(written[0].tolist())


def _answer(session: Session, question: Prompt) -> str:
    """The most likely tokens, up to the end of the answer."""
    tokens = torch.tensor([question.tokens], device=session.ranks.device)
    with whole_sequences(session.model):
        written = generate(session.model, tokens, session.config.train.sample_tokens, temperature=0.0)[0]
    answer = itertools.takewhile(lambda token: token not in question.ends, written[len(question.tokens) :].tolist())
    return session.data.tokenizer.decode(answer)
