"""Linear layers with 8-bit products, against plain PyTorch that casts, multiplies and scales by itself."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, engine_of
from terrazzo.errors import BadInput, Misuse
from terrazzo.nn.float8_linear import Float8Linear
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensorwise", "rowwise")


class Block(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(x)))
        return out


class Model(nn.Module):
    """Two blocks, and a layer on either side of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def made(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(rank)).to(dtype)


# -- the oracle ----------------------------------------------------------------------------------------------------


def rounded(matrix: Tensor, dtype: torch.dtype, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Codes `[rows, inner]`, and what each is multiplied by: one number, or one for each row."""
    most = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    largest = matrix.abs().float().max(dim=1, keepdim=True).values if by_rows else matrix.abs().float().max()
    times = (most / largest.double().clamp(min=1e-12)).float()
    if by_rows:
        mantissa, exponent = torch.frexp(times)
        times = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    return (matrix.float() * times).clamp(-most, most).to(dtype), 1 / times


def product(left: Tensor, right: Tensor, formats: tuple[torch.dtype, torch.dtype], by_rows: bool) -> Tensor:
    """`left @ right.T` by torch's own kernel."""
    (a, of_a), (b, of_b) = rounded(left, formats[0], by_rows), rounded(right, formats[1], by_rows)
    return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b.t(), out_dtype=left.dtype)


def expected(recipe: str, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Outputs, and gradients of the inputs `[rows, inputs]` and the weight `[outputs, inputs]`."""
    rows, of_grad = recipe == "rowwise", E4M3 if recipe == "rowwise" else E5M2
    return [
        product(x, weight, (E4M3, E4M3), rows),
        product(grad, weight.t().contiguous(), (of_grad, E4M3), rows),
        product(grad.t().contiguous(), x.t().contiguous(), (of_grad, E4M3), rows),
    ]


def alike(left: Tensor, right: Tensor) -> bool:
    """Up to the order of sums, in which processors with matrix units differ; 8 bits differ by 1 in 30."""
    return bool((left - right).abs().max() <= 4 * torch.finfo(left.dtype).eps * right.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_torch_scaled_mm(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleList([nn.Linear(48, 32, dtype=dtype)])
    tz.nn.float8(layer, recipe, skip=[])
    x, grad = torch.randn(2, 24, 48, dtype=dtype, requires_grad=True), torch.randn(2, 24, 32, dtype=dtype) * 1e-4
    output = layer[0](x)
    output.backward(grad)
    found = expected(recipe, x.detach().flatten(0, 1), layer[0].weight.detach(), grad.flatten(0, 1))
    assert alike(output.flatten(0, 1), found[0] + layer[0].bias)
    assert alike(x.grad.flatten(0, 1), found[1])
    assert alike(layer[0].weight.grad, found[2])
    assert torch.equal(layer[0].bias.grad, grad.sum((0, 1)))
    exact = F.linear(x, layer[0].weight, layer[0].bias)
    assert 0.01 < ((output - exact).norm() / exact.norm()).item() < 0.06  # of 8 bits, not of 16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_of_zeros_and_no_rows_are_no_nan(recipe: str) -> None:
    layer = nn.ModuleList([nn.Linear(16, 16, bias=False)])
    tz.nn.float8(layer, recipe, skip=[])
    zeros = torch.zeros(4, 16, requires_grad=True)
    layer[0](zeros).sum().backward()
    assert torch.equal(layer[0].weight.grad, torch.zeros(16, 16)) and torch.isfinite(zeros.grad).all()
    nothing = torch.zeros(0, 16, requires_grad=True)
    layer[0](nothing).sum().backward()
    assert nothing.grad.shape == (0, 16)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_overflow_is_seen(recipe: str, bad: float) -> None:
    """A loss scaler, or a guard, has to notice: saturation must not make a number of it."""
    layer = nn.ModuleList([nn.Linear(16, 16, bias=False)])
    tz.nn.float8(layer, recipe, skip=[])
    x = torch.ones(2, 16)
    x[1, 3] = bad
    assert layer[0](x)[1].isnan().all()


def test_under_autocast_it_computes_in_the_dtype_of_autocast() -> None:
    layer, plain = nn.ModuleList([nn.Linear(16, 16)]), nn.ModuleList([nn.Linear(16, 16)])
    plain.load_state_dict(layer.state_dict())
    plain.to(torch.bfloat16)
    for each in (layer, plain):
        tz.nn.float8(each, skip=[])
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer[0](x)
        found.float().sum().backward()
    wanted = plain[0](x.bfloat16())
    wanted.float().sum().backward()
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
    assert layer[0].weight.grad.dtype == torch.float32
    assert torch.equal(layer[0].weight.grad.bfloat16(), plain[0].weight.grad)


def test_autocast_leaves_fp64_alone_as_it_does_in_torch() -> None:
    layer = nn.ModuleList([nn.Linear(16, 16, dtype=torch.float64)])
    tz.nn.float8(layer, skip=[])
    x = torch.randn(4, 16, dtype=torch.float64)
    wanted = layer[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer[0](x)
    assert found.dtype == torch.float64 and torch.equal(found, wanted)


# -- which layers --------------------------------------------------------------------------------------------------


def test_layers_outside_of_the_blocks_are_left_alone_and_said() -> None:
    model = made()
    before = dict(model.named_parameters())
    found = tz.nn.float8(model)
    assert found.names == tuple(f"blocks.{n}.{each}" for n in range(2) for each in ("up", "down"))
    assert found.kept == {"first": "outside of the blocks", "head": "outside of the blocks"}
    assert "float8 tensorwise in 4 linear layers" in str(found) and "head: outside" in str(found)
    assert all(each is before[name] for name, each in model.named_parameters())
    assert isinstance(model.blocks[0].up, nn.Linear) and type(model.blocks[0].up).__name__ == "Linear"
    assert "float8=tensorwise" in repr(model.blocks[0]) and "float8" not in repr(model.head)


def test_without_blocks_the_first_and_the_last_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    assert tz.nn.float8(model).names == ("2",)


def test_what_cannot_be_converted_is_left_alone_and_says_why() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    block = nn.Module()
    block.odd, block.gate, block.own = nn.Linear(24, 16), nn.Linear(16, 16), Doubled(16, 16)
    block.attention, block.experts, block.mlp = nn.MultiheadAttention(16, 2), nn.ModuleList(), nn.Module()
    block.mlp.gate, block.wrapped = nn.Linear(16, 32), nn.Linear(16, 16)
    block.chooser = type("TopRouter", (nn.Linear,), {})(16, 16)
    block.wrapped.forward = torch.zeros_like  # type: ignore[method-assign]
    found = tz.nn.float8(nn.ModuleList([block]))
    assert found.names == ("0.mlp.gate",)
    assert found.kept == {
        "0.odd": "a size is no multiple of 16",
        "0.gate": "chooses experts",
        "0.chooser": "chooses experts",
        "0.own": "another forward",
        "0.wrapped": "another forward",
        "0.attention.out_proj": "nn.MultiheadAttention does not call it",
    }


def test_globs_replace_the_choice() -> None:
    found = tz.nn.float8(made(), skip=["blocks.0.*"])
    assert found.names == ("first", "head", "blocks.1.up", "blocks.1.down")
    assert set(found.kept.values()) == {"skipped"}


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda model: tz.nn.float8(model, "rowise"), "rowwise"),
        (lambda model: tz.nn.float8(model, ["tensorwise"]), "Recipes are tensorwise, rowwise"),
        (lambda model: tz.nn.float8(model, skip=["layers.*"]), "layers"),
        (lambda model: tz.nn.float8(model, skip=["*"]), "no linear layer"),
        (lambda model: tz.nn.float8(model, skip="head"), r"skip is 'head': give a list of globs, \['head'\]"),
        (lambda model: (tz.nn.float8(model), tz.nn.float8(model)), "already"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, word: str) -> None:
    model = made()
    with pytest.raises(BadInput, match=word):
        call(model)


def test_a_device_without_the_matrix_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on compute capability >= 9.0 or 8.9")

    monkeypatch.setattr("terrazzo.nn.float8_conversion.check_multiplies", fail)
    model = made()
    with pytest.raises(BadInput, match=r"cpu does not multiply.*use bf16"):
        tz.nn.float8(model)
    assert "float8" not in repr(model)
    assert tz.nn.float8(model.to("meta")).names


# -- beside the rest -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at what it is given
@pytest.mark.parametrize("recipe", mostly_long(RECIPES, "tensorwise"))
def test_one_graph_without_breaks_has_the_same_bits(recipe: str) -> None:
    found = []
    for compiled in (False, True):
        model = made(torch.bfloat16)
        tz.nn.float8(model, recipe)
        for block in model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        model(batch(dtype=torch.bfloat16)).float().square().sum().backward()
        found.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_has_the_same_bits(recipe: str) -> None:
    found = []
    for mode in ("none", "full", "selective"):
        model = made(torch.bfloat16)
        tz.nn.float8(model, recipe)
        checkpoint_activations(model, mode, units=[Block])
        model(batch(dtype=torch.bfloat16)).float().square().sum().backward()
        found.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def note(total: list[Tensor], each: Tensor) -> Tensor:
    total.append(each)
    return each


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_for_backward_is_what_torch_keeps(recipe: str) -> None:
    kept = []
    for convert in (False, True):
        model = made()
        if convert:
            tz.nn.float8(model, recipe)
        total: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(note, total), lambda each: each):
            model(batch())
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in total}
        kept.append(sum(size for size in storages.values() if size > 4))
    assert kept[0] == kept[1]


def plain_steps(recipe: str, steps: int, ranks: int) -> list[Tensor]:
    """One process over all ranks' batches, its gradients summed in rank order."""
    model = made()
    tz.nn.float8(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        grads = []
        for rank in range(ranks):
            model.zero_grad()
            model(batch(10 * step + rank)).square().mean().backward()
            grads.append([each.grad for each in model.parameters()])
        for number, each in enumerate(model.parameters()):
            each.grad = functools.reduce(torch.add, [grad[number] for grad in grads]) / ranks
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize(("plan", "recipe"), [("zero0", "tensorwise"), ("zero3", "tensorwise"), ("zero3", "rowwise")])
def test_a_split_weight_is_scaled_as_the_whole_one(plan: str, recipe: str) -> None:
    def train(rank: int) -> list[Tensor]:
        model = made()
        tz.nn.float8(model, recipe)
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        model, optimizer = tz.shard(model, lambda each: sgd(each), plan, units=[Block])
        for step in range(2):
            model(batch(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).settle()
        with tz.gathered(model) as whole:
            return [each.detach().clone() for each in whole.values()]

    wanted = plain_steps(recipe, 2, 2)
    for rank in run_in_threads(2, train):
        assert all(map(torch.equal, rank, wanted))


PLAN = {"blocks.*": "enter", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def outlying() -> Model:
    """A value far larger than the others lies in one rank's part alone, of either matrix."""
    model = made()
    with torch.no_grad():
        model.blocks[0].up.weight[0, 0] = 50.0
        model.blocks[0].down.weight[3, 60] = 50.0
    return model


def own(values: Tensor, rank: int) -> Tensor:
    """`values` with zeros where the other rank's half of the last dim is."""
    kept = torch.zeros_like(values)
    part = slice(32 * rank, 32 * (rank + 1))
    kept[..., part] = values[..., part]
    return kept


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_matrix_that_is_cut_is_scaled_as_the_whole_one(recipe: str) -> None:
    inner, grad = torch.randn(15, 32), torch.randn(15, 64)

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model, mesh = outlying(), tz.mesh(tp=2, device="cpu")
        tz.nn.float8(model, recipe)
        tz.parallelize(model, mesh, tensor=PLAN, sequence=False)
        part, block, x = slice(32 * rank, 32 * (rank + 1)), model.blocks[0], inner.clone().requires_grad_()
        output = block.up(x)
        output.backward(grad[:, part])
        return output.detach(), x.grad, block.down(grad[:, part]).detach()

    ranks, block = run_in_threads(2, run), outlying().blocks[0]
    weight, down = block.up.weight.detach(), block.down.weight.detach()
    for rank, (output, of_inner, _) in enumerate(ranks):
        wanted = expected(recipe, inner, weight, own(grad, rank))
        assert alike(output, (wanted[0] + block.up.bias)[:, 32 * rank : 32 * (rank + 1)])
        if recipe == "tensorwise":
            torch.testing.assert_close(of_inner, wanted[1])
    if recipe == "tensorwise":
        parts = [product(own(grad, rank), down, (E4M3, E4M3), by_rows=False) for rank in range(2)]
        for _, _, output in ranks:
            torch.testing.assert_close(output, parts[0] + parts[1] + block.down.bias)


def test_a_part_that_does_not_fit_is_refused() -> None:
    def cut(rank: int) -> str:
        block = nn.Module()
        block.up = nn.Linear(16, 48)
        model = nn.ModuleList([block])
        tz.nn.float8(model)
        with pytest.raises(BadInput) as error:
            tz.parallelize(model, tz.mesh(tp=2, device="cpu"), tensor={"0.up": "colwise"}, sequence=False)
        return str(error.value)

    assert all("24 x 16" in each for each in run_in_threads(2, cut))


def test_a_model_that_is_cut_already_is_refused() -> None:
    def cut(rank: int) -> None:
        model = made()
        tz.parallelize(model, tz.mesh(tp=2, device="cpu"), tensor=PLAN, sequence=False)
        with pytest.raises(BadInput, match="before"):
            tz.nn.float8(model)

    run_in_threads(2, cut)


def test_a_model_that_is_sharded_already_is_refused() -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(made(), None, "zero1")
        with pytest.raises(BadInput, match=r"sharded already: call tz\.nn\.float8 before tz\.shard"):
            tz.nn.float8(model)

    run_in_threads(1, body)


def test_a_copy_multiplies_alike() -> None:
    model = made()
    tz.nn.float8(model)
    again = copy.deepcopy(model)
    assert torch.equal(again(batch()), model(batch()))
    assert type(again.blocks[0].up).forward is Float8Linear.forward


def test_a_saved_module_multiplies_alike_when_it_is_loaded() -> None:
    model, file = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), io.BytesIO()
    tz.nn.float8(model)
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.randn(4, 16)
    assert type(again[1]) is type(model[1]) and torch.equal(again(x), model(x))
    assert "float8=tensorwise" in repr(again) and "float8" not in repr(again[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_with_a_graph_is_refused(recipe: str) -> None:
    """Of a sum of outputs, too, where torch's own check would see no gradient of a gradient, and keep no graph."""
    layer = nn.ModuleList([nn.Linear(16, 16)])
    tz.nn.float8(layer, recipe, skip=[])
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(Misuse, match=r"create_graph=True.*bf16"):
        torch.autograd.grad(layer[0](x).sum(), x, create_graph=True)
    (slope,) = torch.autograd.grad(layer[0](x).sum(), x)
    assert slope.shape == x.shape


def test_layers_that_torch_evaluates_without_calling_them_are_left_alone() -> None:
    """In evaluation a `TransformerEncoderLayer` computes all in one kernel, which reads plain weights."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), Block(), Block())
    plain = copy.deepcopy(model)
    found, x = tz.nn.float8(model), torch.randn(2, 8, 32)
    assert found.names == ("1.up", "1.down", "2.up", "2.down")
    assert found.kept["0.layers.1.linear2"] == "nn.TransformerEncoderLayer does not call it in evaluation"
    for training in (True, False):
        model.train(training), plain.train(training)
        assert torch.equal(model[0](x), plain[0](x))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_of_a_gpu_compute_what_a_cpu_emulates(recipe: str) -> None:
    """Also of a number of rows that is no multiple of 16; sums there are of fewer bits, in another order."""
    torch.manual_seed(0)
    layer = nn.ModuleList([nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)])
    tz.nn.float8(layer, recipe, skip=[])
    found = []
    for device in ("cpu", "cuda"):
        each = copy.deepcopy(layer).to(device)
        x = torch.randn(5, 7, 256, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
        x.requires_grad_()
        output = each[0](x)
        output.float().square().sum().backward()
        found.append([output.cpu(), x.grad.cpu(), each[0].weight.grad.cpu()])
    for emulated, kernel in zip(*found, strict=True):
        assert ((emulated - kernel).norm() / emulated.norm()).item() < 1e-2
