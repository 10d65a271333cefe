"""What the state dicts of training programs hold: weights, an optimizer's state, and plain values beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from terrazzo.checkpoint.importers.parts.tree import Unusable, flattened, keep
from terrazzo.checkpoint.importers.parts.values import Values
from terrazzo.checkpoint.source import WEIGHT, Source, StateInfo, TensorInfo
from terrazzo.errors import BadInput
from terrazzo.messages import listed

__all__ = ["OPTIMIZER_KEYS", "Sections", "StateDictSource", "add_extra", "divide"]

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FLAT = {"_flat_param", "flat_param"}


class StateDictSource(Source):
    """A checkpoint made of state dicts.

    Everything in a model's state dict is of the kind `weight`: nothing there tells a buffer from a parameter. `load`
    takes a weight for a buffer.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.rename: Callable[[str], str] = _unwrapped
        self._values: dict[tuple[str, str], Values] = {}
        self._states: dict[str, dict[str, StateInfo]] = {}

    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self._values[name, kind].read(start, stop)

    def read_box(self, name: str, kind: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return self._values[name, kind].read_box(self._part(name, kind, offsets, sizes))

    def values(self, name: str, kind: str) -> Values:
        """A state that `tensors` lists."""
        return self._values[name, kind]

    def add(self, name: str, kind: str, values: Values) -> None:
        """A state of a tensor, whose weight comes first."""
        self._values[name, kind] = values
        self._states.setdefault(name, {})[kind] = StateInfo(values.dtype, values.numel)
        if kind == WEIGHT:
            self.tensors[name] = TensorInfo(values.shape, self._states[name])

    def drop(self, name: str, alias_of: str) -> None:
        """Make a tensor that was added a further name of another."""
        del self.tensors[name]
        self.aliases[name] = alias_of

    def add_model(self, entries: Mapping[str, Any], known: Collection[str] = ()) -> None:
        """A model's state dict, in its order.

        Args:
            known: names that the model really has, whatever they begin with.

        Raises:
            BadInput: a weight cannot be read, or says nothing of which parameters it is.
        """
        flat = dict(flattened(entries))
        self.rename = _renamed(flat, known)
        firsts: dict[object, str] = {}
        for key, values in flat.items():
            if not isinstance(values, Values):
                self._leave(key, values)
                continue
            name = self._free_name(key)
            first = firsts.setdefault(values.identity or name, name)
            if first != name:
                self.aliases[name] = first
            else:
                self.add(name, WEIGHT, values)

    def _free_name(self, key: str) -> str:
        name = self.rename(key)
        if name.rpartition(".")[2] in _FLAT:
            raise BadInput(
                f"'{self.where}' holds a flat parameter of FSDP, {key}, which does not say what is in it: save again"
                " under StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT."
            )
        if name in self.tensors or name in self.aliases:
            raise BadInput(f"'{self.where}' has '{name}' twice, once as '{key}': remove one of them.")
        return name

    def _leave(self, key: str, value: object) -> None:
        reason = value.reason if isinstance(value, Unusable) else f"it is no tensor but a {type(value).__name__}"
        if isinstance(value, Unusable) and not key.endswith("_extra_state"):
            raise BadInput(f"'{self.where}' has a weight '{key}' that cannot be read. {reason}")
        self.notes.append(f"{key} of the model is not taken over: {reason}")


def add_extra(source: Source, values: Mapping[str, Any]) -> None:
    """What was beside model and optimizer: to `extra` if JSON can hold it, else to `notes`."""
    for key, value in values.items():
        left: list[str] = []
        keep(source.extra, key, value, left)
        if left:
            source.notes.append(left[0] + (f", and {len(left) - 1} more in {key}" if len(left) > 1 else ""))


@dataclass(frozen=True)
class Sections:
    """The parts of what a program saved."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    rest: Mapping[str, Any]


def divide(tree: Mapping[str, Any], where: str) -> Sections:
    """Find model and optimizer under the keys that programs use, or a model's state dict that is not under any.

    Raises:
        BadInput: there are no weights; `where` names the checkpoint.
    """
    inner = [key for key, value in tree.items() if isinstance(value, Mapping) and _model_key(value)]
    if len(inner) == 1 and not _model_key(tree):
        inside = divide(tree[inner[0]], where)
        return Sections(inside.model, inside.optimizer, {**_without(tree, inner), **inside.rest})
    optimizer = next((key for key in OPTIMIZER_KEYS if isinstance(tree.get(key), Mapping)), None)
    if (model_key := _model_key(tree)) is not None:
        model, rest = tree[model_key], _without(tree, [model_key, optimizer])
    else:
        model = {key: value for key, value in tree.items() if isinstance(value, Values)}
        rest = _without(tree, [*model, optimizer])
    if not model:
        raise BadInput(
            f"'{where}' holds no weights: its entries are {listed([*map(repr, tree)], 8) or 'none'}. Give one"
            f" with a model's state dict under {', '.join(map(repr, MODEL_KEYS))}, or with nothing else."
        )
    return Sections(model, tree[optimizer] if optimizer is not None else None, rest)


def _model_key(tree: Mapping[str, Any]) -> str | None:
    """Under which key there is a model's state dict."""
    for key in MODEL_KEYS:
        entries = tree.get(key)
        if isinstance(entries, Mapping) and any(isinstance(leaf, Values | Unusable) for _, leaf in flattened(entries)):
            return key
    return None


def _without(tree: Mapping[str, Any], keys: Iterable[str | None]) -> dict[str, Any]:
    left_out = set(keys)
    return {str(key): value for key, value in tree.items() if key not in left_out}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _renamed(names: Collection[str], known: Collection[str]) -> Callable[[str], str]:
    """How to take what wrappers put into names away: FSDP, checkpointing and compile anywhere, DDP in front."""
    known, prefix = set(known), ""
    unwrapped = [_unwrapped(name) for name in names]
    while unwrapped and not known.intersection(unwrapped) and all(name.startswith("module.") for name in unwrapped):
        unwrapped = [name.removeprefix("module.") for name in unwrapped]
        prefix += "module."
    return lambda name: _unwrapped(name).removeprefix(prefix)
