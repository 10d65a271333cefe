"""A model that scores a whole text: a language model's body with one output in place of the vocabulary's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from terrazzo.checkpoint.loading.weights import weights_for
from terrazzo.errors import BadInput
from terrazzo.parallel import Style
from terrazzo.planner import ModelShape
from terrazzo.planner.model.shapes import TensorShape
from terrazzo.train.model import huggingface
from terrazzo.train.model.decoder import Decoder, DecoderConfig, Linear

__all__ = ["RewardModel", "build_reward_model", "load_body", "with_score"]

SCORE = "score.weight"


class RewardModel(nn.Module):
    """The body under its name in `transformers`, and `score`: the tensors of a model for sequence classification."""

    def __init__(self, body: nn.Module, name: str, width: int) -> None:
        super().__init__()
        self.config, self.body_name = body.config, name
        self.add_module(name, body)
        self.score = Linear(width, 1)

    def forward(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Scores `[B]` of the texts `tokens`, int64 `[B, T]`, read at their last tokens' places `last`, int64 `[B]`."""
        body = getattr(self, self.body_name)
        hidden = body.hidden(tokens) if isinstance(body, Decoder) else body(tokens).last_hidden_state
        scores: Tensor = self.score(hidden[torch.arange(len(last), device=last.device), last])
        return scores.squeeze(-1)

    def tensor_plan(self) -> dict[str, Style]:
        """How ranks share the body's matrices: see `tz.parallelize`. All of them have the score.

        Raises:
            BadInput: a body of transformers, whose plan names modules of the model with a vocabulary.
        """
        body = getattr(self, self.body_name)
        if not isinstance(body, Decoder):
            raise BadInput(
                f"A reward model on a {type(body).__name__} has no plan of tensor parallelism: set plan.mesh.tp=1, or "
                "train the built-in decoder."
            )
        plan = body.tensor_plan()
        return {f"{self.body_name}.{glob}": style for glob, style in plan.items() if not glob.endswith("head")}

    def num_flops_per_token(self, sequence_length: int) -> int:
        """Training FLOPs, those of the vocabulary's matrix left out; 0 when unknown."""
        body = getattr(self, self.body_name)
        if isinstance(body, Decoder):
            config = body.config
            return body.num_flops_per_token(sequence_length) - 6 * config.vocab_size * config.dim
        return huggingface.num_flops_per_token(self, sequence_length, scores_tokens=False)


def build_reward_model(spec: DecoderConfig | Path, device: torch.device) -> RewardModel:
    """Build a reward model as `build_model` does: random, or on the meta device.

    Raises:
        BadInput: as `build_model`, or `transformers` has no such model with a score, or one of other tensors.
    """
    if isinstance(spec, DecoderConfig):
        with device:
            return RewardModel(Decoder(replace(spec, tie_embeddings=True)), "model", spec.dim)
    body = huggingface.build_body(spec, device)
    with device:
        model = RewardModel(body, body.base_model_prefix, body.config.get_text_config().hidden_size)
    huggingface.check_scored(model)
    return model


def load_body(model: nn.Module, folder: Path) -> None:
    """Load the weights of a model folder into a sharded reward model; a score that the folder lacks stays random.

    Raises:
        BadInput: the folder lacks weights of the body, or has others than a head.
    """
    keys: Any = model.load_state_dict(weights_for(model, folder), strict=False)
    prefix = f"{cast(RewardModel, model).body_name}."
    missing = [name for name in keys.missing_keys if name != SCORE]
    unexpected = [name for name in keys.unexpected_keys if name.startswith(prefix)]
    huggingface.refuse_other_weights(folder, missing, unexpected)


def with_score(shape: ModelShape) -> ModelShape:
    """The planner's view: one output in place of the vocabulary's."""
    tensors = tuple(tensor for tensor in shape.root.tensors if tensor.role != "head")
    width = next(tensor.shape[-1] for tensor in tensors if tensor.role == "embedding")
    score = TensorShape(SCORE, (1, width), "head")
    return replace(
        shape, units=(replace(shape.root, tensors=(*tensors, score)), *shape.repeated), tied=False, outputs=1
    )
