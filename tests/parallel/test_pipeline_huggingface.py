"""Models of `transformers` in stages, by the line that they bring, against one process, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from tests.helpers.threads import run_in_threads
from tests.parallel.test_context_huggingface import model_of


def loss_of(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


def trained(base: Any, batches: list[Tensor], plan: str, chunks: int) -> dict[str, Tensor]:
    """Weights after a step over micro-batches."""
    mesh = tz.mesh(pp=2)
    model = tz.parallelize(copy.deepcopy(base), mesh, pipeline=tz.Pipeline(chunks=chunks))
    model, optimizer = tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), plan, mesh=mesh)
    tz.step(model, [(each, each) for each in batches], loss_of, denominator=8)
    optimizer.step()
    return tz.full_state_dict(model)


@pytest.mark.parametrize(
    ("kind", "plan", "chunks", "more"),
    [
        ("llama", "zero3", 2, {}),
        ("qwen3", "zero2", 1, {"tie_word_embeddings": True}),
        ("gemma2", "zero3", 1, {"tie_word_embeddings": True}),  # whose embeddings are scaled in a module of their own
        ("mixtral", "zero0", 1, {}),
        ("granite", "zero2", 1, {}),  # scales values between two modules, on the rank that has both
        ("starcoder2", "zero2", 1, {"tie_word_embeddings": False, "embedding_dropout": 0.0}),  # drops out there
    ],
)
def test_stages_train_as_one_process_does(kind: str, plan: str, chunks: int, more: dict[str, Any]) -> None:
    base = model_of(kind, **more)
    batches = [torch.randint(1, 64, (1, 8)) for _ in range(4)]
    alone = copy.deepcopy(base)
    for each in batches:
        (loss_of(alone(each), each) / 8).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    found = run_in_threads(2, lambda _: trained(base, batches, plan, chunks))[0]
    for name, parameter in alone.named_parameters():
        if more:  # gradients of what is tied are added up in another order
            assert (found[name] - parameter).abs().max() <= 1e-6 * parameter.abs().max()
        else:
            assert torch.equal(found[name], parameter)


def test_a_model_without_a_line_is_refused_by_name() -> None:
    with pytest.raises(tz.BadInput, match=r"Nothing says how values go through a GPT2LMHeadModel"):
        run_in_threads(2, lambda _: trained(model_of("gpt2"), [], "zero3", 1), timeout_s=20)
