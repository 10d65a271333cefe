"""DeepSpeed's tensor parallelism: each rank has saved its parts, and patterns over names say how they fit together.

AutoTP and Megatron-DeepSpeed write these patterns for the conversion to universal checkpoints. What they do not say, or
say in a way that is not known here, is refused by name: a wrong guess has the right shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.importers.deepspeed.files import Shape
from terrazzo.checkpoint.importers.deepspeed.trained import Trained
from terrazzo.checkpoint.importers.deepspeed.universal import alike
from terrazzo.checkpoint.importers.parts.values import Values
from terrazzo.checkpoint.source import WEIGHT
from terrazzo.engine import Box
from terrazzo.engine.partition.rectangles import Rectangle, rectangles_of
from terrazzo.errors import BadInput, Damaged

__all__ = ["join"]

_LISTS = {
    "replicated": "tp_replicated_parameter_patterns",
    "average": "parameter_to_average_patterns",
    "rows": "parameter_with_row_parallelism_patterns",
    "vocabulary": "vocabulary_parameter_patterns",
    "halves": "parameter_with_2_sub_params_cat_dim_0",
    "unsupported": "autotp_unsupported_parameter_patterns",
}
_SLOW = re.compile(r"\)[*+?{]|\{|\\[1-9]|\(\?")  # what a pattern that never ends would need
_MAX_PATTERN = 1000


class JoinedParts(Values):
    """A tensor of which each rank has a part, as its box says."""

    def __init__(self, parts: Sequence[Values], boxes: Sequence[Box]) -> None:
        self.shape, self.dtype = boxes[0].shape, parts[0].dtype
        self._places = [
            (rectangle, place, part)
            for part, box in zip(parts, boxes, strict=True)
            for rectangle, place in zip(box.rectangles, box.local_rectangles(), strict=True)
        ]

    def read(self, start: int, stop: int) -> Tensor:
        pieces = [self.read_box(part).reshape(-1) for part in rectangles_of(self.shape, start, stop)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)

    def read_box(self, part: Rectangle) -> Tensor:
        values = torch.empty(part.sizes, dtype=self.dtype)
        for rectangle, place, of_rank in self._places:
            if (common := rectangle.intersect(part)) is not None:
                inside = common.relative_to(rectangle).placed_in(place)
                values[common.relative_to(part).slices] = of_rank.read_box(inside)
        return values


def join(ranks: Sequence[Trained], info: Mapping[str, Any], where: str) -> Trained:
    """What ranks of tensor parallelism have trained, whole.

    Args:
        info: what the model's file has as `universal_checkpoint_info`.

    Raises:
        BadInput: it does not say how a parameter's parts fit together; `where` names the checkpoint.
    """
    first, layout = ranks[0], _Layout(info, where)
    names = [[group["params"] for group in rank.groups] for rank in ranks]
    if any(rank.states.keys() != first.states.keys() for rank in ranks) or any(each != names[0] for each in names):
        raise Damaged(f"'{where}' is not complete: its ranks of tensor parallelism have not the same parameters.")
    states = {name: layout.joined(name, [rank.states[name] for rank in ranks]) for name in first.states}
    return Trained(states, first.groups, first.notes)


class _Layout:
    """How the parts of each parameter fit together."""

    def __init__(self, info: Mapping[str, Any], where: str) -> None:
        self._info, self._where = info, where
        self._patterns = {kind: self._listed(info.get(key)) for kind, key in _LISTS.items()}
        maps = info.get("affine_map")
        self._patterns["map"] = self._listed(list(maps.get("params", {})) if isinstance(maps, Mapping) else maps)

    def joined(self, name: str, ranks: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
        """The states of a parameter, whole."""
        weights, joined = [states[WEIGHT] for states in ranks], dict(ranks[0])
        boxes = self._boxes(name, [weight.shape for weight in weights])
        for kind in ranks[0]:
            parts = [states[kind] for states in ranks if kind in states]
            if len(parts) < len(ranks) or any(part.dtype != parts[0].dtype for part in parts):
                raise Damaged(f"{kind} of '{name}' in '{self._where}' is not complete: a rank's part is missing.")
            per_element = all(part.shape == weight.shape for part, weight in zip(parts, weights, strict=True))
            if boxes is None or kind == "step" or not per_element:
                if not alike(parts):
                    raise self._refused(name, f"its {kind} is said to be whole on each rank, and differs")
            else:
                joined[kind] = JoinedParts(parts, boxes)
        return joined

    def _boxes(self, name: str, shapes: Sequence[Shape]) -> list[Box] | None:
        """What each rank has; None where all have the whole."""
        kinds = {kind for kind, patterns in self._patterns.items() if any(re.match(each, name) for each in patterns)}
        subs = [each for each in self._subs() if any(re.match(pattern, name) for pattern in each["patterns"])]
        if kinds & {"average", "unsupported"} or len(subs) + len(kinds & {"replicated", "rows", "halves"}) > 1:
            raise self._refused(name, "this layout is not known here")
        if "map" in kinds and not subs and not kinds & {"replicated", "rows", "halves", "vocabulary"}:
            raise self._refused(name, "only an affine map says how its parts fit together")
        if "replicated" in kinds:
            return None
        dim = 1 if "rows" in kinds else subs[0]["partition_dim"] if subs else 0
        outside = [[n for d, n in enumerate(shape) if d != dim] for shape in shapes]
        if type(dim) is not int or not 0 <= dim < len(shapes[0]) or any(each != outside[0] for each in outside):
            raise self._refused(name, f"its parts are {', '.join(str(list(shape)) for shape in shapes)}")
        widths = self._widths(name, [shape[dim] for shape in shapes], 2 if "halves" in kinds else 1, subs, dim)
        return list(self._cut(name, shapes[0], dim, widths, "vocabulary" in kinds))

    def _widths(
        self, name: str, sizes: Sequence[int], count: int, subs: Sequence[Mapping[str, Any]], dim: int
    ) -> list[list[int]]:
        """How much of `dim` each rank has, for each of the matrices that are fused in a parameter."""
        if subs:
            width_table = self._info.get("sub_param_shard_widths")
            pattern = next(each for each in subs[0]["patterns"] if re.match(each, name))
            if isinstance(width_table, Mapping) and pattern in width_table:
                widths = [list(each) for each in width_table[pattern]]
                return self._checked(name, sizes, widths)
            spec = subs[0]["shape"][dim]
            if isinstance(spec, tuple | list):
                widths = [[size // len(sizes)] * len(sizes) for size in spec]
                if any(size % len(sizes) for size in spec):
                    raise self._refused(name, f"the matrices in it, {list(spec)}, are not cut evenly")
                return self._checked(name, sizes, widths)
            count = spec
        if type(count) is not int or count < 1 or any(size % count for size in sizes):
            raise self._refused(name, f"its parts {list(sizes)} are not {count} matrices")
        return self._checked(name, sizes, [[size // count for size in sizes]] * count)

    def _checked(self, name: str, sizes: Sequence[int], widths: list[list[int]]) -> list[list[int]]:
        good = all(len(each) == len(sizes) and all(type(n) is int and n >= 0 for n in each) for each in widths)
        if not good or [sum(column) for column in zip(*widths, strict=True)] != list(sizes):
            raise self._refused(name, f"ranks have {list(sizes)}, which {widths} are not")
        return widths

    def _cut(self, name: str, part: Shape, dim: int, widths: list[list[int]], padded: bool) -> Iterator[Box]:
        size = sum(map(sum, widths))
        end = self._info.get("original_vocab_size", size) if padded else size  # behind it, rows are made up
        if type(end) is not int or not 0 < end <= size or (end < size and (dim != 0 or len(widths) > 1)):
            raise self._refused(name, f"of its {size} rows {end} are said to be the vocabulary")
        shape = tuple(end if d == dim else n for d, n in enumerate(part))
        firsts = list(accumulate(map(sum, widths), initial=0))
        for rank in range(len(widths[0])):
            runs = []
            for first, each in zip(firsts, widths, strict=False):
                start = first + sum(each[:rank])
                runs.append((min(start, end), min(start + each[rank], end)))
            yield Box.cut(shape, dim, runs)

    def _subs(self) -> list[Mapping[str, Any]]:
        subs = self._info.get("parameter_with_sub_params") or []
        good = isinstance(subs, list) and all(isinstance(each, Mapping) and "shape" in each for each in subs)
        if not good:
            raise BadInput(f"'{self._where}' has fused parameters in a form that is not known: {_REMEDY}")
        return [{**each, "patterns": self._listed(each.get("patterns"))} for each in subs]

    def _listed(self, patterns: Any) -> list[str]:
        """Patterns that can be tried: of letters, classes and simple repetitions."""
        listed: list[Any] = list(patterns) if isinstance(patterns, list | tuple) else [] if patterns is None else [None]
        for each in listed:
            if not isinstance(each, str) or len(each) > _MAX_PATTERN or _SLOW.search(each) or each.count("*") > 4:
                raise BadInput(f"'{self._where}' has a pattern of names that is not tried, {each!r}: {_REMEDY}")
            try:
                re.compile(each)
            except re.error as error:
                raise Damaged(f"'{self._where}' has a pattern of names that is none, {each!r}: {error}.") from None
        return listed

    def _refused(self, name: str, why: str) -> BadInput:
        return BadInput(f"'{name}' in '{self._where}' is of tensor parallelism, and {why}: {_REMEDY}")


_REMEDY = "convert it with deepspeed/checkpoint/ds_to_universal.py and import that."
