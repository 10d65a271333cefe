"""What is done with a model that ranks share beside training it: against whole models in one process."""

from __future__ import annotations

import copy
import fnmatch
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import OptimizerStates, engine_of
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.helpers.threads import run_in_threads
from tests.parallel.test_tensor_models import NO_SEQUENCE, PLAN, TOKENS, Net, check, lm_loss, refused, seeded


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, foreach=False)


def sharded(base, tp=2, plan="zero3", tensor="auto", build=adamw, **options):
    mesh = tz.mesh(tp=tp, device="cpu")
    model = tz.parallelize(copy.deepcopy(base), mesh, tensor=tensor)
    return tz.shard(model, build, plan, mesh=mesh, **options)


def step(model, optimizer, batch, loss_of=lm_loss):
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(base, steps, build=adamw, batch=TOKENS[0]):
    """The model and its optimizer after so many steps of one process."""
    model = copy.deepcopy(base)
    optimizer = build(model.parameters())
    for _ in range(steps):
        step(model, optimizer, batch)
    return model, optimizer


def close(found, wanted, within=2e-6):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() <= within * max(1.0, value.abs().max()), name


# -- whole tensors from parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "tp", "plan", "tensor"),
    [
        (Net, 2, "zero3", PLAN),
        (Net, 3, "zero1", NO_SEQUENCE),
        (lambda: Decoder(DecoderConfig(31, 16, 1, 4, 1, 26, 8)), 2, "zero2@cpu", "auto"),
    ],
    ids=["fused", "uneven", "fewer-heads"],
)
def test_weights_and_moments_are_whole_again(make, tp: int, plan: str, tensor) -> None:
    base = seeded(make)
    wanted, moments = trained(base, 1)

    def body(rank):
        model, optimizer = sharded(base, tp, plan, tensor)
        before = tz.full_state_dict(model)
        step(model, optimizer, TOKENS[0])
        states = {(name, kind): torch.as_tensor(value).clone() for name, kind, value in states_of(model).whole()}
        after = tz.full_state_dict(model)
        states_of(model).load(by_name({key: value * 2 for key, value in states.items()}))
        doubled = {(name, kind): torch.as_tensor(value).clone() for name, kind, value in states_of(model).whole()}
        return before, after, states, doubled

    found = run_in_threads(tp, body)
    before, after, states, doubled = found[0]
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())
    assert list(before) == list(base.state_dict())
    close(after, wanted.state_dict())
    named = {parameter: name for name, parameter in wanted.named_parameters()}
    kept = {(named[p], kind): torch.as_tensor(v) for p, state in moments.state.items() for kind, v in state.items()}
    close(states, kept)
    for _, nothing, own, twice in found:
        assert all(torch.equal(own[key], states[key]) and torch.equal(twice[key], 2 * states[key]) for key in states)
        assert nothing is after or nothing == {}
    assert doubled.keys() == states.keys()


def states_of(model):
    return OptimizerStates(engine_of(model), engine_of(model).optimizer)


def by_name(states):
    found = {}
    for (name, kind), value in states.items():
        found.setdefault(name, {})[kind] = value
    return found


def test_a_folder_of_transformers_is_written_and_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    base = seeded(lambda: transformers.AutoModelForCausalLM.from_config(llama()))
    other = copy.deepcopy(base)

    def body(rank):
        model, optimizer = sharded(base)
        tz.save_pretrained(model, tmp_path / "model")
        with torch.no_grad(), tz.gathered(model, write=True) as parameters:
            for parameter in parameters.values():
                parameter.zero_()
        tz.checkpoint.load_weights(model, tmp_path / "model")
        step(model, optimizer, TOKENS[0])
        return tz.full_state_dict(model)

    after = run_in_threads(2, body)[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in base.state_dict().items())
    step(other, adamw(other.parameters()), TOKENS[0])
    close(after, other.state_dict(), 5e-6)


def llama(tied=True):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=13,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


@pytest.mark.parametrize("shard_first", [False, True])
def test_whole_tensors_are_loaded_and_parts_are_not_listed(shard_first: bool) -> None:
    base, other = seeded(Net), Net()

    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        model = tz.parallelize(copy.deepcopy(other), mesh, tensor=PLAN)
        if shard_first:
            model, _ = tz.shard(model, None, "zero1", mesh=mesh)
        model.load_state_dict(base.state_dict())
        for module in (model, model.layers[0].inner):
            with pytest.raises(tz.Misuse, match=r"state_dict\(\) of a model that tz.parallelize has cut.*full_state"):
                nn.Module.state_dict(module)
        if not shard_first:
            model, _ = tz.shard(model, None, "zero3", mesh=mesh)
        return tz.full_state_dict(model), model.state_dict()

    found, everywhere = run_in_threads(2, body)[0]
    assert list(everywhere) == list(found) == list(base.state_dict())
    for name, value in base.state_dict().items():
        assert torch.equal(found[name], value) and torch.equal(everywhere[name], value)


# -- what stands around a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["hfsdp", "zero2@nvme-all"])
def test_a_step_under_other_plans_is_that_of_one_process(plan: str, tmp_path: Path) -> None:
    base = seeded(Net)
    base.layers[0].requires_grad_(False)
    base.table.requires_grad_(False)
    offload = tz.Offload(path=str(tmp_path)) if "nvme" in plan else None

    def body(rank):
        mesh = tz.mesh(tp=2, dp_replicate=2 if plan == "hfsdp" else None, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh, tensor=PLAN)
        model, optimizer = tz.shard(model, adamw, plan, mesh=mesh, offload=offload)
        for _ in range(2):
            step(model, optimizer, TOKENS[0])
        return tz.full_state_dict(model)

    close(run_in_threads(4, body)[0], trained(base, 2)[0].state_dict())


def test_an_average_is_that_of_whole_weights_and_goes_to_another_mesh(tmp_path: Path) -> None:
    base = seeded(Net)
    model, optimizer = trained(base, 0)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    wanted = []
    for _ in range(2):
        step(model, optimizer, TOKENS[0])
        average.update_parameters(model)
        wanted.append({name: value.clone() for name, value in average.module.state_dict().items()})

    def one_more(model, optimizer, ema):
        step(model, optimizer, TOKENS[0])
        ema.update()
        with ema.swapped():
            return tz.full_state_dict(model)

    def cut(rank):
        model, optimizer = sharded(base, tensor=PLAN)
        found = one_more(model, optimizer, tz.EMA(model, 0.5))
        tz.checkpoint.save(tmp_path / "saved", model, optimizer)
        return found

    def whole(rank):
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, "zero1")
        ema = tz.EMA(model, 0.5)
        tz.checkpoint.load(tmp_path / "saved", model, optimizer)
        return one_more(model, optimizer, ema)

    close(run_in_threads(2, cut)[0], wanted[0])
    close(run_in_threads(2, whole)[0], wanted[1])


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    base = seeded(Net)

    def body(rank):
        model, optimizer = sharded(base, tensor=PLAN, precision="fp16")
        if rank == 1:  # in a matrix of which the other one has other elements
            model.layers[0].inner.both.weight.register_hook(lambda grad: grad * float("inf"))
        step(model, optimizer, TOKENS[0])
        scaler = engine_of(model).progress.denominator.loss_scale
        return scaler.skipped_steps, scaler.scale, tz.full_state_dict(model)

    found = run_in_threads(2, body)
    assert [skipped for skipped, _, _ in found] == [1, 1]
    assert found[0][1] == found[1][1]
    assert all(torch.equal(found[0][2][name], value) for name, value in base.state_dict().items())


def test_parameters_at_rest_are_measured_whole() -> None:
    base = seeded(Net)
    weight, norm = base.layers[0].inner.both.weight, base.layers[0].norm.weight

    def body(rank):
        model, _ = sharded(base, tensor=PLAN, build=None)
        inner = model.layers[0].inner.both.weight
        assert inner.shape == (12, 8)
        found = [inner.norm(), inner.mean(), inner.std(), inner.abs().max(), inner.isnan().any(), (inner > 0).sum()]
        return [each.item() for each in found], model.layers[0].norm.weight.norm().item()

    wanted = [weight.norm(), weight.mean(), weight.std(), weight.abs().max(), weight.isnan().any(), (weight > 0).sum()]
    for found, shared in run_in_threads(4, body):
        assert found == pytest.approx([each.item() for each in wanted])
        assert shared == pytest.approx(norm.norm().item())


def test_models_on_one_mesh_share_what_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.engine.mesh import axes

    made, build = [], axes.collectives_for
    monkeypatch.setattr(axes, "collectives_for", lambda *arguments: made.append(1) or build(*arguments))

    def body(rank):
        tz.parallelize(Net(), tz.mesh(tp=2, device="cpu"), tensor=PLAN)
        torch.distributed.barrier()
        first = len(made)
        torch.distributed.barrier()
        for _ in range(2):
            tz.parallelize(Net(), tz.mesh(tp=2, device="cpu"), tensor=PLAN)
        return first

    assert run_in_threads(2, body) == [len(made)] * 2
    assert made


# -- parameters that are cut, and what would go around that ----------------------------------------------------


def test_parts_keep_attributes_and_ties() -> None:
    def body(rank):
        model = Net()
        model.head.weight = model.table.weight
        model.table.weight.decays = False
        model.layers[0].norm.weight.register_hook(lambda grad: grad)
        tz.parallelize(model, tz.mesh(tp=2, device="cpu"), tensor=PLAN)
        assert model.head.weight is model.table.weight
        assert model.head.weight.decays is False
        assert model.layers[0].norm.weight._backward_hooks

    run_in_threads(2, body)


def hooked(net):
    net.head.weight.register_hook(lambda grad: grad)


def with_gradient(net):
    net.head.weight.grad = torch.ones(13, 8)


def parametrized(net):
    nn.utils.parametrizations.weight_norm(net.layers[1].inner.down)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (hooked, r"'head.weight' has a hook, .*Register it after tz.parallelize"),
        (with_gradient, r"'head.weight' has a gradient.*zero_grad"),
        (parametrized, r"'layers.1.inner.down.weight' is computed from other parameters.*remove_parametrizations"),
    ],
)
def test_parameters_that_cannot_become_parts_are_refused(change, match: str) -> None:
    def body(rank):
        net = Net()
        change(net)
        with pytest.raises(tz.BadInput, match=match):
            tz.parallelize(net, tz.mesh(tp=2, device="cpu"), tensor=PLAN)
        assert net.table.weight.shape == (13, 8)

    run_in_threads(2, body)


def test_an_optimizer_over_the_whole_parameters_is_refused() -> None:
    def body(rank):
        mesh, model = tz.mesh(tp=2, device="cpu"), Net()
        optimizer = adamw(model.parameters())
        tz.parallelize(model, mesh, tensor=PLAN)
        with pytest.raises(tz.BadInput, match=r"are not parameters of this model. Build the optimizer over"):
            tz.shard(model, optimizer, mesh=mesh)

    run_in_threads(2, body)


class Direct(nn.Module):
    """Computes with the weights of its own modules."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(8, 12), nn.Linear(12, 8), way

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"shape": lambda: self.up.weight.shape[0], "size": lambda: self.up.weight.size(0)}
        width = sizes.get(self.way, lambda: self.up.out_features)()
        x = F.linear(x, self.up.weight, self.up.bias) if self.way == "linear" else self.up(x) / width
        return self.down(x) if self.way != "transposed" else x @ self.down.weight.T


@pytest.mark.parametrize(
    ("way", "match"),
    [
        ("linear", "'up.weight' .linear.*Call 'up'"),
        ("transposed", "'down.weight' .T."),
        ("shape", "asks the size of 'up.weight' .shape. .*configuration"),
        ("size", "asks the size of 'up.weight' .size. "),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_takes_a_part_for_the_whole_is_refused(way: str, match: str, training: bool) -> None:
    base = Direct(way)

    def body(rank):
        model, _ = sharded(base, plan="zero1", tensor={"up": "colwise", "down": "rowwise"}, build=None)
        for _ in range(2):  # a cell of a notebook that is run again
            with pytest.raises(tz.Misuse, match=match):
                model.train(training)(torch.ones(2, 3, 8))
        base.way, model.way = "called", "called"
        return model(torch.ones(2, 3, 8))

    for found in run_in_threads(2, body):
        assert torch.allclose(found, base(torch.ones(2, 3, 8)), atol=1e-6)


def squares(model: nn.Module, glob: str) -> Tensor:
    return sum(p.pow(2).sum() for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, glob))


@pytest.mark.parametrize(
    "options", [{"plan": "zero0"}, {"plan": "zero0@cpu", "offload": tz.Offload(step="synchronous")}]
)
def test_a_penalty_before_the_forward_is_refused_from_the_first_step_on(options) -> None:
    base = seeded(Net)
    plain, _ = trained(base, 2)

    def body(rank):
        model, optimizer = sharded(base, tensor=PLAN, **options)
        for _ in range(2):
            loss = squares(model, "*norm.weight") + lm_loss(model, TOKENS[0])
            with pytest.raises(tz.Misuse, match=r"norm\.weight' .pow. outside of the model's forward"):
                loss.backward()
            optimizer.zero_grad()
            step(model, optimizer, TOKENS[0])
        return model.state_dict()

    for found in run_in_threads(2, body):
        close(found, plain.state_dict())


def penalized(model: nn.Module, tokens: Tensor, glob: str) -> Tensor:
    return lm_loss(model, tokens) + 0.5 * squares(model, glob)


@pytest.mark.parametrize(
    ("glob", "match"),
    [("*norm.weight", "with 'layers.1.norm.weight' .pow. outside"), ("*.down.weight", "'layers.1.inner.down.weight'")],
)
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_loss_with_weights_of_which_ranks_have_parts_is_refused(glob: str, match: str, plan: str) -> None:
    """A part would be penalized for the whole, or a norm once for each rank; the next loss is as in one process."""
    base = seeded(Net)
    plain, _ = trained(base, 2)

    def body(rank):
        model, optimizer = sharded(base, plan=plan, tensor=PLAN)
        step(model, optimizer, TOKENS[0])
        loss = penalized(model, TOKENS[0], glob)
        with pytest.raises(tz.Misuse, match=match):
            loss.backward()
        optimizer.zero_grad()
        assert type(copy.deepcopy(model.layers[0].norm.weight))(torch.ones(1)).pow(2).item() == 1
        loss = lm_loss(model, TOKENS[0])
        assert model.layers[0].norm.weight.norm() > 0  # which nothing is computed from
        loss.backward()
        optimizer.step()
        return model.state_dict()

    for found in run_in_threads(2, body):
        close(found, plain.state_dict())


def test_a_loss_with_weights_that_ranks_have_whole_is_that_of_one_process() -> None:
    base = seeded(Net)
    loss_of = functools.partial(penalized, glob="layers*")
    plain = copy.deepcopy(base)
    step(plain, adamw(plain.parameters()), TOKENS[0], loss_of)

    def body(rank):
        model, optimizer = sharded(base, plan="zero1", tensor={"head": "colwise_gather_output"})
        step(model, optimizer, TOKENS[0], loss_of)
        return model.state_dict()

    for found in run_in_threads(2, body):
        close(found, plain.state_dict())


class Regularized(Net):
    """Penalizes a norm inside of its forward, behind its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits * (1 + self.layers[0].norm.weight.pow(2).sum())


def test_a_norm_of_split_sequences_is_not_used_outside_of_them() -> None:
    base = seeded(Regularized)

    def body(rank):
        model, _ = sharded(base, tensor=PLAN, build=None)
        with pytest.raises(tz.Misuse, match=r"'layers.0.norm.weight' .pow. outside of 'layers.0', inside of which"):
            model(TOKENS[0])

    run_in_threads(2, body)
    check(base, TOKENS[:1], lm_loss, 2, tensor=NO_SEQUENCE)


# -- adapters --------------------------------------------------------------------------------------------------


def adapted(tied=False, **options):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = seeded(lambda: transformers.AutoModelForCausalLM.from_config(llama(tied)))
    targets = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
    settings = {"r": 2, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def adamw_of_adapters(parameters):
    return adamw([parameter for parameter in parameters if parameter.requires_grad])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("plan", "sequence"), [("zero3", True), pytest.param("zero1", False, marks=pytest.mark.long)])
def test_adapters_are_cut_with_their_matrices(plan: str, sequence: bool, tmp_path: Path) -> None:
    base = adapted()

    def body(rank):
        from terrazzo.integrations.peft import load_adapter, save_adapter, save_merged

        mesh = tz.mesh(tp=2, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh, sequence=sequence)
        model, optimizer = tz.shard(model, adamw_of_adapters, plan, mesh=mesh)
        for _ in range(2):
            step(model, optimizer, TOKENS[0])
        save_adapter(model, tmp_path / "adapter")
        save_merged(model, tmp_path / "merged")
        found = tz.full_state_dict(model)
        step(model, optimizer, TOKENS[0])
        load_adapter(model, tmp_path / "adapter")
        again = tz.full_state_dict(model)
        return found, again

    found, again = run_in_threads(2, body)[0]
    model, _ = trained(base, 2, adamw_of_adapters)
    close(found, {name: each.detach() for name, each in model.state_dict().items()}, 5e-6)
    assert all(torch.equal(again[name], value) for name, value in found.items())
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    logits = model(TOKENS[0]).logits
    assert torch.allclose(merged(TOKENS[0]).logits, logits, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("options", [{"use_dora": True}, {"target_modules": ["embed_tokens"]}])
def test_other_adapters_are_refused(options) -> None:
    refused(adapted(**options), r"of peft, which the style \w+ does not know.*plain LoRA")


def test_a_gradient_given_before_backward_is_refused_for_what_all_of_tp_hold() -> None:
    """It would be summed over more ranks than it is divided by; a part of a matrix is summed over those of the data."""
    base = seeded(Net)

    def body(rank):
        model, optimizer = sharded(base, tensor=PLAN)
        part, shared = model.layers[0].inner.both.weight, model.layers[0].norm.weight
        part.grad = torch.ones(part.shape, dtype=part.dtype)
        step(model, optimizer, TOKENS[0])
        shared.grad = torch.ones(shared.shape, dtype=shared.dtype)
        with pytest.raises(tz.Misuse, match=r"norm\.weight' was set to a tensor before backward.*tp or ep"):
            lm_loss(model, TOKENS[0]).backward()
        optimizer.zero_grad()
        return tz.full_state_dict(model, keep=True)["layers.0.inner.both.weight"]

    model = copy.deepcopy(base)
    optimizer = adamw(model.parameters())
    model.layers[0].inner.both.weight.grad = torch.ones(24, 8)
    step(model, optimizer, TOKENS[0])
    wanted = model.layers[0].inner.both.weight
    for found in run_in_threads(2, body):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
