"""A mixture of experts in place of a feed-forward: each token is computed by a few of many.

A `Router` scores the experts for each token and picks the `top_k` best. Rows are sorted by expert, each expert
multiplies its own, and the results for a token are added up, weighted by its scores. No token is dropped, however many
choose one expert. Rows are moved and never accumulated in place, so that all sums have a fixed order.

Experts are kept equally busy by a bias on their scores, which decides who is chosen and nothing else, and which moves
after each step (loss-free balance, arXiv 2408.15664); or by an auxiliary loss (Switch, arXiv 2101.03961).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.engine import engine_of, inside_backward
from terrazzo.engine.runtime.private_torch import uncompiled_once_called
from terrazzo.errors import BadInput
from terrazzo.parallel import Experts, RowOrder
from terrazzo.train.model.expert_load import ExpertLoad, counters_of, load_of

__all__ = [
    "GroupedFeedForward",
    "MixtureConfig",
    "MixtureOfExperts",
    "Router",
    "auxiliary_loss",
    "balance_experts",
    "forget_load",
    "routers_of",
]


@dataclass(frozen=True)
class MixtureConfig:
    """How a `Decoder` mixes experts.

    Attributes:
        count: experts in each block.
        top_k: how many of them compute each token.
        ffn_dim: width of an expert.
        shared: how many more experts compute every token, as one feed-forward of `shared` times the width.
        scores: `softmax` over all experts, or the `sigmoid` of each.
        normalize: whether the weights of a token's experts are scaled to add up to 1.
        apply: whether weights multiply the experts' outputs (`after`) or inputs (`before`).
        balance: by a `bias` on the scores, by an auxiliary `loss`, or `none`.
        bias_rate: how far a step moves the bias.
        loss_weight: weight of the auxiliary loss of each token, learnt or not.
        z_loss: weight of the mean square of the scores' log-sum-exp (ST-MoE, arXiv 2202.08906); 0 for none.

    Raises:
        BadInput: more experts for a token than there are, or sizes that are not positive.
    """

    count: int
    top_k: int
    ffn_dim: int
    shared: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    apply: Literal["after", "before"] = "after"
    balance: Literal["bias", "loss", "none"] = "bias"
    bias_rate: float = 1e-3
    loss_weight: float = 1e-2
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name in ("count", "top_k", "ffn_dim"))
            if isinstance(value, int | float) and not value >= least:
                raise BadInput(f"model.experts.{field.name} is {value}; it must be at least {least}.")
        if self.top_k > self.count:
            raise BadInput(
                f"model.experts.top_k = {self.top_k} experts compute each token, and there are {self.count}: give a "
                f"top_k of at most model.experts.count = {self.count}."
            )


class Router(nn.Module):
    """Chooses the experts of each token, and their weights, in fp32.

    Attributes:
        bias: fp32 `[experts]`, added to the scores only to choose experts.
        load: int64 `[experts]`, rows in training forwards since the last `balance_experts`.
        entropy: fp64 `[2]`, sums since then: the entropy of each token's scores in nats, and the number of tokens.
        auxiliary: auxiliary loss of the last training forward, to be added to a sum of losses over tokens, if any.
    """

    bias: Tensor
    load: Tensor
    entropy: Tensor

    def __init__(self, dim: int, config: MixtureConfig, std: float) -> None:
        super().__init__()
        self.config, self.std = config, std
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        self.register_buffer("bias", torch.empty(config.count, dtype=torch.float32))
        self.register_buffer("load", torch.empty(config.count, dtype=torch.int64), persistent=False)
        self.register_buffer("entropy", torch.empty(2, dtype=torch.float64), persistent=False)
        self.auxiliary: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        for buffer in (self.bias, self.load, self.entropy):
            buffer.zero_()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens `[T, dim]`.

        Args:
            padding_mask: bool `[T]`, True where there is no token: such a row is computed, but is not counted and adds
                nothing to the auxiliary loss.

        Returns:
            The weights (fp32) and numbers (int64) of each token's experts, both `[T, top_k]`, and how many rows each
            expert gets, int64 `[experts]`.
        """
        config = self.config
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=-1) if config.scores == "softmax" else logits.sigmoid()
        chosen = (scores.detach() + self.bias).topk(config.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny)
        counts = torch.bincount(chosen.flatten(), minlength=config.count)
        if self.training and torch.is_grad_enabled():
            load = counts if padding_mask is None else self._load(chosen, padding_mask)
            share = _without_padding(scores / scores.sum(dim=-1, keepdim=True), padding_mask)
            auxiliary = self._auxiliary(logits, share, load, padding_mask)  # again too: torch compares what is saved
            if not inside_backward():
                self._count(share.detach(), load)
                self.auxiliary = auxiliary
        return weights, chosen, counts

    def _load(self, chosen: Tensor, padding_mask: Tensor) -> Tensor:
        """How many tokens each expert computes."""
        nobody = self.config.count  # a bin more
        chosen = chosen.masked_fill(padding_mask.unsqueeze(-1), nobody)
        return torch.bincount(chosen.flatten(), minlength=nobody + 1)[:nobody]

    def _count(self, share: Tensor, load: Tensor) -> None:
        self.load += load
        self.entropy[0] -= torch.xlogy(share, share).sum()
        self.entropy[1] += load.sum() / self.config.top_k

    def _auxiliary(self, logits: Tensor, share: Tensor, load: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """The sum over tokens of `experts × share of the rows × share of the scores`, and of the z-loss."""
        config, losses = self.config, []
        if config.balance == "loss":
            rows = load / load.sum().clamp(min=1)
            losses.append(config.loss_weight * config.count * (rows * share.sum(dim=0)).sum())
        if config.z_loss:
            squares = _without_padding(logits.logsumexp(dim=-1).square(), padding_mask)
            losses.append(config.z_loss * squares.sum())
        return torch.stack(losses).sum() if losses else None


def _without_padding(values: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The `values` `[T, ...]`, 0 where there is no token."""
    if padding_mask is None:
        return values
    return values.masked_fill(padding_mask.view(-1, *(1 for _ in values.shape[1:])), 0)


class GroupedFeedForward(nn.Module):
    """The matrices of all experts, stacked, each a SwiGLU: `down(silu(gate(x)) × up(x))`.

    After `tz.parallelize` a rank along `ep` has only those of its own experts.
    """

    experts: Experts | None = None

    def __init__(self, dim: int, config: MixtureConfig, std: float, out_std: float) -> None:
        super().__init__()
        self._stds = {"gate": std, "up": std, "down": out_std}
        self.gate = nn.Parameter(torch.empty(config.count, config.ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(config.count, config.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(config.count, dim, config.ffn_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, std in self._stds.items():
            nn.init.normal_(getattr(self, name), std=std)

    def stacked(self) -> tuple[str, ...]:
        return tuple(self._stds)

    def use_experts(self, experts: Experts) -> None:
        self.experts = experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs for `rows` `[rows, dim]`, sorted by expert; `counts`: rows of each expert, int64 `[experts]`."""
        if self.experts is None:
            return self._own(rows, counts)
        arrived, route = self.experts.dispatch(rows, counts)
        back: Tensor = self.experts.combine(self._own(arrived, route.counts), route)
        return back

    def _own(self, rows: Tensor, counts: Tensor) -> Tensor:
        hidden = F.silu(grouped(rows, self.gate, counts)) * grouped(rows, self.up, counts)
        return grouped(hidden, self.down, counts)


def grouped(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Rows times the transposed matrix of their group: `[rows, in]` and `[groups, out, in]` to `[rows, out]`.

    One kernel if torch has it for these sizes; else a product per group, for which the host waits for the counts.
    """
    aligned = all(size * rows.itemsize % 16 == 0 for size in matrices.shape[1:])
    product: Tensor
    if rows.dtype == torch.bfloat16 and aligned:
        ends = counts.cumsum(0, dtype=torch.int32).to(rows.device)
        product = F.grouped_mm(rows, matrices.mT, offs=ends)
    else:
        product = _one_by_one(rows, matrices, counts)
    return product


@uncompiled_once_called  # it would be a graph for each number of rows
def _one_by_one(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    pairs = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([F.linear(own, matrix) for own, matrix in pairs])


class MixtureOfExperts(nn.Module):
    """A feed-forward on `[..., T, dim]` in which a few experts compute each token.

    Args:
        shared: a feed-forward that computes every token, and is added; None for none.
    """

    def __init__(self, dim: int, config: MixtureConfig, shared: nn.Module | None, std: float, out_std: float) -> None:
        super().__init__()
        self.config = config
        self.router = Router(dim, config, std)
        self.experts = GroupedFeedForward(dim, config, std, out_std)
        self.shared = shared

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The mixed outputs; `padding_mask`, bool `[..., T]`, is True where there is no token."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, counts = self.router(tokens, None if padding_mask is None else padding_mask.reshape(-1))
        order = RowOrder.by(chosen.flatten())
        each = weights.flatten().unsqueeze(-1).to(tokens.dtype)
        rows = tokens.repeat_interleave(self.config.top_k, dim=0) if self.config.top_k > 1 else tokens
        rows = rows * each if self.config.apply == "before" else rows
        rows = order.restore(self.experts(order.sort(rows), counts))
        rows = rows * each if self.config.apply == "after" else rows
        mixed: Tensor = rows.unflatten(0, (-1, self.config.top_k)).sum(dim=1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)


def routers_of(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """The routers of a model, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Router))


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """The sum of auxiliary losses of the last training forward, to be added to a sum of losses; None without any."""
    put_aside = [router.auxiliary for _, router in routers_of(model)]
    losses = [each for each in put_aside if each is not None]
    return torch.stack(losses).sum() if losses else None


def forget_load(model: nn.Module) -> None:
    """Reset the counts since the last `balance_experts`: they are of a step that is not taken."""
    for _, counter in counters_of(model):
        counter.forget()
    for _, router in routers_of(model):
        router.load.zero_()
        router.entropy.zero_()


def balance_experts(model: nn.Module) -> dict[str, ExpertLoad]:
    """Take the counts since the last call, and move the bias of routers that balance by it. Collective.

    To be called on every rank once per step, after the optimizer's.

    Args:
        model: sharded.

    Returns:
        The loads by name of the router, or of the experts that `count_rows` has counted; equal on all ranks.
    """
    axes = engine_of(model).axes
    loads = {name: counter.take(axes) for name, counter in counters_of(model)}
    for name, router in routers_of(model):
        load, entropy = (axes.total(each, axes.within_replica) for each in (router.load, router.entropy))
        loads[name] = load_of(load, float(entropy[0] / entropy[1].clamp(min=1)))
        with torch.no_grad():
            if router.config.balance == "bias":
                router.bias += router.config.bias_rate * torch.sign(load.double().mean() - load).float()
                router.bias -= router.bias.mean()
            router.load.zero_()
            router.entropy.zero_()
    return loads
