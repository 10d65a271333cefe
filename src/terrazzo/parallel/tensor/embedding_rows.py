"""Embeddings of whose table a rank has some consecutive rows: it looks those up, and the ranks' outputs are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from terrazzo.errors import Misuse
from terrazzo.nn.vocabulary_parts import outside_part
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks

__all__ = ["look_up_part"]


def look_up_part(module: nn.Embedding, ranks: TensorRanks, start: int, stop: int, rows: int) -> None:
    """Have an embedding that has the rows from `start` to `stop` of `rows` look up its own, and sum with other ranks'.

    torch refuses indices that no rank has.
    """
    hooks = _LookUp(ranks, start, stop, rows, module.padding_idx)
    module.register_forward_pre_hook(hooks.before, with_kwargs=True)
    module.register_forward_hook(hooks.restore_padding, always_call=True)
    module.register_forward_hook(hooks.after)


@dataclass
class _LookUp:
    """One look-up at a time.

    Attributes:
        padding: the module's own `padding_idx`, in rows of the whole table.
        elsewhere: which of the indices of the look-up under way are other ranks' rows.
    """

    ranks: TensorRanks
    start: int
    stop: int
    rows: int
    padding: int | None
    elsewhere: Tensor | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        indices, *rest = args if args else (kwargs["input"],) if "input" in kwargs else (None,)
        if not isinstance(indices, Tensor):
            raise Misuse(
                f"A {type(module).__name__} that tz.parallelize has cut was called without a tensor of indices: give "
                "it first, or as 'input', as torch.nn.Embedding takes it."
            )
        self.elsewhere = outside_part(indices, self.start, self.stop, self.rows)
        inside = self.padding is not None and self.start <= self.padding < self.stop
        module.padding_idx = self.padding - self.start if inside and self.padding is not None else None  # type: ignore[assignment]
        others = {name: value for name, value in kwargs.items() if name != "input"}
        return (indices.sub(self.start).masked_fill(self.elsewhere, 0), *rest), others

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self.elsewhere is not None, "a look-up has begun"
        elsewhere, self.elsewhere = self.elsewhere, None
        return self.ranks.all_reduce(output.masked_fill(elsewhere.unsqueeze(-1), 0))

    def restore_padding(self, module: nn.Module, args: Any, output: Any) -> None:
        """Runs also where the look-up has raised."""
        module.padding_idx = self.padding  # type: ignore[assignment]
