"""Models of `transformers` whose experts ranks share, against the same model in one process."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import checkpoint_activations
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.expert_load import ExpertLoad, count_rows
from terrazzo.train.model.experts import balance_experts, forget_load
from tests.helpers.cover import places
from tests.helpers.threads import exclusive, run_in_threads

transformers = pytest.importorskip("transformers")

BODY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 16,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
    },
}
GATES_OF_EVERY_SECOND_COLUMN = ("gpt_oss",)
"""Torch's sigmoid of columns that do not lie together rounds by where an element is, with vectors of 512 bits alone."""
TOP_K = 2
"""Of more than two, transformers adds up what comes of a token in the order of its experts, not in that of their ranks.
"""


@cache
def base(kind: str) -> Any:
    """On CPUs `grouped_mm` is what transformers takes."""
    config = transformers.AutoConfig.for_model(kind, **BODY | KINDS[kind])
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model


def experts_in(model: nn.Module) -> Any:
    """The last module of experts: all types have some in their last layer."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")][-1]


Routed = tuple[Tensor, Tensor, Tensor]


def routed(route: str, rank: int, ranks: int) -> Routed:
    """Tokens, numbers of their experts and weights."""
    draw = torch.Generator().manual_seed(10 * rank)
    tokens = torch.randn(0 if route == "a rank without tokens" and rank == ranks - 1 else 7, 32, generator=draw)
    scores = torch.rand(len(tokens), 8, generator=draw)
    if route == "half of the experts idle":
        scores[:, :4] = 0
    weights, chosen = scores.topk(TOP_K, dim=-1)
    if route == "all to one expert":
        weights, chosen = weights[:, :1], torch.full_like(chosen[:, :1], 5)
    return tokens, chosen, weights


ROUTES = ["even", "half of the experts idle", "all to one expert", "a rank without tokens"]


def computed(module: Any, given: Routed) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and gradients of tokens and weights, of the sum of squares."""
    tokens, chosen, weights = given
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    out: Tensor = module(tokens, chosen, weights)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    assert tokens.grad is not None and weights.grad is not None
    return out.detach(), tokens.grad, weights.grad


@pytest.fixture
def stable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers sorts rows by expert, those of one in any order, and gradients of matrices are sums over them."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))


@pytest.mark.cover
@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_what_they_do_in_one_process_to_the_bit(kind: str, route: str, ranks: int) -> None:
    """There they are given the tokens of all ranks, one behind another."""
    same = torch.equal if kind not in GATES_OF_EVERY_SECOND_COLUMN else partial(torch.allclose, rtol=1e-6, atol=1e-6)
    whole, all_given = copy.deepcopy(experts_in(base(kind))), [routed(route, rank, ranks) for rank in range(ranks)]
    together: Any = tuple(torch.cat(each) for each in zip(*all_given, strict=True))
    lengths = [len(tokens) for tokens, _, _ in all_given]
    wanted = [each.split(lengths) for each in computed(whole, together)]
    copies = [copy.deepcopy(base(kind)) for _ in range(ranks)]

    def body(rank: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        module = experts_in(tz.parallelize(copies[rank], tz.mesh(ep=ranks)))
        return computed(module, all_given[rank]), [each.grad for each in module.parameters()]

    for rank, (found, gradients) in enumerate(run_in_threads(ranks, body)):
        for own, each in zip(found, wanted, strict=True):
            assert same(own, each[rank])
        for own, parameter in zip(gradients, whole.parameters(), strict=True):
            assert same(own, parameter.grad.chunk(ranks)[rank])


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_a_number_that_is_no_experts_has_nothing_computed(kind: str) -> None:
    """So tokens skip a layer, some or, on the last rank, all of them; transformers' own loop leaves them out too."""
    whole, given = copy.deepcopy(experts_in(base(kind))), []
    whole.config = copy.deepcopy(whole.config)
    whole.config._experts_implementation = "eager"
    for rank in range(2):
        tokens, chosen, weights = routed("even", rank, 2)
        given.append((tokens, chosen.masked_fill((chosen % 3 == 0) | (rank == 1), 8), weights))
    copies = [copy.deepcopy(base(kind)) for _ in range(2)]

    def body(rank: int) -> tuple[Tensor, ...]:
        return computed(experts_in(tz.parallelize(copies[rank], tz.mesh(ep=2))), given[rank])

    for own, each in zip(run_in_threads(2, body, timeout_s=20)[0], computed(whole, given[0]), strict=True):
        assert torch.equal(own, each)


def test_experts_are_freed_with_their_model() -> None:
    """Ranks collect no garbage."""
    copies: list[Any] = [copy.deepcopy(base("mixtral")) for _ in range(2)]

    def body(rank: int) -> None:
        model, copies[rank] = tz.parallelize(copies[rank], tz.mesh(ep=2)), None
        gone = weakref.ref(experts_in(model))
        del model
        assert gone() is None

    run_in_threads(2, body)


WAYS: dict[str, Any] = {
    "one call against three": lambda module, given, rank: [module(*given) for _ in range(3 if rank else 1)],
    "one calls none": lambda module, given, rank: [module(*given)] if rank else [given[0]],
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_call_experts_otherwise_hear_it(way: str) -> None:
    copies = [copy.deepcopy(base("mixtral")) for _ in range(2)]

    def body(rank: int) -> None:
        mesh = tz.mesh(ep=2)
        model, experts = copies[rank], experts_in(copies[rank])
        model.forward = lambda *given: torch.stack(WAYS[way](experts, given, rank)).sum()
        model, _ = tz.shard(tz.parallelize(model, mesh), None, "zero3", units=[type(experts)], mesh=mesh)
        tokens, chosen, weights = routed("even", rank, 2)
        model(tokens.requires_grad_(), chosen, weights).backward()

    with pytest.raises(tz.RanksApart, match=r"have not run the same.*shares experts"):
        run_in_threads(2, body, timeout_s=20)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


STEPS = 2


@cache
def plain(kind: str, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Mean losses of a step, and weights at the end."""
    model, losses = copy.deepcopy(base(kind)), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        each = [loss_of(model, batch(step, rank)) for rank in range(ranks)]
        torch.stack(each).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(each).detach().mean()))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(kind: str, plan: str, ep: int, checkpointing: str, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    model: Any = copy.deepcopy(base(kind))
    units = [type(model.model.layers[0])]
    checkpoint_activations(model, checkpointing, units=units)
    mesh = tz.mesh(ep=ep, **({"dp_replicate": 2} if plan == "hybrid_shard" else {}))
    model = copy.deepcopy(tz.parallelize(model, mesh))  # a copy computes with its own experts
    model, optimizer = tz.shard(model, optimizer_of(model), plan, units=units, mesh=mesh)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, tz.full_state_dict(model)


CASES = [
    *((kind, "zero3", 2, 2, "none") for kind in KINDS),
    ("mixtral", "zero2", 4, 4, "full"),
    ("qwen3_moe", "zero3", 4, 2, "selective"),
    ("deepseek_v3", "hybrid_shard", 4, 2, "full"),
    ("gpt_oss", "zero1@cpu", 4, 4, "none"),
    ("mixtral", "zero0", 2, 2, "none"),
]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(("kind", "plan", "ranks", "ep", "checkpointing"), CASES)
def test_training_with_shared_experts_is_training(
    kind: str, plan: str, ranks: int, ep: int, checkpointing: str
) -> None:
    losses, weights = plain(kind, ranks)
    found = run_in_threads(ranks, lambda rank: trained(kind, plan, ep, checkpointing, rank))
    for step, loss in enumerate(losses):
        assert sum(own[step] for own, _ in found) / ranks == pytest.approx(loss, rel=2e-6)
    for name, weight in weights.items():
        assert (found[0][1][name] - weight).abs().max() < 5e-6 * weight.abs().max(), name


def test_whole_experts_are_written_as_transformers_reads_them(tmp_path: Path) -> None:
    copies = [copy.deepcopy(base("mixtral")) for _ in range(2)]

    def body(rank: int) -> None:
        mesh = tz.mesh(ep=2)
        model, _ = tz.shard(tz.parallelize(copies[rank], mesh), None, "zero3", mesh=mesh)
        whole = tz.full_state_dict(model)
        if rank == 0:  # each expert's matrices apart, which tz.save_pretrained refuses
            model.save_pretrained(tmp_path, state_dict=whole)

    run_in_threads(2, body)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[name], each) for name, each in base("mixtral").named_parameters())


def refused(match: str, kind: str, sizes: dict[str, Any], ep: int = 2) -> None:
    config = transformers.AutoConfig.for_model(kind, **BODY | sizes)
    with torch.device("meta"):
        models = [transformers.AutoModelForCausalLM.from_config(config) for _ in range(2)]
    with pytest.raises(tz.BadInput, match=match):
        run_in_threads(2, lambda rank: tz.parallelize(models[rank], tz.mesh(ep=ep)))


def test_experts_that_are_not_understood_are_named() -> None:
    llama4 = {"num_local_experts": 2, "intermediate_size": 16, "intermediate_size_mlp": 16, "head_dim": 8}
    refused(r"share the experts of '?model.layers.0.feed_forward.experts.*Llama4TextExperts", "llama4_text", llama4)
    refused(r"ep 2, and LlamaForCausalLM has no module of experts", "llama", {"intermediate_size": 16})
    refused(r"gate_up_proj' has 3 experts, of which 2 ranks", "mixtral", KINDS["mixtral"] | {"num_local_experts": 3})


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("ep", [1, 2])
def test_a_folder_is_read_and_written_as_transformers_has_it(kind: str, ep: int, tmp_path: Path) -> None:
    """Each expert apart, but for GPT-OSS; to the bit, by names, shapes and values."""
    original = base(kind).eval()
    original.save_pretrained(tmp_path / "theirs")
    tokens = torch.arange(12).view(2, 6)

    def body(rank: int) -> None:
        with exclusive():
            model: Any = build_model(tmp_path / "theirs", device="meta")
        mesh = tz.mesh(ep=ep)
        tz.parallelize(model, mesh)
        model, _ = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", mesh=mesh)
        checkpoint.load_weights(model, tmp_path / "theirs")
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, original(tokens).logits, rtol=1e-5, atol=1e-5)
        tz.save_pretrained(model, tmp_path / "ours", max_shard_bytes=20_000)

    run_in_threads(2, body)
    ours, theirs = (
        {name: value for file in (tmp_path / each).glob("*.safetensors") for name, value in load_file(file).items()}
        for each in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_routers_tell_how_sure_they_are(kind: str) -> None:
    """The mean entropy of the softmax of `router_logits`, as transformers itself gives these out; recomputed, once.

    Padding is not counted.
    """
    model = copy.deepcopy(base(kind)).train()
    tokens = torch.randint(61, (2, 2, 8), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        (logits, *_), outputs = zip(*((each.logits, each.router_logits) for each in seen(model, tokens)), strict=True)
    layers = map(torch.cat, zip(*outputs, strict=True))
    expected = [torch.distributions.Categorical(logits=each).entropy().mean() for each in layers]
    assert count_rows(model) == ()
    assert torch.equal(model(tokens[0]).logits, logits)
    padded = F.pad(tokens, (0, 3), value=5)
    padding_mask = F.pad(torch.zeros_like(tokens[0], dtype=torch.bool), (0, 3), value=True)

    def body(rank: int) -> dict[str, ExpertLoad]:
        copied = copy.deepcopy(model)
        forget_load(copied)
        mesh = tz.mesh(ep=2)
        tz.parallelize(copied, mesh)
        checkpoint_activations(copied, "full", units=[type(copied.model.layers[0])])
        copied, _ = tz.shard(copied, torch.optim.SGD(copied.parameters(), lr=0.1), "zero3", mesh=mesh)
        copied(padded[rank], padding_mask=padding_mask).logits.sum().backward()
        return balance_experts(copied)

    for load in run_in_threads(2, body):
        assert [each.entropy for each in load.values()] == pytest.approx([float(each) for each in expected], rel=1e-4)
        assert {sum(each.counts) for each in load.values()} == {2 * 2 * 8 * KINDS[kind]["num_experts_per_tok"]}


def seen(model: Any, batches: Tensor) -> Iterator[Any]:
    return (model(tokens, output_router_logits=True) for tokens in batches)


def test_a_router_that_transformers_does_not_name_is_named() -> None:
    model = copy.deepcopy(base("mixtral"))
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            module._can_record_outputs = {}
    assert count_rows(model) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
