"""A language model that returns the loss when it is called with targets, so that no rank ever has all logits.

The head gets a class of the same name. With targets its forward multiplies and computes the loss chunk by chunk of
tokens; without targets it is unchanged, for generating text and for log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.marks import Mark
from terrazzo.nn.chunked_cross_entropy import MANY_LOGITS, linear_cross_entropy
from terrazzo.parallel import vocabulary_of
from terrazzo.train.data import IGNORED
from terrazzo.train.model.causal_lm import logits_of
from terrazzo.train.model.decoder import Decoder, TiedHead
from terrazzo.train.model.huggingface import one_sequence_per_row
from terrazzo.train.model.parallel import name_of_head
from terrazzo.train.settings.plan import build_precision

__all__ = ["TARGETS", "gives_loss", "has_loss_without_logits", "take_targets"]

TARGETS = "targets"
"""The name of the targets among the model's keyword arguments: int64, of the shape of the tokens."""


@dataclass
class _CalledWith:
    """The targets that a model was called with, shared by the model and its head."""

    model: nn.Module
    targets: Tensor | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.targets = kwargs.pop(TARGETS, None)
        return args, kwargs

    def drop(self, model: nn.Module, args: Any, output: Any) -> None:
        self.targets = None

    def loss(self, hidden: Tensor, weight: Tensor) -> Tensor:
        assert self.targets is not None
        if (vocabulary := vocabulary_of(self.model)) is not None:
            return vocabulary.of_hidden(hidden, weight, self.targets)
        return linear_cross_entropy(hidden, weight, self.targets, ignore_index=IGNORED)


_CALLED_WITH = Mark[_CalledWith]("terrazzo_targets")


def has_loss_without_logits(config: Config, vocabulary: int) -> bool:
    """Whether a run's loss is computed without logits, as far as the configuration tells.

    Args:
        vocabulary: the number of logits of a token.

    Raises:
        BadInput: the configuration asks for it, and it is not possible.
    """
    wanted = config.objective.loss
    if obstacle := _obstacle(config):
        if wanted == "chunked":
            raise BadInput(f"objective.loss is 'chunked', but {obstacle}: set it to 'auto' or 'full'.")
        return False
    tokens = config.batch.micro_batch * config.batch.sequence_length // config.plan.mesh.cp
    return wanted == "chunked" or (wanted == "auto" and tokens * vocabulary // config.plan.mesh.tp >= MANY_LOGITS)


def _obstacle(config: Config) -> str:
    if config.objective.name != "next_token":
        return f"objective.name '{config.objective.name}' does not learn from one sum over all tokens"
    if build_precision(config).compute == torch.float16:
        return "under fp16 a chunk's gradients would be formed before their loss scale is known"
    return ""


def take_targets(model: nn.Module, config: Config) -> None:
    """Have `model`, on the meta device and not cut yet, take `targets` if the run's loss is computed without logits.

    Raises:
        BadInput: the configuration asks for that, and the model changes its logits, or has no plain head.
    """
    name = name_of_head(model)
    head = model.get_submodule(name) if name else None
    if not has_loss_without_logits(config, _vocabulary(model, head)):
        return
    if head is None or not _is_plain(model, head):
        if config.objective.loss == "chunked":
            raise BadInput(
                f"objective.loss is 'chunked', but a {type(model).__name__} does not return what one matrix without a "
                "bias makes of its last hidden states: set objective.loss to 'auto' or 'full'."
            )
        return
    passed = _CalledWith(model)
    for module in (model, head):
        _CALLED_WITH.leave(module, passed)
    head.__class__ = _with_loss(type(head))
    model.register_forward_pre_hook(passed.take, with_kwargs=True)
    model.register_forward_hook(passed.drop, always_call=True)


def gives_loss(model: nn.Module) -> bool:
    """Whether `model` returns the loss when it is called with targets."""
    return _CALLED_WITH.find(model) is not None


def _vocabulary(model: nn.Module, head: nn.Module | None) -> int:
    return model.config.vocab_size if isinstance(model, Decoder) else int(getattr(head, "out_features", 0))


def _is_plain(model: nn.Module, head: nn.Module) -> bool:
    """Whether the model's logits are the output of its head, a product with one matrix. Runs the model on meta."""
    if isinstance(head, TiedHead):
        return True
    matrix: Any = head
    if not isinstance(head, nn.Linear) or matrix.bias is not None or type(matrix).forward is not nn.Linear.forward:
        return False
    if isinstance(model, Decoder):
        return True
    outputs: list[Any] = []
    handle = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad(), one_sequence_per_row():
            logits = logits_of(model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta")))
    except Exception:  # anything: a stranger's forward has been given tensors without values
        return False
    finally:
        handle.remove()
    return len(outputs) == 1 and logits is outputs[0]


def _with_loss(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name, by which units and styles are found."""

    def forward(self: nn.Module, hidden: Tensor, *weight: Tensor) -> Tensor:
        passed = _CALLED_WITH.find(self)
        if passed is None or passed.targets is None:
            logits: Tensor = kind.forward(self, hidden, *weight)
            return logits
        return passed.loss(hidden, weight[0] if weight else self.weight)  # type: ignore[arg-type]

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward})
