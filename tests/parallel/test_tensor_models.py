"""Tensor parallelism of models that are not the built-in one, of bad input, and of what stands around a step."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of, record_of
from terrazzo.parallel import Colwise, Embedding, VocabularyLoss
from terrazzo.parallel.tensor.styles import Enter, Logits, Rowwise, Style
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.helpers.threads import run_in_threads

CONFIG = DecoderConfig(31, 16, 2, 4, 2, 26, 8)


class Fused(nn.Module):
    """A gate and an up projection in one matrix, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), Fused()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8, padding_idx=3)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "table": "embedding_rowwise",
    "layers.*": "sequence",
    "layers.*.inner": "enter",
    "layers.*.inner.both": Colwise(parts=(12, 12)),
    "layers.*.inner.down": "rowwise",
    "head": "colwise_gather_output",
}
NO_SEQUENCE = {glob: style for glob, style in PLAN.items() if style != "sequence"}


def seeded(make):
    torch.manual_seed(1)
    return make()


def whole_of(model, grads):
    """This rank's part of the finished gradients, as whole tensors with zeros elsewhere, and of which elements."""
    found = {}
    modules = dict(model.named_modules())
    for bucket in engine_of(model).trainable():
        own = bucket.master.range
        for slot in bucket.slots:
            part = own.intersect(slot.range)
            if part.numel:
                module, _, attribute = slot.name.rpartition(".")
                box = record_of(modules[module], attribute).box
                found[slot.name] = box, part.start - slot.offset, grads(bucket)[part.within(own)].clone()
    return found


def gradients(base, batches, loss_of, tp, plan="zero3", tensor="auto", sequence=True, precision="fp32", world=2):
    """Losses, and each rank's parts of gradients, after one backward."""

    def body(rank):
        mesh = tz.mesh(tp=tp, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh, tensor=tensor, sequence=sequence)
        model, _ = tz.shard(model, None, plan, mesh=mesh, precision=precision)
        loss = loss_of(model, batches[rank // tp])
        loss.backward()
        norm = tz.clip_grad_norm_(model, float("inf"))
        return loss.item(), norm.item(), whole_of(model, lambda bucket: bucket.gradient.finished.read())

    return run_in_threads(world, body)


def check(base, batches, loss_of, tp, within=2e-6, **options):
    found = gradients(base, batches, loss_of, tp, **options)
    model = copy.deepcopy(base)
    losses = [loss_of(model, batch) for batch in batches]
    (sum(losses) / len(losses)).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in wanted.values()]))
    for rank, (loss, total, parts) in enumerate(found):
        assert loss == pytest.approx(losses[rank // tp].item(), rel=within)
        assert total == pytest.approx(norm.item(), rel=within)
        for name, (box, start, part) in parts.items():
            theirs = box.of(wanted[name]).flatten()[start : start + part.numel()]
            assert (part - theirs).abs().max() <= within * wanted[name].abs().max(), name
    assert {name for _, _, parts in found for name in parts} == wanted.keys()


def lm_loss(model, tokens):
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


ACTIVATIONS = [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))]
TOKENS = [torch.randint(13, (2, 8), generator=torch.Generator().manual_seed(rank)) for rank in range(2)]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_plan_of_globs_cuts_fused_matrices_biases_and_tables(sequence: bool, plan: str) -> None:
    check(seeded(Net), TOKENS[:1], lm_loss, 2, tensor=PLAN, sequence=sequence, plan=plan)


def test_parts_may_differ_in_size() -> None:
    check(seeded(Net), TOKENS[:1], lm_loss, 3, tensor=NO_SEQUENCE, world=3)


def test_columns_without_an_enter_put_their_own_input_together() -> None:
    mlp = seeded(lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))
    data = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    check(mlp, data, lambda model, x: model(x).square().mean(), 2, tensor={"0": "colwise", "2": "rowwise"}, world=4)


@pytest.mark.parametrize(("precision", "within"), [("bf16", 0.06), ("fp16", 0.03), ("bf16-pure", 0.06)])
def test_half_precision_is_close(precision: str, within: float) -> None:
    check(seeded(lambda: Decoder(CONFIG)), TOKENS[:1], lm_loss, 2, within=within, precision=precision)


def config_of(name: str):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 13}
    kinds = {
        "llama": (transformers.LlamaConfig, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 1, "head_dim": 4}),
        "phi3": (transformers.Phi3Config, {"num_key_value_heads": 1, "pad_token_id": 0}),
        "mixtral": (transformers.MixtralConfig, {"num_key_value_heads": 2, "num_local_experts": 3}),
        "qwen3_moe": (transformers.Qwen3MoeConfig, MIXTURE | {"num_experts": 3, "mlp_only_layers": [1]}),
        "qwen2_moe": (transformers.Qwen2MoeConfig, MIXTURE | {"shared_expert_intermediate_size": 8, "num_experts": 3}),
        "gpt_neox": (transformers.GPTNeoXConfig, {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    }
    kind, more = kinds[name]
    return kind(**sizes, **more, num_hidden_layers=2, max_position_embeddings=16, attn_implementation="eager")


MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "phi3", "mixtral", "qwen3_moe", "qwen2_moe"])
def test_models_of_transformers_by_their_own_plan(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    base = seeded(lambda: transformers.AutoModelForCausalLM.from_config(config_of(name)))
    check(base, TOKENS[:1], lm_loss, 2, within=5e-6)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_models_of_transformers_with_whole_sequences(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    base = seeded(lambda: transformers.AutoModelForCausalLM.from_config(config_of(name)))
    check(base, TOKENS[:1], lm_loss, 2, within=5e-6, sequence=False)


def test_a_style_of_transformers_that_is_unknown_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV2Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=13,
        n_routed_experts=8,
    )
    base = transformers.AutoModelForCausalLM.from_config(config)
    unknown = r"tp_plan of DeepseekV2ForCausalLM gives '(.*)' the style '\w+', which this version does not know"
    refused(base, unknown + r".*without '\1', as in tensor=\{'model\.layers\.\*\.mlp\S*': 'enter'")


def test_a_loss_of_routers_is_not_computed_of_a_part_of_each_sequence() -> None:
    transformers = pytest.importorskip("transformers")
    config = config_of("mixtral")
    config.output_router_logits = True
    base = transformers.AutoModelForCausalLM.from_config(config)
    refused(base, "split around model.layers.0.mlp.experts, .*Set output_router_logits=False in the model's config")


@pytest.mark.parametrize("style", [Colwise(), Rowwise(), Enter(), Logits(8), Style()])
def test_a_style_of_another_class_is_refused(style):
    """Nothing would be exchanged of it: what is cut and exchanged goes by the class."""
    own = style if type(style) is Style else type("Own", (type(style),), {})(**vars(style))
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    refused(
        base, f"'0' is of the class {type(own).__name__}, which.* not know: give one of Colwise,", tensor={"0": own}
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("heads", each) for each in (0, -2, 2.0, True, [4, 0], [])),
        *(("parts", each) for each in ((-8, 16), (), 8, (8.0, 8))),
    ],
)
def test_heads_and_parts_are_whole_numbers(name, value):
    with pytest.raises(tz.BadInput, match=f"Colwise: {name} is .*; give whole numbers, each 1 or more"):
        Colwise(**{name: value})
    assert Colwise([4, 4], parts=[8, 8]) == Colwise((4, 4), parts=(8, 8))


def refused(base, match, tp=2, error=tz.BadInput, **options):
    def body(rank):
        with pytest.raises(error, match=match):
            tz.parallelize(copy.deepcopy(base), tz.mesh(tp=tp, device="cpu"), **options)

    run_in_threads(tp, body)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        ({"layers.*.inner.both": "colwises"}, "style of 'layers.*.inner.both' is 'colwises'.*Did you mean 'colwise'"),
        ({"layer.*": "enter"}, "'layer.*', which matches no module of Net"),
        ({"*.inner": "enter"}, r"one level of names here: give 'layers\.\*\.inner'"),
        ({"layers.*.inner": "enter"}, "no 'colwise' and 'rowwise' inside"),
        ({"layers.*.norm": "rowwise"}, "is a LayerNorm, and the style rowwise knows torch.nn.Linear"),
        ({**PLAN, "layers.0.inner.both": "colwise"}, "two styles"),
        ({**PLAN, "layers.*.inner.both": Colwise(heads=3)}, "has 3 heads in 24 outputs, which tp 2 does not divide"),
        ({**PLAN, "layers.*.inner.both": Colwise(parts=(12, 13))}, "parts that add up to 24"),
        ({**PLAN, "layers.*.inner.both": Colwise(1, gathered=True)}, "1 heads, fewer than tp 2, and the plan gathers"),
        ({"layers.*": "sequence"}, "is neither cut nor inside of a module of style 'enter'"),
        (
            {
                "layers.*": "enter",
                "layers.*.inner.both": "colwise_gather_output",
                "layers.*.inner.down": "rowwise_split_input",
            },
            r"'layers.0.inner.both' together again inside of 'layers.0': whether layers.0.norm",
        ),
        (
            {"layers.*": "sequence", "layers.*.inner.both": "rowwise_split_input", "layers.*.inner.down": "replicate"},
            "'layers.0.inner.both' as 'rowwise_split_input' where sequences are split",
        ),
        (
            {
                "layers.*": "sequence",
                "layers.*.inner.both": "replicate",
                "layers.*.inner.down": "colwise_gather_output",
            },
            "'layers.0.inner.down' as 'colwise_gather_output' where sequences are split",
        ),
        ({}, "give 'auto', or a dict"),
        ("fast", "give 'auto'"),
        ("auto", "Net has no plan of tensor parallelism"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_changed(tensor, match: str) -> None:
    refused(Net(), match, tensor=tensor)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def replaced(layer: nn.Linear) -> nn.Linear:
    """As libraries wrap a layer: by a forward on itself."""
    layer.forward = functools.partial(type(layer).forward, layer)
    return layer


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (lambda: replaced(nn.Linear(12, 8)), "is a Linear, whose forward has been replaced, and the style row"),
        (lambda: Halved(12, 8), "is a Halved, and the style row"),
    ],
)
def test_a_row_whose_forward_would_not_be_summed_is_refused(layer, match: str) -> None:
    net = Net()
    net.layers[0].inner.down = layer()
    refused(net, match, tensor=PLAN)


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class Turned(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward((tokens + 2) % self.num_embeddings)


class Stretched(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3 + 1


@pytest.mark.parametrize(
    ("name", "make", "match"),
    [
        ("head", lambda: Normalized(8, 13), "'head' is a Normalized, and the style colwise.*own row.*Colwise.own_f"),
        ("head", lambda: replaced(nn.Linear(8, 13)), "whose forward has been replaced, and the style colwise"),
        ("table", lambda: Turned(13, 8), "'table' is a Turned, and the style embedding.*Embedding.own_forward=True"),
    ],
)
def test_a_forward_of_its_own_is_not_run_with_a_part_unasked(name: str, make, match: str) -> None:
    net = Net()
    setattr(net, name, make())
    refused(net, match, tensor=PLAN)


def test_a_forward_of_its_own_is_run_with_a_part_where_the_plan_says_that_it_may() -> None:
    net = seeded(Net)
    net.table, net.head = Stretched(13, 8), Halved(8, 13)
    styles = {"table": Embedding(own_forward=True), "head": Colwise(gathered=True, own_forward=True)}
    check(net, TOKENS[:1], lm_loss, 2, tensor=PLAN | styles)


@pytest.mark.parametrize("layer", [lambda: replaced(nn.Linear(8, 24)), lambda: Halved(8, 24)])
def test_a_forward_that_would_be_lost_with_fewer_heads_than_ranks_is_refused(layer) -> None:
    net = Net()
    net.layers[1].inner.both = layer()
    refused(
        net,
        "has 1 heads, fewer than tp 2, and its forward",
        tensor={**PLAN, "layers.*.inner.both": Colwise(1, own_forward=True)},
    )


class Code(nn.Module):
    """Looks up rows by what it is given: on each rank for other positions, where sequences are split."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.up, self.down = nn.Embedding(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x + self.codes(x.argmax(-1)))))


def test_a_table_is_not_looked_up_by_parts_of_sequences() -> None:
    plan = {"0": "sequence", "0.up": "colwise", "0.down": "rowwise", "0.codes": "embedding_rowwise"}
    refused(nn.Sequential(Code()), "'0.codes' as 'embedding_rowwise' where sequences are split", tensor=plan)


class Stack(nn.Module):
    """Two pairs of matrices, joined in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm = way, nn.LayerNorm(8) if way == "norm" else nn.Identity()
        self.up, self.down, self.wide, self.back = (nn.Linear(*sizes) for sizes in ((8, 12), (12, 8)) * 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(x)))
        match self.way:
            case "chain":
                return self.back(F.relu(self.wide(y)))
            case "norm":
                return self.norm(y) + self.back(F.relu(self.wide(x)))
            case "residual":
                return x + y + self.back(F.relu(self.wide(x)))
            case _:
                return y + self.back(F.relu(self.wide(x)))


STACK = {"1": "enter", "1.up": "colwise", "1.down": "rowwise", "1.wide": "colwise", "1.back": "rowwise"}
MIXED = [
    ("chain", STACK, r"\(linear\) with '1.wide.\w+'"),
    ("norm", STACK, r"\(layer_norm\) with '1.norm.\w+'"),
    ("residual", STACK, r"\(add\) with a tensor that is computed from a module's input of style 'enter'"),
    (
        "beside",
        {**STACK, "1.back": "rowwise_split_input", "1.wide": "replicate"},
        "'1.back', of style 'rowwise_split_input'",
    ),
]


@pytest.mark.parametrize(("way", "plan", "match"), MIXED, ids=[way for way, *_ in MIXED])
def test_parts_of_a_gradient_are_not_taken_for_all_of_it(way: str, plan, match: str) -> None:
    """Outputs are right, and gradients would not be."""
    base = nn.Sequential(nn.Linear(8, 8), Stack(way))

    def body(rank):
        model = tz.parallelize(copy.deepcopy(base), tz.mesh(tp=2, device="cpu"), tensor=plan, sequence=False)
        with torch.no_grad():
            output = model(*ACTIVATIONS)
        with pytest.raises(tz.Misuse, match=match):
            model(*ACTIVATIONS)
        return output

    for output in run_in_threads(2, body):
        torch.testing.assert_close(output, base(*ACTIVATIONS))


def test_pairs_of_matrices_may_stand_beside_each_other_in_one_module() -> None:
    base = seeded(lambda: nn.Sequential(nn.Linear(8, 8), Stack("beside")))
    check(base, ACTIVATIONS, lambda model, x: model(x).square().mean(), 2, tensor=STACK, sequence=False)


def test_a_tied_parameter_is_cut_one_way() -> None:
    net = Net()
    net.head.weight = net.table.weight
    refused(net, "'table.weight' and 'head.weight' are one parameter", tensor={"table": "embedding_rowwise"})


class Twice(nn.Module):
    """Has one module, and one inside of it, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Fused()
        self.other = self.inner
        self.both = self.inner.both

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.inner.down(F.silu(gate) * up) + self.other(x)


def test_a_module_under_two_names_is_cut_once() -> None:
    plan = {"0.inner.both": Colwise(parts=(12, 12)), "0.inner.down": "rowwise"}
    base = seeded(lambda: nn.Sequential(Twice()))
    check(base, ACTIVATIONS, lambda model, x: model(x).square().mean(), 2, tensor=plan, sequence=False)


def test_a_norm_under_two_names_has_one_kind_of_gradient() -> None:
    net = Net()
    net.last = net.layers[1].norm
    refused(net, "'layers.1.norm.weight' and 'last.weight' are one parameter", tensor=PLAN)


def test_whether_sequences_are_split_is_a_bool() -> None:
    refused(Net(), "sequence is 'no'; give True or False", tensor=PLAN, sequence="no")


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    refused(Decoder(CONFIG), "4 heads in 16 outputs, which tp 3 does not divide", tp=3)


def test_a_model_is_cut_once() -> None:
    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        model = tz.parallelize(Decoder(CONFIG), mesh)
        with pytest.raises(tz.Misuse, match="cut or sharded already"):
            tz.parallelize(model, mesh)

    run_in_threads(2, body)


def test_shard_wants_the_mesh_that_the_model_was_cut_for() -> None:
    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        with pytest.raises(tz.BadInput, match=r"does not know .*Call tz.parallelize"):
            tz.shard(Decoder(CONFIG), None, mesh=mesh)
        model = tz.parallelize(Decoder(CONFIG), mesh)
        with pytest.raises(tz.BadInput, match=r"Pass tz.shard the mesh that tz.parallelize was given"):
            tz.shard(model, None, mesh=tz.mesh(device="cpu"))

    run_in_threads(2, body)


def test_lengths_that_do_not_divide_train_with_whole_sequences_alone_and_run_without_gradients() -> None:
    base = seeded(lambda: Decoder(CONFIG))
    odd = TOKENS[0][:, :5]

    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh)
        model, _ = tz.shard(model, None, "zero3", mesh=mesh)
        with torch.no_grad():
            logits = model(odd)
        with pytest.raises(tz.BadInput, match="Sequences of 5 positions do not divide over tp 2"):
            model(odd)
        return logits

    for logits in run_in_threads(2, body):
        assert torch.allclose(logits, base(odd), atol=1e-6)


def test_a_loss_of_parts_of_the_vocabulary_is_that_of_the_whole() -> None:
    base, batch = seeded(Net), TOKENS[0]
    targets = batch.masked_fill(batch == 5, -100)

    def body(rank):
        mesh = tz.mesh(tp=3, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh, tensor={**NO_SEQUENCE, "head": "colwise"})
        loss_of = VocabularyLoss(mesh, 13)
        model, _ = tz.shard(model, None, "zero3", mesh=mesh)
        loss = loss_of(model(batch), targets)
        loss.backward()
        with pytest.raises(tz.BadInput, match=r"logits of width 13.*style 'colwise'"):
            loss_of(torch.zeros(2, 8, 13), targets)
        logits = model(batch).detach().requires_grad_()
        with pytest.raises(tz.Misuse, match=r"create_graph=True.*without tp"):  # a penalty would have no gradient
            torch.autograd.grad(loss_of(logits, targets), logits, create_graph=True)
        with pytest.raises(tz.BadInput, match="reduction 'mean'; it has 'sum' and 'none'"):
            loss_of(model(batch).detach(), targets, "mean")
        for none in (-1, 13, 2**40):
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                loss_of(model(batch).detach(), targets.index_fill(0, torch.tensor(1), none))
        return loss.item(), whole_of(model, lambda bucket: bucket.gradient.finished.read())

    loss = F.cross_entropy(base(batch).flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in base.named_parameters()}
    for own, parts in run_in_threads(3, body):
        assert own == pytest.approx(loss.item(), rel=1e-6)
        for name, (box, start, part) in parts.items():
            theirs = box.of(wanted[name]).flatten()[start : start + part.numel()]
            assert (part - theirs).abs().max() <= 2e-6 * wanted[name].abs().max(), name


@pytest.mark.parametrize("token", [-1, 13, 2**40])
def test_a_token_outside_of_the_vocabulary_is_refused_on_every_rank(token: int) -> None:
    """The others have no row for it either: it would be looked up as zeros."""
    base = seeded(Net)
    wrong = TOKENS[0].index_fill(1, torch.tensor(2), token)

    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        model, _ = tz.shard(tz.parallelize(copy.deepcopy(base), mesh, tensor=PLAN), None, "zero3", mesh=mesh)
        with pytest.raises(IndexError):
            model(wrong)
        assert model.table.padding_idx == 3
        return model(TOKENS[0])

    for found in run_in_threads(2, body):
        assert torch.allclose(found, base(TOKENS[0]), atol=1e-6)


class Named(nn.Embedding):
    """Called by name, as some models do."""

    def __call__(self, tokens: Tensor) -> Tensor:
        return super().__call__(input=tokens)


def test_a_table_may_be_called_by_name() -> None:
    base = seeded(Net)
    base.table.__class__ = Named
    check(base, TOKENS[:1], lm_loss, 2, tensor={"table": "embedding_rowwise"})

    def nothing(rank: int) -> None:
        model = tz.parallelize(copy.deepcopy(base), tz.mesh(tp=2, device="cpu"), tensor={"table": "embedding_rowwise"})
        with pytest.raises(tz.Misuse, match="without a tensor of indices"):
            model.table(None)

    run_in_threads(2, nothing)


class Mixing(nn.Module):
    """A block that mixes tokens beside attention, with a plan that takes it for one that does not."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(8, 12), nn.Linear(12, 8), mixes

    def forward(self, x: Tensor) -> Tensor:
        x = x + (x.mean(1, keepdim=True) if self.mixes else 0)
        return x + self.down(F.relu(self.up(x)))


class Choosing(nn.Module):
    """The number of the largest channel, beside a number that is far larger."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.argmax(-1).flatten(), torch.tensor([31_999])])


MIXING = {"0": "sequence", "0.up": "colwise", "0.down": "rowwise"}


def test_numbers_of_tokens_are_compared_exactly() -> None:
    wrong = seeded(lambda: nn.Sequential(Mixing(True), Choosing()))

    def body(rank: int) -> None:
        mesh = tz.mesh(tp=2, device="cpu")
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), pytest.raises(tz.BadInput, match="returns other values as output 0"):
            tz.parallel.check(wrong, mesh, [x], tensor=MIXING)
        tz.parallel.check(wrong, mesh, [x], tensor=MIXING, sequence=False)

    run_in_threads(2, body)


def test_a_plan_is_not_checked_without_tp() -> None:
    def body(rank: int) -> None:
        with pytest.raises(tz.BadInput, match=r"the mesh has the axes dp_shard: make it with tz.mesh\(tp=2\)"):
            tz.parallel.check(nn.Linear(2, 2), tz.mesh(device="cpu"), [torch.ones(1, 2)])

    run_in_threads(1, body)


@pytest.mark.parametrize("other", ["cp", "pp", "ep"])
def test_a_plan_is_checked_along_tp_alone(other: str) -> None:
    """Whatever else the mesh has, of which the check is told nothing."""
    block = seeded(lambda: nn.Sequential(Mixing(False)))

    def body(rank: int) -> None:
        mesh = tz.mesh(tp=2, **{other: 2}, device="cpu")
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(rank // 2))
        tz.parallel.check(block, mesh, [x], tensor=MIXING)
        with pytest.raises(tz.RanksApart, match="was given other inputs on ranks along tp"):
            tz.parallel.check(block, mesh, [x + rank], tensor=MIXING)

    run_in_threads(4, body)


def test_a_plan_is_checked_by_what_the_model_returns() -> None:
    blocks = [seeded(lambda mixes=mixes: nn.Sequential(Mixing(mixes))) for mixes in (False, True)]
    base = seeded(Net)

    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
        for mixes in (False, True):
            model = copy.deepcopy(blocks[mixes])
            before = copy.deepcopy(model.state_dict())
            if mixes:
                with pytest.raises(tz.BadInput, match="returns other values as output 0"):
                    tz.parallel.check(model, mesh, [x], tensor=MIXING)
                tz.parallel.check(model, mesh, [x], tensor=MIXING, sequence=False)
            else:
                tz.parallel.check(model, mesh, {"input": x}, tensor=MIXING)
            with pytest.raises(tz.BadInput, match="the model raises RuntimeError: The size of tensor a"):
                tz.parallel.check(model, mesh, [x], tensor={"0.down": "colwise"})
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        tz.parallel.check(base, mesh, [TOKENS[0]], tensor={**PLAN, "head": "colwise"})
        with pytest.raises(tz.BadInput, match="meta device"):
            tz.parallel.check(nn.Linear(8, 8, device="meta"), mesh, [x])
        with pytest.raises(tz.RanksApart, match="was given other inputs on ranks along tp"):
            tz.parallel.check(blocks[0], mesh, [x + rank], tensor=MIXING)

    run_in_threads(2, body)


@dataclass
class Wrapped:
    values: Any


class Wrapping(nn.Module):
    """Takes and returns what is in an object; it may divide by how many channels a part of the plan has."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.up, self.down, self.divides = nn.Linear(8, 12), nn.Linear(12, 8), divides

    def forward(self, x: Any) -> Any:
        inner = self.up(x.values)
        return type(x)(values=self.down(inner / inner.shape[-1] if self.divides else inner))


class Opaque:
    def __init__(self, values: Tensor) -> None:
        self.values = values


def test_tensors_in_dataclasses_and_namespaces_are_compared() -> None:
    whole, divided = (seeded(lambda divides=divides: nn.Sequential(Wrapping(divides))) for divides in (False, True))
    plan = {"0.up": "colwise", "0.down": "rowwise"}

    def body(rank: int) -> None:
        mesh = tz.mesh(tp=2, device="cpu")
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
        for wrap in (Wrapped, SimpleNamespace):
            tz.parallel.check(whole, mesh, [wrap(values=x)], tensor=plan)
            with pytest.raises(tz.RanksApart, match=r"other inputs .*\(here float32 \[2, 6, 8\]\)"):
                tz.parallel.check(whole, mesh, [wrap(values=x + rank)], tensor=plan)
            with torch.no_grad(), pytest.raises(tz.BadInput, match="returns other values as output 0"):
                tz.parallel.check(divided, mesh, [wrap(values=x)], tensor=plan)
        with pytest.raises(tz.BadInput, match="nothing to compare: the model returns Opaque"):
            tz.parallel.check(whole, mesh, [Opaque(x)], tensor=plan)

    run_in_threads(2, body)


class Splitting(nn.Module):
    """Returns one more tensor than a matrix between has sixes of columns here."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = self.up(x)
        return self.down(wide), *[x] * (wide.shape[-1] // 6)


def test_a_plan_under_which_the_model_returns_another_number_of_outputs() -> None:
    base = nn.Sequential(Splitting())

    def body(rank: int) -> None:
        mesh, plan = tz.mesh(tp=2, device="cpu"), {"0.up": "colwise", "0.down": "rowwise"}
        with pytest.raises(tz.BadInput, match="the model returns 2 outputs, and whole 3"):
            tz.parallel.check(base, mesh, ACTIVATIONS, tensor=plan, sequence=False)

    run_in_threads(2, body)


class Scaled(nn.Module):
    """With parameters between two matrices: a child's, and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 12), nn.PReLU(init=0.3), nn.Linear(12, 8)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) * self.gate)


class Flat(nn.Module):
    """With a norm before two matrices, and a residual around them, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


SCALED = {"1.up": "colwise", "1.down": "rowwise"}
FLAT = {"1.up": "colwise", "1.down": "rowwise", "1.norm": "replicate"}


@pytest.mark.parametrize(("module", "plan"), [(Scaled, {**SCALED, "1": "enter"}), (Flat, FLAT)])
def test_parameters_beside_matrices_have_the_gradients_of_one_process(module, plan) -> None:
    base = seeded(lambda: nn.Sequential(nn.Linear(8, 8), module()))
    check(base, ACTIVATIONS, lambda model, x: model(x).square().mean(), 2, tensor=plan, sequence=False)


@pytest.mark.parametrize(
    ("module", "plan", "match"),
    [
        (Scaled, SCALED, "a 'rowwise' in '1', outside of a module of style 'enter', and does not say where 1, 1.act"),
        (Flat, {"1.up": "colwise", "1.down": "rowwise"}, "does not say where 1.norm computes.*style 'replicate'"),
    ],
)
def test_a_parameter_that_may_be_between_matrices_is_refused(module, plan, match: str) -> None:
    refused(nn.Sequential(nn.Linear(8, 8), module()), match, tensor=plan, sequence=False)


@pytest.mark.parametrize(
    ("module", "plan", "match"),
    [
        (Scaled, {**SCALED, "1": "replicate", "1.act": "replicate"}, "another gradient of '1.gate'"),
        (Scaled, {**SCALED, "1": "enter"}, None),
        (Flat, FLAT, None),
    ],
)
def test_a_plan_is_checked_by_gradients(module, plan, match: str | None) -> None:
    base = seeded(lambda: nn.Sequential(nn.Linear(8, 8), module()))

    def body(rank):
        mesh = tz.mesh(tp=2, device="cpu")
        with pytest.raises(tz.BadInput, match=match) if match else contextlib.nullcontext():
            tz.parallel.check(base, mesh, ACTIVATIONS, tensor=plan, sequence=False)

    run_in_threads(2, body)
