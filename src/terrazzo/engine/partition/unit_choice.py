"""Choice of the modules that become units, whose weights are gathered together; the root takes what is in none.

The first row that finds any holds:

    rule                                                 of                            becomes units
    what the user asks for                               units=[Block], "layers.*"     modules of that class, or name
    the model's own list, `_no_split_modules`            LlamaForCausalLM              each LlamaDecoderLayer
    classes that repeat in lists of layers (a ModuleList, a Sequential, a ModuleDict of numbered keys):
      the heaviest                                       ModuleList of 12 Block        each Block
      others as heavy as one unit                        encoder.layers, decoder.layers of nn.Transformer
                                                                                       each layer of both
      lighter ones in a list beside a unit               ModuleList of Block, Skip     each Block, and each Skip
      in place of an item without a forward, its blocks  ModuleList of ModuleDict      each attention and each MLP
      in place of a large stage, its blocks              four Sequential of Block      each Block
    modules with a million parameters of their own       three nn.Linear(4096, 4096)   each Linear

A layer without children and with less than a million parameters is no block: it stays in the root. A stage is an item
most of which are blocks alike, in a list of its own (`layer_lists`). Containers have no forward, which alone tells when
weights are needed, and are never units.
"""

from __future__ import annotations

from torch import nn

from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.engine.partition.asked_units import Units, asked_units
from terrazzo.engine.partition.layer_lists import MIN_UNIT_NUMEL, children_of, is_large, runs
from terrazzo.engine.partition.repeated_blocks import repeated_blocks

__all__ = ["find_units"]


def find_units(model: nn.Module, units: Units | None, named: str = "units") -> tuple[list[str], str]:
    """Names of the modules that become units, in registration order, and why these.

    Args:
        units: what the user asked for; None: nothing.
        named: what the user knows `units` by, for errors.

    Raises:
        BadInput: a class or glob matches nothing, or containers alone.
    """
    with absent_in_place(model):
        if units is not None:
            return asked_units(model, units, named), "as asked"
        names, kinds = _declared(model)
        if names:
            return names, f"the model's own list of blocks: {', '.join(sorted(kinds))}"
        names, repeated = repeated_blocks(model)
        if names:
            return names, f"the repeated block{'s' * (len(repeated) > 1)} {' and '.join(repeated)}"
        large = [name for name, module in children_of(model) if is_large(module) and runs(module)]
        return large, f"modules with at least {MIN_UNIT_NUMEL:,} parameters of their own"


def _declared(model: nn.Module) -> tuple[list[str], set[str]]:
    """Modules of the classes in `_no_split_modules`, and these; a module's own list is for all that is inside it."""
    kinds, blocks, spoken_for = set[str](), set[nn.Module](), set[nn.Module]()
    for module in model.modules():
        own = set(getattr(module, "_no_split_modules", None) or ())
        if own and module not in spoken_for:
            spoken_for.update(module.modules())
            kinds |= own
            blocks |= {part for part in module.modules() if type(part).__name__ in own and runs(part)}
    return [name for name, module in children_of(model) if module in blocks], kinds
