"""Finds models that compute with a part of the channels as if it were all of them, between a `colwise` and a `rowwise`.

There each rank has a part of the channels: `softmax(-1)`, `mean(-1)` or a norm over them would be of this rank's alone,
`flip(-1)` or the halves of a fused matrix other channels than of the whole, without an error. First forwards are
watched. Not seen: numbers, such as sizes and what `item()` returns, and what computes by no function or operator of
torch. What this package computes is not looked at.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from terrazzo.engine.runtime.overrides import function_name, is_question
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import Misuse
from terrazzo.parallel.tensor.arguments import first_activation
from terrazzo.parallel.tensor.channels.channel_rules import rule_of
from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, ChannelRule, FunctionCall, Mixed
from terrazzo.parallel.tensor.channels.elementwise import OperatorWatch
from terrazzo.parallel.tensor.first_forwards import FunctionWatch, has_compiled

__all__ = ["ChannelParts", "Run"]

_PASSED_ON = ("__torch_function__", "called")
"""The functions of another watch, which has let a call through."""
_PACKAGE = __name__.partition(".tensor")[0] + "."
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Run:
    """What a rank has of the outputs of one matrix: how many, and of how many heads these are, None: not known."""

    numel: int
    heads: int | None


@dataclass(frozen=True)
class ChannelParts:
    """Builds a watch of a forward, which raises `Misuse` where an operation mixes channels that ranks have in parts.

    Attributes:
        columns: modules whose outputs are parts, by name, and what they are of.
        rows: names of the modules that take such parts.
        ranks: how many ranks there are along `tp`.
    """

    columns: Mapping[str, Sequence[Run]]
    rows: Sequence[str]
    ranks: int

    def __call__(self, model: nn.Module) -> FunctionWatch | None:
        if has_compiled(model) or not self.columns:
            return None
        watch = _Channels(self.ranks)
        for name, runs in self.columns.items():
            watch.add_column(name, model.get_submodule(name), runs)
        for name in self.rows:
            watch.add_row(name, model.get_submodule(name))
        return watch


class _Channels(FunctionWatch):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._cuts: Any = WeakIdKeyDictionary()
        self._mixed: Any = WeakIdKeyDictionary()
        self._within = 0

    def add_column(self, name: str, module: nn.Module, runs: Sequence[Run]) -> None:
        sizes, heads = tuple(run.numel for run in runs), tuple(run.heads for run in runs)

        def note(output: Any) -> None:
            for each in tree_leaves(output):
                if isinstance(each, Tensor) and each.dim() and each.shape[-1] == sum(sizes):
                    self._cuts[each] = (ChannelCut(name, each.dim() - 1, sizes, heads, self._ranks),)

        self._run_apart(module)
        self.after(module, note)

    def add_row(self, name: str, module: nn.Module) -> None:
        self.before(module, lambda args, kwargs: self._check_row(name, first_activation(args, kwargs)))
        self._run_apart(module)

    def _run_apart(self, module: nn.Module) -> None:
        """A module whose own functions are not looked at."""

        def count(by: int) -> None:
            self._within += by

        self.before(module, lambda *_: count(1), first=True)
        self.after(module, lambda _: count(-1), always=True)

    def _check_row(self, name: str, values: Tensor | None) -> None:
        if values is None:
            return
        if (mixed := self._mixed.get(values)) is not None:
            raise mixed
        cuts: tuple[ChannelCut, ...] = self._cuts.get(values, ())
        if cuts and not any(cut.dim == values.dim() - 1 and len(cut.sizes) == 1 for cut in cuts):
            cut = cuts[0]
            raise Misuse(
                f"{name!r}, of style 'rowwise', is given what {cut.name!r} has computed with channels in another "
                "order: it would multiply its part of the inputs with channels of other ranks. Give it one channel of "
                f"each rank's part after the other, as {cut.name!r} returns them, or give neither a style."
            )

    def succeed(self, output: Any) -> None:
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and (mixed := self._mixed.get(each)) is not None:
                raise mixed

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_looked_at = not self._within and (func in _DATA or not is_question(func))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)] if is_looked_at else []
        mixed = next((found for each in given if (found := self._mixed.get(each)) is not None), None)
        cut = [each for each in given if self._cuts.get(each) is not None]
        if not (cut or mixed) or _is_called_here(sys._getframe(1)):
            return func(*args, **kwargs)
        if cut and mixed is not None:
            raise mixed
        call = FunctionCall(_name_of(func), args, kwargs, lambda each: next(iter(self._cuts.get(each, ())), None))
        if call.name == "iter":
            return iter(self.called(Tensor.unbind, args, kwargs))
        if mixed is None:
            return self._followed(func, call)
        result = func(*args, **kwargs)
        self._note_mixed(replace(call, result=result), mixed)
        return result

    def _followed(self, func: Any, call: FunctionCall) -> Any:
        """The result of a call with channels in parts; it is noted where these are in it."""
        if (rule := rule_of(call)) is not None:
            result = func(*call.args, **call.named)
        else:
            with OperatorWatch(each for each in call.tensors if call.cut_of(each) is not None) as operators:
                result = func(*call.args, **call.named)
            rule = operators.rule
        call = replace(call, result=result)
        try:
            for each, cuts in self._results(rule, call).items():
                self._cuts[each] = tuple(cuts)
        except Mixed as error:
            self._note_mixed(call, _misuse(call.name, error))
        return result

    def _results(self, rule: ChannelRule, call: FunctionCall) -> Mapping[Tensor, Mapping[ChannelCut, None]]:
        """What each result may have in parts.

        Raises:
            Mixed: the call mixes channels in one of the dims that they may be in. Of tensors that may have them in
                other dims than each other, one choice of these that fits is taken for what the model means.
        """
        choices = dict.fromkeys(cuts for each in call.tensors if (cuts := self._cuts.get(each)) is not None)
        found: Any = WeakIdKeyDictionary()
        errors: list[Mixed] = []
        for chosen in itertools.product(*choices):
            taken: Any = dict(zip(choices, chosen, strict=True))
            try:
                of_these = rule(replace(call, cut_of=partial(self._cut_in, taken)))
            except Mixed as error:
                errors.append(error)
                continue
            for each, cut in of_these:
                found.setdefault(each, {})[cut] = None
        if errors and (len(choices) == 1 or len(errors) == math.prod(map(len, choices))):
            raise errors[0]
        return found  # type: ignore[no-any-return]

    def _cut_in(self, taken: Mapping[tuple[ChannelCut, ...], ChannelCut], tensor: Tensor) -> ChannelCut | None:
        return taken.get(self._cuts.get(tensor, ()))

    def _note_mixed(self, call: FunctionCall, refused: Misuse) -> None:
        """What is detached may only be read, as for a log: it is refused where a model computes with or returns it."""
        for each in call.results:
            if each.requires_grad:
                raise refused
            self._mixed[each] = refused


def _is_called_here(frame: FrameType | None) -> bool:
    """Whether it is this package that computes, as where ranks exchange heads for tokens, and not the model."""
    while frame is not None and (_module_of(frame).startswith("torch.") or frame.f_code.co_name in _PASSED_ON):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith(_PACKAGE)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _name_of(func: Any) -> str:
    """The name of a function in the rules: the plain one of operators, methods in place and submodules of torch."""
    name = function_name(func).partition(".")[0].strip("_")  # without an operator's overload
    return name.removeprefix("fft_").removeprefix("linalg_").removeprefix("special_")


def _misuse(name: str, error: Mixed) -> Misuse:
    column = error.cut.name
    return Misuse(
        f"The model's forward calls {name} on what {column!r}, of style 'colwise', has computed: that {error.does}. "
        f"Give {column!r} the style 'colwise_gather_output' and the 'rowwise' behind it 'rowwise_split_input', so that "
        "every rank has all channels between them, or give neither a style. Matrices that are fused into one need "
        "terrazzo.parallel.Colwise(parts=...); what is only read, as for a log, a .detach() before; and an operator of "
        "your own that computes element by element, torch.library's tags=torch.Tag.pointwise."
    )
