"""Modules and parameters that come to a model, or to another place in it, after it has been sharded."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import chain

from torch import nn

from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.errors import Misuse
from terrazzo.messages import listed, warn

__all__ = ["ModuleTree"]


class ModuleTree:
    """The modules and parameters that a sharded model has had, and the names of its own.

    Args:
        names: of each parameter, its own first.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Parameter, tuple[str, ...]]) -> None:
        self._names, self._warned = names, False
        self._note(model)

    def _note(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._children = [module._modules for module in modules]
        self._were = [dict(children) for children in self._children]
        self._registers = [module._parameters for module in modules]
        self._registered = [*chain.from_iterable(map(dict.values, self._registers))]
        others = (each for each in self._registered if each is not None and note_of(each) is None)
        self._frozen = [each for each in others if not each.requires_grad]

    def _has_changed(self) -> bool:
        registered = chain.from_iterable(map(dict.values, self._registers))
        return not (
            all(map(operator.eq, self._children, self._were))
            and sum(map(len, self._registers)) == len(self._registered)
            and all(map(operator.is_, registered, self._registered))
            and not any(each.requires_grad for each in self._frozen)
        )

    def check(self, model: nn.Module, lets_in: bool) -> None:
        """Look at what has changed, if anything has; warns, once, of parameters under other names.

        Args:
            lets_in: whether other parameters may come: on one rank nobody's data are missing to them.

        Raises:
            Misuse: for trainable parameters that have come to the model.
        """
        if not self._has_changed():
            return
        now: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            now.setdefault(parameter, []).append(name)
        fresh = [names[0] for each, names in now.items() if each.requires_grad and note_of(each) is None]
        if fresh and not lets_in:
            raise Misuse(
                f"{listed([*map(repr, fresh)])} came to the model after tz.shard: on each rank it would be trained on "
                "that rank's data alone, and under fp16 by gradients that have the loss scale. Add modules and "
                "parameters, and unfreeze them, before tz.shard."
            )
        moved = [(own[0], now[each][0]) for each, own in self._names.items() if each in now and own[0] not in now[each]]
        if moved and not self._warned:
            self._warned = True
            was, now_named = moved[0]
            warn(
                f"Modules have been moved or wrapped after tz.shard: {was!r} is {now_named!r} now, and {len(moved)} "
                "parameters have other names. load_state_dict and checkpoints keep to the names of then. Change "
                "modules before tz.shard."
            )
        self._note(model)
