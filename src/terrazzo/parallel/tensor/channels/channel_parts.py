"""Finds models that compute with a part of the channels as if it were all of them, between a `colwise` and a `rowwise`.

There each rank has a part of the channels: `softmax(-1)`, `mean(-1)` or a norm over them would be of this rank's alone,
`flip(-1)` or the halves of a fused matrix other channels than of the whole, without an error. First forwards are
watched. What this package computes is not looked at.
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

from terrazzo.engine.runtime.overrides import in_order, is_question
from terrazzo.engine.runtime.private_torch import tree_leaves, without_transform
from terrazzo.errors import Misuse
from terrazzo.parallel.tensor.arguments import first_activation
from terrazzo.parallel.tensor.channels.channel_marks import ChannelMarks
from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, ChannelRule, FunctionCall, HeadCounts, Mixed
from terrazzo.parallel.tensor.channels.elementwise import OperatorWatch
from terrazzo.parallel.tensor.channels.rule_table import name_of, rule_of
from terrazzo.parallel.tensor.first_forwards import FunctionWatch, has_compiled

__all__ = ["ChannelParts", "Run"]

_PASSED_ON = ("__torch_function__", "called", "ask_modes")
"""The functions of another watch, which has let a call through, and of `declare`."""
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
        exchanges: names of the modules whose input or output ranks exchange.
        ranks: how many ranks there are along `tp`.
    """

    columns: Mapping[str, Sequence[Run]]
    rows: Sequence[str]
    exchanges: Sequence[str]
    ranks: int

    def __call__(self, model: nn.Module) -> FunctionWatch | None:
        if has_compiled(model) or not self.columns:
            return None
        watch = _Channels(self.ranks)
        for name, runs in self.columns.items():
            watch.add_column(name, model.get_submodule(name), runs)
        for name in self.rows:
            watch.add_row(name, model.get_submodule(name))
        for name in self.exchanges:
            watch.add_exchange(model.get_submodule(name))
        return watch


class _Channels(FunctionWatch):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._counts = HeadCounts(ranks)
        self._marks = ChannelMarks()
        self._within = 0

    def add_column(self, name: str, module: nn.Module, runs: Sequence[Run]) -> None:
        sizes, heads = tuple(run.numel for run in runs), tuple(run.heads for run in runs)
        self._counts.here.update(each for each in heads if each is not None)

        def note(output: Any) -> None:
            for each in _tensors_in(output):
                if each.dim() and each.shape[-1] == sum(sizes):
                    self._marks.note_cut(each, [ChannelCut(name, each.dim() - 1, sizes, heads, self._counts)])

        self._run_apart(module)
        self.after(module, note)

    def add_row(self, name: str, module: nn.Module) -> None:
        self.before(module, lambda args, kwargs: self._check_row(name, first_activation(args, kwargs)))
        self._run_apart(module)

    def add_exchange(self, module: nn.Module) -> None:
        """A module whose input or output ranks exchange: what one of them has computed of a part spreads there."""
        self.before(module, lambda args, kwargs: self._refuse(args, kwargs), first=True)
        self.after(module, self._seen)

    def _run_apart(self, module: nn.Module) -> None:
        """A module whose own functions are not looked at."""

        def count(by: int) -> None:
            self._within += by

        self.before(module, lambda *_: count(1), first=True)
        self.after(module, lambda _: count(-1), always=True)

    def _check_row(self, name: str, values: Tensor | None) -> None:
        if values is None:
            return
        cuts = self._marks.cuts_of(values)
        if cuts and not any(cut.dim == values.dim() - 1 and len(cut.sizes) == 1 for cut in cuts):
            cut = cuts[0]
            raise Misuse(
                f"{name!r}, of style 'rowwise', is given what {cut.name!r} has computed with channels in another "
                "order: it would multiply its part of the inputs with channels of other ranks. Give it one channel of "
                f"each rank's part after the other, as {cut.name!r} returns them, or give neither a style."
            )

    def succeed(self, output: Any) -> None:
        self._refuse(output)

    def _refuse(self, *values: Any) -> None:
        """Refuse tensors that a model may neither return nor hand on to another rank."""
        for each in _tensors_in(values):
            if (error := self._marks.mixed_of(each) or self._marks.refusal(each)) is not None:
                raise error

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_question(func) and func not in _DATA:
            return func(*args, **kwargs)
        given = _tensors_in((args, kwargs))
        mixed = next((error for each in given if (error := self._marks.mixed_of(each)) is not None), None)
        has_cut = any(self._marks.cuts_of(each) for each in given)
        if mixed is not None and has_cut:
            raise mixed
        if mixed is not None:
            result = func(*args, **kwargs)
            self._note_mixed(self._call(func, args, kwargs, result), mixed)
            return result
        if self._within or _is_called_here(sys._getframe(1)):
            return self._seen(func(*args, **kwargs))
        if (error := next(filter(None, map(self._marks.refusal, given)), None)) is not None:
            raise error
        return self._followed(func, self._call(func, args, kwargs)) if has_cut else self._seen(func(*args, **kwargs))

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any = None) -> FunctionCall:
        return FunctionCall(
            name_of(func),
            args,
            in_order(func, kwargs),
            lambda each: next(iter(self._marks.cuts_of(each)), None),
            result,
        )

    def _seen(self, result: Any) -> Any:
        for each in _tensors_in(result):
            self._marks.note_seen(each)
        return result

    def _followed(self, func: Any, call: FunctionCall) -> Any:
        """The result of a call with channels in parts; it is noted where these are in it."""
        if call.name == "iter":
            return iter(self.called(Tensor.unbind, call.args, call.named))
        if (rule := rule_of(func, call)) is not None:
            result = _result_of(func, call)
        else:
            with OperatorWatch(each for each in call.tensors if call.cut_of(each) is not None) as operators:
                result = _result_of(func, call)
            rule = operators.rule
        call = replace(call, result=result)
        try:
            for each, cuts in self._results(rule, call).items():
                self._marks.note_cut(each, [*cuts], _tensors_in((call.args, call.named)))
        except Mixed as error:
            self._note_mixed(call, _misuse(call.name, error))
        return self._seen(result)

    def _results(self, rule: ChannelRule, call: FunctionCall) -> Mapping[Tensor, Mapping[ChannelCut, None]]:
        """What each result may have in parts.

        Raises:
            Mixed: the call mixes channels in one of the dims that they may be in. Of tensors that may have them in
                other dims than each other, one choice of these that fits is taken for what the model means.
        """
        choices = dict.fromkeys(cuts for each in call.tensors if (cuts := self._marks.cuts_of(each)))
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
        return taken.get(self._marks.cuts_of(tensor))

    def _note_mixed(self, call: FunctionCall, refused: Misuse) -> None:
        """What is detached may only be read, as for a log: it is refused where a model computes with or returns it.

        What a transform of `torch.func` hands out is another tensor, which would have no mark.
        """
        for each in call.results:
            if each.requires_grad or without_transform(each) is not each:
                raise refused
            self._marks.note_mixed(each, refused, call.tensors)


def _result_of(func: Any, call: FunctionCall) -> Any:
    """What a call returns; errors of torch say that ranks have parts, by which sizes of the whole do not go."""
    try:
        return func(*call.args, **call.named)
    except Exception as error:
        cut = next(filter(None, map(call.cut_of, call.tensors)))
        error.add_note(
            f"This is of what {cut.name!r}, of style 'colwise', has computed: dim {cut.dim} has this rank's "
            f"{cut.numel} places alone, and not those of all {cut.counts.ranks} ranks. Take sizes from the tensor, as "
            "x.shape[-1], or give -1 for the number of heads."
        )
        raise


def _tensors_in(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _is_called_here(frame: FrameType | None) -> bool:
    """Whether it is this package that computes, as where ranks exchange heads for tokens, and not the model."""
    while frame is not None and (_module_of(frame).startswith("torch.") or frame.f_code.co_name in _PASSED_ON):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith(_PACKAGE)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _misuse(name: str, error: Mixed) -> Misuse:
    column = error.cut.name
    return Misuse(
        f"The model's forward calls {name} on what {column!r}, of style 'colwise', has computed: that {error.does}. "
        f"Give {column!r} the style 'colwise_gather_output' and the 'rowwise' behind it 'rowwise_split_input', so that "
        "every rank has all channels between them, or give neither a style. Matrices that are fused into one need "
        "terrazzo.parallel.Colwise(parts=...); what is only read, as for a log, a .detach() before; and a function of "
        "your own terrazzo.parallel.declare(...), which says how its dims go."
    )
