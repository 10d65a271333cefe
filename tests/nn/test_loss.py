"""The loss without logits, against autograd of torch's own operators on all logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import terrazzo as tz
from terrazzo.engine.labels.label import Label
from terrazzo.errors import BadInput, Misuse
from terrazzo.nn.chunked_cross_entropy import chunk_rows, linear_cross_entropy
from terrazzo.parallel import VocabularyLoss
from terrazzo.parallel.tensor.activation_exchanges import runs_of, tensor_ranks
from tests.helpers.threads import run_in_threads

N, D, V = 37, 12, 51
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 1.5},
    {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 2.0},
)


def inputs(dtype: torch.dtype = torch.float64, tokens: int = N, vocabulary: int = V) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, D, generator=made, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, D, generator=made, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=made)
    targets[::5] = -100
    return hidden, weight, targets


def whole(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None, **options: Any
) -> Tensor:
    """What torch makes of all logits."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    squared = logits.logsumexp(-1).square() * (targets != -100)
    losses = losses + options.get("z_loss", 0.0) * squared
    return (losses if token_weights is None else losses * token_weights).sum()


def gradients(loss: Callable[..., Tensor], *given: Any, times: float = 1.0, **options: Any) -> list[Tensor]:
    """The loss, and `times` its gradients."""
    hidden, weight, *rest = (each.detach().requires_grad_(each.is_floating_point()) for each in given)
    value = loss(hidden, weight, *rest, **options)
    (value * times).backward()
    return [value.detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [None, 1, 8, 100])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_what_torch_makes_of_all_logits(options: dict[str, Any], rows: int | None) -> None:
    given = inputs()
    weights = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = gradients(linear_cross_entropy, *given, rows=rows, token_weights=weights, times=3.0, **options)
    wanted = gradients(whole, *given, token_weights=weights, times=3.0, **options)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_round_no_more_than_torch(dtype: torch.dtype) -> None:
    """Against fp64. Plain autograd in the same dtype rounds the weight's gradient once, and here each chunk's is."""
    given = inputs(dtype, tokens=600)
    exact = gradients(whole, *(each.double() if each.is_floating_point() else each for each in given))
    found, plain = gradients(linear_cross_entropy, *given), gradients(whole, *given)
    assert [each.dtype for each in found] == [torch.float32, dtype, dtype]
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        assert (ours - truth).norm() <= 1.25 * (theirs - truth).norm() + 1e-7 * truth.norm()


def test_autocast_has_products_in_its_dtype() -> None:
    """As `F.linear` has them. Against fp64."""
    given = inputs(torch.float32, tokens=600)
    exact = gradients(whole, *(each.double() if each.is_floating_point() else each for each in given))
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = gradients(linear_cross_entropy, *given), gradients(whole, *given)
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(*given), found[0])
    assert torch.equal(found[0], linear_cross_entropy(given[0].bfloat16(), given[1].bfloat16(), given[2]))
    assert [each.dtype for each in found] == [torch.float32] * 3
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        assert (ours - truth).norm() <= 1.25 * (theirs - truth).norm() + 1e-7 * truth.norm()


def test_one_chunk_is_cut_by_the_batch_and_the_vocabulary_alone() -> None:
    assert [chunk_rows(tokens, 32_000) for tokens in (1, 4096, 8192, 65_536, 10**6)] == [128, 128, 256, 2048, 2048]
    assert chunk_rows(10**6, 128_256) == 512 and chunk_rows(10**6, 10**9) == 128 and chunk_rows(8192, 256) == 4096


def test_leading_dimensions_are_those_of_the_targets() -> None:
    hidden, weight, targets = inputs(tokens=24)
    flat = gradients(linear_cross_entropy, hidden, weight, targets)
    cut = gradients(linear_cross_entropy, hidden.view(2, 12, D), weight, targets.view(2, 12))
    assert torch.equal(flat[0], cut[0]) and torch.equal(flat[1].view(2, 12, D), cut[1]) and torch.equal(flat[2], cut[2])


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both", "no_grad"])
def test_only_wanted_gradients_are_formed(frozen: str) -> None:
    hidden, weight, targets = inputs()
    given = [hidden.detach().requires_grad_(frozen == "weight"), weight.detach().requires_grad_(frozen == "hidden")]
    if frozen == "no_grad":
        given = [hidden, weight]
    with torch.set_grad_enabled(frozen != "no_grad"), Live(frozen) as live:
        value = linear_cross_entropy(*given, targets)
    assert torch.equal(value.detach(), linear_cross_entropy(hidden, weight, targets).detach())
    assert value.requires_grad == (frozen in ("hidden", "weight"))
    del value
    assert live.bytes == 0


def test_all_tokens_ignored_is_a_loss_of_nothing() -> None:
    hidden, weight, targets = inputs()
    value, *grads = gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, -100), z_loss=0.1)
    assert value == 0 and not any(each.any() for each in grads)


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are alive."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in given | self._seen:
                self._seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_a_sixteenth_of_the_logits(dtype: torch.dtype) -> None:
    """Beside gradients: that of the hidden states, and the weight's in fp32 and one product of its size."""
    tokens, vocabulary = 4096, 8192
    hidden, weight, targets = inputs(dtype, tokens, vocabulary)
    with Live() as live:
        linear_cross_entropy(hidden, weight, targets).backward()
    kept = hidden.nbytes + weight.numel() * 4 + 2 * weight.nbytes
    assert live.peak - kept <= tokens * vocabulary * 4 / 16 + 40 * tokens
    with Live() as all_logits:
        whole(hidden[:256], weight, targets[:256]).backward()
    assert all_logits.peak > 256 * vocabulary * 4  # the measure sees what plain torch holds


def test_a_gradient_with_a_graph_is_refused() -> None:
    """Also where the gradient of the loss itself is a constant, in which torch's own check sees nothing to keep."""
    hidden, weight, targets = inputs()
    with pytest.raises(Misuse, match=r"create_graph=True.*compute logits"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(N, D).half(), "weight": torch.zeros(V, D).half()}, "fp16"),
        ({"hidden": torch.zeros(N, D)}, "float32 times torch.float64"),
        ({"weight": torch.zeros(V, D + 1).double()}, r"hidden \(37, 12\) and weight \(51, 13\)"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets of shape \(3,\)"),
        ({"token_weights": torch.zeros(3)}, r"token_weights of shape \(3,\)"),
        ({"token_weights": torch.ones(N).requires_grad_()}, r"token_weights\.detach\(\)"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"label_smoothing": True}, "label_smoothing is True; it must be a number"),
        ({"z_loss": "a"}, "z_loss is 'a'; it must be a number"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"rows": 0}, "rows is 0"),
        ({"rows": 2.5}, r"rows is 2\.5"),
        ({"targets": torch.zeros(N)}, r"targets of torch\.float32: .*int64"),
        ({"targets": torch.zeros(N, dtype=torch.int32)}, r"targets of torch\.int32: .*int64"),
        ({"targets": [0] * N}, "a list as targets: .*int64"),
        ({"ignore_index": None}, "ignore_index is None; .*below 0 where"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    hidden, weight, targets = inputs()
    given = {"hidden": hidden, "weight": weight, "targets": targets, **change}
    with pytest.raises(BadInput, match=message):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_outside_of_the_vocabulary_is_torchs_error(wrong: int) -> None:
    hidden, weight, targets = inputs()
    targets[3] = wrong
    with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_the_vocabulary_have_the_same_loss(ranks: int) -> None:
    """A vocabulary that divides unevenly; with a gradient of the hidden states that is the sum over ranks."""
    hidden, weight, targets = inputs()
    wanted = gradients(whole, hidden, weight, targets)

    def body(rank: int) -> None:
        mesh = tz.mesh(tp=ranks, device="cpu")
        loss = VocabularyLoss(mesh, V)
        part = slice(loss.start, loss.start + runs_of(V, ranks)[rank][1] - runs_of(V, ranks)[rank][0])
        own, x = weight.detach()[part].requires_grad_(), hidden.detach().requires_grad_()
        value = loss.of_hidden(tensor_ranks(mesh).labelled(Label()).copy(x), own, targets)
        value.backward()
        for ours, theirs in zip((value.detach(), x.grad, own.grad), (*wanted[:2], wanted[2][part]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        for wrong in (-1, V, 2**40):
            with pytest.raises(RuntimeError, match="is out of bounds"):
                loss.of_hidden(x, own, targets.index_fill(0, torch.tensor(1), wrong))
        with pytest.raises(BadInput, match="weight of 51 rows, and this rank's part"):
            loss.of_hidden(x, weight, targets)

    run_in_threads(ranks, body)


def test_logits_in_64_bits_have_a_loss_in_64_bits() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, V, dtype=torch.float64), torch.randint(V, (4,))
    wanted = F.cross_entropy(logits, targets, reduction="sum")

    def body(rank: int) -> None:
        loss = VocabularyLoss(tz.mesh(tp=2, device="cpu"), V)
        own = logits[:, slice(*runs_of(V, 2)[rank])]
        torch.testing.assert_close(loss(own, targets), wanted, rtol=1e-12, atol=1e-12)

    run_in_threads(2, body)
