"""What computes with channels between a `colwise` and a `rowwise`: right as on one process, or refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.parallel import Colwise
from tests.helpers.threads import run_in_threads

B, T, WIDTH, HEAD = 2, 6, 16, 4


class Between(nn.Module):
    """`between` computes with the outputs of `up`, and `down` with what it returns."""

    def __init__(self, between, width: int = WIDTH, channels: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.between = nn.Linear(8, channels), between
        self.down = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def inputs() -> Tensor:
    return torch.randn(B, T, 8, generator=torch.Generator().manual_seed(5))


def run(between, width: int, column, grad: bool = True, channels: int = WIDTH, ranks: int = 2):
    """Each rank's output and gradient of its rows of `up`."""
    base = Between(between, width, channels)

    def body(rank: int):
        plan = {"up": column, "down": "rowwise"}
        model = tz.parallelize(copy.deepcopy(base), tz.mesh(tp=ranks, device="cpu"), tensor=plan)
        with torch.set_grad_enabled(grad):
            output = model(inputs())
        if grad:
            output.square().sum().backward()
        return output.detach(), model.up.weight.grad

    return base, run_in_threads(ranks, body)


def heads(x: Tensor) -> Tensor:
    return x.view(B, T, -1, HEAD).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(B, T, -1)


def attention(x: Tensor) -> Tensor:
    q, mask = heads(x), torch.ones(T, T).triu(1).bool()
    scores = (q @ q.transpose(-1, -2) / math.sqrt(HEAD)).masked_fill(mask, float("-inf"))
    return joined(scores.triu().softmax(-1) @ q)


def flattened(x: Tensor) -> Tensor:
    q = heads(x).reshape(-1, T, HEAD)
    out = torch.bmm(torch.bmm(q, q.transpose(1, 2)).softmax(-1), q)
    return joined(out.view(B, -1, T, HEAD))


def products(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (-1, HEAD))
    scores = torch.einsum("bthd,bshd->bhts", q, q).softmax(dim=-1)
    return torch.einsum("...hts,...shd->...thd", scores, q).flatten(-2)


def rotated(x: Tensor) -> Tensor:
    q = x.view(*x.shape[:-1], -1, HEAD)
    one, other = q.chunk(2, dim=-1)
    angles = torch.arange(T * HEAD, dtype=torch.float32).view(T, 1, HEAD)
    return (q * angles.cos() + torch.cat([-other, one], -1) * angles.sin()).reshape(B, T, -1)


def grouped(x: Tensor) -> Tensor:
    k = heads(x)
    more = k[:, :, None].expand(B, k.shape[1], 2, T, HEAD).reshape(B, -1, T, HEAD)
    same = k.repeat_interleave(2, dim=1)
    return joined(F.scaled_dot_product_attention(more, same, more, is_causal=True))


def logged(x: Tensor) -> Tensor:
    assert x.detach().abs().max().item() > 0
    return x.relu()


def stacked(x: Tensor) -> Tensor:
    pairs = torch.stack([x.sin(), x.cos()], dim=1)
    one, other = pairs.unbind(1)
    return one * other + pairs[:, 0] + pairs.select(1, 1) + pairs.sum(1) + pairs.movedim(1, 0)[1]


def rotated_by_complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(B, T, -1, HEAD // 2, 2).float())
    angles = torch.polar(torch.ones(T, 1, HEAD // 2), torch.arange(T * HEAD / 2).view(T, 1, HEAD // 2))
    return torch.view_as_real(pairs * angles).flatten(2).type_as(x)


def scanned(x: Tensor) -> Tensor:
    out, state = torch.zeros(B, T, x.shape[-1]), torch.zeros_like(x[:, 0])
    for t in range(T):
        state = 0.5 * state + x[:, t]
        out[:, t] = state
    return out


def negatives_dropped(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < 0] = 0
    x[:, :2] = x[:, [3, 2]] + x[[[1], [0]], torch.tensor([0, 1])]
    return x


def each_sample(x: Tensor) -> Tensor:
    return torch.stack([one.softmax(0) for one in x]) + F.hardswish(x) - torch.rsub(x, 2 * x) + F.softsign(x)


RIGHT = {
    "rotated-complex": rotated_by_complex,
    "scanned": scanned,
    "written": negatives_dropped,
    "each-sample": each_sample,
    "windows": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1) + torch.fft.fft(x, dim=1).real,
    "depthwise": lambda x: F.conv1d(x.mT, torch.ones(x.shape[-1], 1, 3), padding=1, groups=x.shape[-1]).mT,
    "data": lambda x: x * x.data.sigmoid(),
    "ravelled": lambda x: x[:1, :1].ravel() * x,
    "gated": lambda x: F.silu(x) * x.tanh(),
    "dropped": lambda x: F.dropout(F.gelu(x), 0.0),
    "norm-of-heads": lambda x: F.rms_norm(x.view(B, T, -1, HEAD), (HEAD,)).flatten(2),
    "normal-heads": lambda x: joined(F.normalize(heads(x), dim=-1) - heads(x).mean(-1, keepdim=True)),
    "attention": attention,
    "flattened": flattened,
    "products": products,
    "rotated": rotated,
    "stacked": stacked,
    "logged": logged,
    "tokens": lambda x: x.softmax(1) - x.mean(1, keepdim=True) + x.roll(1, 1) + x.flip(1) + x.cumsum(dim=1),
    "shifted": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)) + torch.where(x > 0, x, 0.1 * x),
    "convolved": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).permute(0, 2, 1) + x.squeeze(-1) + x[:, :, None].squeeze(2),
    "one-token": lambda x: x - x[:, -1:] + x.amax(1, keepdim=True).detach(),
    "flat-before": lambda x: (heads(x).flatten(0, 1) ** 2).unflatten(0, (B, -1)).transpose(1, 2).flatten(2, -1),
    "flat-tokens": lambda x: (x.flatten(0, 1).T.softmax(1) + x.flatten(end_dim=-2).mT).T.unflatten(0, (B, T)),
    "flat-inside": lambda x: x.view(B, T, -1, 2, 2).flatten(2, 3).softmax(-1).flatten(-2),
    "flat-behind": lambda x: x.mT.view(B, -1, 2, 3).flatten(2).softmax(-1).mT + x.mT.unflatten(2, (2, 3)).flatten(2).mT,
    "keywords": lambda x: torch.reshape(shape=(B, T, -1), input=x) - torch.mean(dim=1, keepdim=True, input=x),
    "product-by-keywords": lambda x: (
        torch.bmm(mat2=x, input=torch.ones(B, T, T)) + torch.permute(dims=(0, 1, 2), input=x)
    ),
    "rows": lambda x: x.view(-1, x.shape[-1]).clamp(-1, 1).view(B, T, -1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_channels_apart_is_as_in_one_process(name: str) -> None:
    check(RIGHT[name], WIDTH, "colwise")


def check(between, width: int, column, channels: int = WIDTH, ranks: int = 2) -> None:
    base, found = run(between, width, column, True, channels, ranks)
    wanted = base(inputs())
    wanted.square().sum().backward()
    parts = base.up.weight.grad.view(*column_parts(column), -1, 8)
    for rank, (output, gradient) in enumerate(found):
        torch.testing.assert_close(output, wanted.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, parts.chunk(ranks, -2)[rank].reshape(-1, 8), rtol=1e-4, atol=1e-5)


def column_parts(column):
    return (len(column.parts),) if isinstance(column, Colwise) and column.parts else ()


def halves(x: Tensor) -> Tensor:
    gate, up = x.split(x.shape[-1] // 2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("between", "width", "column"),
    [
        (halves, 8, Colwise(parts=(8, 8))),
        (F.glu, 8, Colwise(parts=(8, 8))),
        (lambda x: x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :], 8, Colwise(parts=(8, 8))),
        (lambda x: x.view(B, T, 2, -1).prod(2), 8, Colwise(parts=(8, 8))),
        (lambda x: x[..., ::2] * x[..., 1::2], 8, "colwise"),
        (lambda x: grouped(x), 32, "colwise"),
        (lambda x: joined(x.view(B, T, x.shape[-1] // HEAD, HEAD).transpose(1, 2).sin()), WIDTH, Colwise(heads=4)),
        (lambda x: joined(x.view(B, T, 2, -1, HEAD).sum(2).transpose(1, 2)), 8, Colwise(parts=(8, 8), heads=2)),
    ],
    ids=["split", "glu", "slices", "view", "every-second", "grouped", "heads", "parts-of-heads"],
)
def test_parts_and_heads_that_the_plan_names_are_followed(between, width: int, column) -> None:
    check(between, width, column)


def one_head(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


def with_first_written(x: Tensor) -> Tensor:
    x[..., :4] = 0
    return x


def first_written_of(x: Tensor) -> Tensor:
    out = torch.zeros(B, T, x.shape[-1])
    out[..., 1:] = x[..., :-1]
    return out


def written_behind(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.data = x.detach().softmax(-1)
    return x * y


WRONG = {
    "softmax": (lambda x: x.softmax(-1), WIDTH),
    "flat-before": (lambda x: x.flatten(0, 1).softmax(-1).view(B, T, -1), WIDTH),
    "reshape-by-keywords": (lambda x: torch.reshape(shape=(B, T, -1), input=x).softmax(-1), WIDTH),
    "log_softmax": (lambda x: F.log_softmax(x, dim=2), WIDTH),
    "mean": (lambda x: x - x.mean(-1, keepdim=True), WIDTH),
    "pow-mean": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6), WIDTH),
    "cumsum": (lambda x: x.cumsum(-1), WIDTH),
    "flip": (lambda x: x.flip(-1), WIDTH),
    "flip-two": (lambda x: x.flip(1, 2), WIDTH),
    "roll": (lambda x: x.roll(1, -1), WIDTH),
    "sort": (lambda x: x.sort().values, WIDTH),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), WIDTH),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[2:]), WIDTH),
    "normalize": (lambda x: F.normalize(x, dim=-1), WIDTH),
    "chunk": (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].sigmoid(), 8),
    "slices": (lambda x: x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :], 8),
    "split": (halves, 8),
    "glu": (F.glu, 8),
    "one-head": (one_head, WIDTH),
    "sdpa": (lambda x: F.scaled_dot_product_attention(x, x, x), WIDTH),
    "einsum": (lambda x: torch.einsum("btc,bsc->bts", x, x).softmax(-1) @ x, WIDTH),
    "all-heads": (lambda x: F.normalize(x.view(B, T, 4, -1), dim=-1).flatten(2), WIDTH),
    "over-heads": (lambda x: joined(heads(x).softmax(1)), WIDTH),
    "first-head": (lambda x: joined(heads(x) * heads(x)[:, :1]), WIDTH),
    "two-heads": (lambda x: joined(heads(x) + heads(x)[:, [1]]), WIDTH),
    "fused": (lambda x: x.view(B, T, 2, -1).prod(2), 8),
    "heads-last": (lambda x: heads(x).permute(0, 2, 3, 1).reshape(B, T, -1), WIDTH),
    "twice": (lambda x: torch.cat([x.sin(), x.cos()], -1), 2 * WIDTH),
    "detached": (lambda x: x / (x.detach().abs().amax(-1, keepdim=True) + 1), WIDTH),
    "read-alone": (lambda x: x * x.detach().norm().clamp(min=1.0), WIDTH),
    "maximum": (lambda x: x - x.max(-1, keepdim=True)[0], WIDTH),
    "fft2": (lambda x: torch.fft.fft2(x).real, WIDTH),
    "written": (lambda x: with_first_written(x.clone()), WIDTH),
    "written-of": (lambda x: first_written_of(x), WIDTH),
    "data": (lambda x: x * x.data.softmax(-1), WIDTH),
    "data-written": (lambda x: written_behind(x), WIDTH),
    "complex": (lambda x: x * torch.view_as_complex(x.view(B, T, -1, 2)).abs().repeat(1, 1, 2), WIDTH),
    "unfolded": (lambda x: F.pad(x, (1, 1)).unfold(2, 3, 1).mean(-1), WIDTH),
    "shuffled": (lambda x: F.channel_shuffle(x.mT, 4).mT, WIDTH),
    "convolved": (lambda x: F.conv1d(x.mT, torch.ones(x.shape[-1], x.shape[-1], 3), padding=1).mT, WIDTH),
    "moved-by-pad": (lambda x: F.pad(x, (-1, 1)), WIDTH),
    "padded": (lambda x: F.pad(x, (1, 0))[..., :-1], WIDTH),
    "fft": (lambda x: torch.fft.fft(x).real, WIDTH),
    "topk": (lambda x: x * (x >= x.topk(2).values[..., -1:]), WIDTH),
    "gathered": (lambda x: x.gather(-1, x.argsort(-1)), WIDTH),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("grad", [True, False])
def test_what_mixes_channels_is_refused(name: str, grad: bool) -> None:
    between, width = WRONG[name]
    with torch.no_grad():
        values = Between(between, width).up(inputs())
        side_by_side = torch.cat([between(half) for half in values.chunk(2, -1)], -1)
        assert not torch.allclose(side_by_side, between(values))  # so without an error it would be wrong

    with pytest.raises(tz.Misuse, match=r"'up'.*(colwise_gather_output|give neither a style)"):
        run(between, width, "colwise", grad)


class Handed(nn.Module):
    """Hands what mixes channels on to `out`, or returns it from a block whose sequences are split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, WIDTH), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.up(x)[:, : x.shape[1]].mean(-1, keepdim=True)
        return self.out(mean.expand(-1, -1, 8)) if self.out is not None else x + mean


@pytest.mark.parametrize("out", ["colwise_gather_output", "rowwise_split_input", "sequence"])
def test_what_mixes_channels_is_not_exchanged_without_gradients(out: str) -> None:
    def body(rank: int):
        block = Handed()
        if out == "sequence":
            block.out = None
        plan = {"0.up": "colwise", **({"0": out} if out == "sequence" else {"0.out": out})}
        model = tz.parallelize(nn.Sequential(block), tz.mesh(tp=2, device="cpu"), tensor=plan)
        with torch.no_grad(), pytest.raises(tz.Misuse, match=r"calls mean on what '0.up'"):
            model(inputs())

    run_in_threads(2, body)


def scripted(x: Tensor) -> Tensor:
    return x * torch.jit.script(softmax_last)(x)


def softmax_last(x: Tensor) -> Tensor:
    return x.softmax(-1)


def viewed_before(x: Tensor) -> Tensor:
    out = torch.zeros(B, T, x.shape[-1])
    row = out[:, 0]
    row.copy_(x[:, 0])
    return x * out.softmax(-1)


def read_before(x: Tensor) -> Tensor:
    out = torch.zeros(B, T, x.shape[-1])
    view = out.view(B * T, -1)
    out[:] = x
    return x * view.softmax(-1).view(x.shape)


UNSEEN = {
    "view-written": (viewed_before, "through a view"),
    "view-read": (read_before, "through a view"),
    "data": (lambda x: x * put(torch.zeros_like(x.detach()), x).softmax(-1), r"\.data"),
    "jvp": (lambda x: x * torch.func.jvp(softmax_last, (x.detach(),), (torch.ones_like(x),))[0], "of them"),
    "vmap": (lambda x: x * torch.vmap(softmax_last)(x), "vmap"),
    "script": (scripted, r"torch\.jit\.script"),
}


def put(out: Tensor, x: Tensor) -> Tensor:
    fresh = torch.zeros(out.shape)
    fresh.data.copy_(x.detach())
    return fresh


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", UNSEEN)
def test_channels_that_come_by_a_way_that_is_not_followed_are_refused(name: str) -> None:
    between, words = UNSEEN[name]
    with pytest.raises(tz.Misuse, match=rf"'up'.*{words}"):
        run(between, WIDTH, "colwise")


@pytest.mark.parametrize("column", ["colwise", Colwise(heads=4)])
def test_heads_of_the_whole_take_no_channels_of_other_tokens(column) -> None:
    def between(x: Tensor) -> Tensor:
        return x.view(B, -1, 4, HEAD).softmax(1).view(B, T, -1)

    with pytest.raises(tz.Misuse, match="makes heads of channels"):
        run(between, WIDTH, column)


class Keys(nn.Module):
    """Keys and values of two heads, of which no plan cuts the matrix, for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.key, self.down = nn.Linear(8, WIDTH), nn.Linear(8, 2 * HEAD), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = heads(self.up(x)), heads(self.key(x))
        return self.down(joined(F.scaled_dot_product_attention(q, k, k, enable_gqa=True)))


def test_heads_of_a_rank_are_not_grouped_by_the_key_heads_of_all() -> None:
    def body(rank: int):
        model = tz.parallelize(
            nn.Sequential(Keys()),
            tz.mesh(tp=2, device="cpu"),
            tensor={"0.up": "colwise", "0.down": "rowwise", "0.key": "replicate"},
        )
        with pytest.raises(tz.Misuse, match="groups heads of this rank with those of all ranks"):
            model(inputs())

    run_in_threads(2, body)


def test_a_bias_alone_of_which_ranks_have_parts_is_followed() -> None:
    check(lambda x: F.linear(torch.ones(B, T, 3), torch.ones(x.shape[-1], 3), x.mean((0, 1))) * x, WIDTH, "colwise")


def kernel(x: Tensor, scale: Tensor) -> Tensor:
    """As one of Triton: nothing of torch is called on the way."""
    out = (x.detach().double().numpy() * scale.detach().numpy()).astype("float32")
    return torch.from_numpy(out)


def test_what_is_declared_of_a_function_is_followed() -> None:
    scaled = tz.parallel.declare(kernel, "... c, d -> ... c")
    check(lambda x: x + scaled(x, torch.ones(1)), WIDTH, "colwise")
    over_last = tz.parallel.declare(kernel, "... _, _ -> ... _")
    with pytest.raises(tz.Misuse, match=r"calls tests::kernel on what 'up'.*adds up over channels"):
        run(lambda x: x + over_last(x, torch.ones(1)), WIDTH, "colwise")
    of_whole = tz.parallel.declare(kernel, "... c, c -> ... c")
    with pytest.raises(tz.Misuse, match="takes this rank's 'c' with all that another tensor has"):
        run(lambda x: x + of_whole(x, torch.ones(x.shape[-1])), WIDTH, "colwise")
    with pytest.raises(tz.BadInput, match="Give terms for all of them"):
        run(lambda x: x + scaled(x, torch.ones(1, 1)), WIDTH, "colwise")
    assert torch.equal(scaled(torch.ones(2), torch.ones(1)), torch.ones(2))


class Kernel(torch.autograd.Function):
    """As one of Triton or C++, with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


class CompiledFunction(Kernel):
    """As the compiler names what it has made."""


def test_a_kernel_is_followed_as_it_is_declared_and_else_refused_or_warned_of() -> None:
    declared = tz.parallel.declare(Kernel.apply, "... -> ...")
    check(lambda x: declared(x) * x, WIDTH, "colwise")
    with pytest.raises(tz.Misuse, match=r"'up'.*asks no mode of torch.*parallel\.declare"):
        run(lambda x: Kernel.apply(x) * x, WIDTH, "colwise")
    with pytest.warns(UserWarning, match=r"'up'.*by a function that is compiled.*parallel\.declare"):
        check(lambda x: CompiledFunction.apply(x) * x, WIDTH, "colwise")


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("a b", "it has no ->"),
        (None, "it has no ->"),
        ("a ... -> a", "is not in front"),
        ("a-b -> a", "'a-b' is no name"),
        ("a b -> c", "no argument has the dim 'c'"),
        ("a b, a -> ... a", r"no argument has the dim '\.\.\.'"),
        ("a a -> a", "'a' is twice"),
        ("a b -> b a b", "'b' is twice"),
        (" -> ", "must return what it writes to"),
        ("... ->", "must return what it writes to"),
    ],
)
def test_what_is_no_equation_is_not_declared(equation, why: str) -> None:
    with pytest.raises(tz.BadInput, match=f"the equation is .*, and .*{why}"):
        tz.parallel.declare(kernel, equation)


def test_a_module_whose_weights_would_vanish_is_not_declared() -> None:
    with pytest.raises(tz.BadInput, match="RMSNorm is a module, whose weights"):
        tz.parallel.declare(nn.RMSNorm(4), "... _ -> ... _")


def over_second(one: Tensor, other: Tensor) -> Tensor:
    return kernel(one, torch.ones(1)) * torch.from_numpy(other.detach().softmax(1).numpy())


def test_terms_are_of_parameters_in_their_order_however_a_call_names_them() -> None:
    declared = tz.parallel.declare(over_second, "b t c, b _ c -> b t c")
    check(lambda x: x * declared(other=x, one=x[:, :1]), WIDTH, "colwise")
    with pytest.raises(tz.Misuse, match=r"adds up over channels"):
        run(lambda x: x * declared(other=x.mT, one=x.mT).mT, WIDTH, "colwise")
    unnamed = tz.parallel.declare(lambda **named: over_second(**named), "b t c, b t c -> b t c")
    with pytest.raises(tz.BadInput, match=r"tensors by name \(other, one\).*give them by position"):
        run(lambda x: x * unnamed(other=x, one=x), WIDTH, "colwise")


def test_a_kernel_that_writes_in_place_is_declared_with_what_it_returns() -> None:
    def doubled(x: Tensor) -> Tensor:
        values = x.detach().numpy()
        values *= 2
        return x

    declared = tz.parallel.declare(doubled, "... -> ...")
    check(lambda x: declared(x.detach().clone()) * x, WIDTH, "colwise")
    with pytest.raises(tz.Misuse, match="computes with all channels"):
        run(lambda x: declared(x.detach().clone()).softmax(-1) * x, WIDTH, "colwise")


def test_an_operator_of_the_models_own_is_declared_once() -> None:
    torch.library.define("tests_channels::sorted_mean", "(Tensor x) -> Tensor")
    torch.library.impl("tests_channels::sorted_mean", "CompositeImplicitAutograd")(
        lambda x: x.sort(1).values.mean(1, keepdim=True).expand_as(x)
    )
    operator = torch.ops.tests_channels.sorted_mean
    with pytest.raises(tz.Misuse, match="calls tests_channels::sorted_mean"):
        run(lambda x: x + operator(x), WIDTH, "colwise")
    assert tz.parallel.declare(operator, "b _ c -> b _ c") is operator
    check(lambda x: x + operator(x), WIDTH, "colwise")


def test_an_operator_of_another_library_is_not_taken_for_torchs_of_its_name() -> None:
    torch.library.define("tests_channels::transpose", "(Tensor x, int one, int other) -> Tensor")
    torch.library.impl("tests_channels::transpose", "CompositeImplicitAutograd")(lambda x, one, other: x.flip(-1))
    with pytest.raises(tz.Misuse, match="computes by"):
        run(lambda x: x + torch.ops.tests_channels.transpose(x, 0, 0), WIDTH, "colwise")


def test_sizes_of_the_whole_take_no_other_runs() -> None:
    thirds = Colwise(parts=(16, 16, 16))
    check(
        lambda x: (
            x.split(x.shape[-1] // 3, 2)[0] * x.chunk(3, -1)[2]
            + x.split((x.shape[-1] // 3, x.shape[-1] // 3 * 2), 2)[0]
        ),
        16,
        thirds,
        48,
    )
    for between in (
        lambda x: x.split(16, 2)[0],
        lambda x: x.narrow(2, 0, 16),
        lambda x: x[..., :16],
        lambda x: x.tensor_split((16,), 2)[0],
    ):
        with pytest.raises(tz.Misuse, match="takes channels by their places"):
            run(lambda x, between=between: between(x).tanh().sum(-1, True) * x.chunk(3, -1)[0], 16, thirds, channels=48)


def test_what_torch_says_of_sizes_of_the_whole_has_a_note_of_this_ranks() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
        run(lambda x: x.view(B, T, 4, HEAD).flatten(2), WIDTH, "colwise")
    note = caught.value.__notes__[0]
    assert "'up', of style 'colwise'" in note and "dim 2 has this rank's 8 places alone" in note and "-1" in note


def test_a_view_as_all_heads_of_which_a_rank_has_some_is_refused() -> None:
    def between(x: Tensor) -> Tensor:  # as einops' rearrange(x, "b t (h d) -> b t h d", h=4) does
        return x.reshape(B, T, 4, x.shape[-1] // 4).softmax(-1).flatten(2)

    for column in ("colwise", Colwise(heads=4)):
        with pytest.raises(tz.Misuse, match=r"calls reshape .*makes heads of channels.*Colwise\(heads=n\)"):
            run(between, WIDTH, column)


def test_what_torch_does_not_call_elementwise_is_refused_by_its_operator() -> None:
    with pytest.raises(
        tz.Misuse, match=r"calls channel_shuffle .*aten\.\w+.*not known to keep channels apart.*parallel\.declare"
    ):
        run(WRONG["shuffled"][0], WIDTH, "colwise")


@pytest.mark.parametrize("is_tagged", [True, False])
def test_an_operator_of_the_models_own_says_that_it_computes_element_by_element(is_tagged: bool) -> None:
    name = f"tests_channels::twice_{is_tagged}".lower()
    torch.library.define(name, "(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,) if is_tagged else ())
    torch.library.impl(name, "CompositeExplicitAutograd")(lambda x: 2 * x)
    operator = getattr(torch.ops.tests_channels, name.rpartition(":")[2])

    def between(x: Tensor) -> Tensor:
        return x + operator(x.detach())

    if is_tagged:
        check(between, WIDTH, "colwise")
    else:
        with pytest.raises(tz.Misuse, match=r"computes by tests_channels\.twice_false"):
            run(between, WIDTH, "colwise")


@pytest.mark.parametrize("plan", [("colwise", "rowwise"), ("colwise_gather_output", "rowwise_split_input")])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_ranks_have_summed_or_gathered_is_changed_in_place(plan, batch: int) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x).relu_())
            y += x
            return y.relu_()

    base, values = Residual(), inputs()[:batch]

    def body(rank: int):
        model = tz.parallelize(
            copy.deepcopy(base), tz.mesh(tp=2, device="cpu"), tensor=dict(zip(("up", "down"), plan, strict=True))
        )
        output = model(values)
        output.sum().backward()
        return output.detach(), model.up.weight.grad

    found = run_in_threads(2, body)
    wanted = base(values)
    wanted.sum().backward()
    for rank, (output, grad) in enumerate(found):
        torch.testing.assert_close(output, wanted.detach())
        torch.testing.assert_close(grad, base.up.weight.grad.chunk(2)[rank])


def test_kernels_of_attention_have_heads_where_they_take_them() -> None:
    torch.library.define("flash_attn::_flash_attn_forward", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")

    @torch.library.impl("flash_attn::_flash_attn_forward", "CompositeImplicitAutograd")
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [each.transpose(1, 2) for each in (q, k, v)]
        return F.scaled_dot_product_attention(*parts).transpose(1, 2), q.new_zeros(())

    def between(q: Tensor) -> Tensor:
        return torch.ops.flash_attn._flash_attn_forward(q, q, q)[0]

    check(lambda x: between(x.view(B, T, -1, HEAD)).flatten(2), WIDTH, "colwise")
    with pytest.raises(tz.Misuse, match=r"calls flash_attn::flash_attn_forward .*its heads are no dim"):
        run(lambda x: joined(between(heads(x))), WIDTH, "colwise")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_function_that_the_model_compiles_is_run_as_it_is() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def between(x: Tensor) -> Tensor:
        return joined(flex_attention(*[heads(x)] * 3))

    base, found = run(between, WIDTH, "colwise", grad=False)
    with torch.no_grad():
        wanted = base(inputs())
    for output, _ in found:
        torch.testing.assert_close(output, wanted)
