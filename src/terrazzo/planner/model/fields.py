"""Reading a config's fields under a family's own names and defaults, and refusing what no model can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, nearest, shortened
from terrazzo.name_globs import matches_any
from terrazzo.planner.model.rows import Architecture
from terrazzo.planner.model.shapes import Nonlinearity

__all__ = ["ATTENTION_DROPOUTS", "RESULT_DROPOUTS", "USUAL_KEYS", "Fields", "rotary_share"]

USUAL_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
    "window": ("sliding_window",),
    "window_from": ("max_window_layers",),
    "window_period": ("sliding_window_pattern",),
    "use_window": ("use_sliding_window",),
    "experts": ("num_experts", "num_local_experts"),
    "active": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "sparse_step": ("decoder_sparse_step",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
}
"""The usual keys of a size."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""How far a layer looks back, as transformers spells it."""

_SYNONYMS = frozenset({"hidden", "layers", "heads", "positions", "experts"})
"""Sizes that config classes also take under the usual key where their own differs (`attribute_map`)."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
RESULT_DROPOUTS = (
    "resid_pdrop",
    "hidden_dropout",
    "residual_dropout",
    "dropout",
    "hidden_dropout_prob",
    "resid_dropout",
)
"""Keys of what is dropped of the softmax of scores, and of what attention and MLP give."""

_NONLINEARITIES = ("activation_function", "hidden_act")

_ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")

LARGEST_OF: Mapping[str, int] = {"layers": 10_000, "heads": 1 << 16, "experts": 1 << 16, "vocab": 1 << 28}
LARGEST_SIZE = 1 << 24
LONGEST = 1 << 40
"""Bounds far above every model there is: what exceeds them is a mistake, and no answer about it would mean anything."""

_NEARLY = 0.9
"""Likeness of two keys (difflib's ratio) from which one is taken for the other misspelt: a letter wrong in ten."""

_MAY_BE_ZERO = frozenset(
    {"positions", "window", "window_from", "experts", "shared_ffn", "shared_experts", "dense_layers"}
)


class Fields:
    """The fields of one config, by this package's names for them."""

    def __init__(self, values: Mapping[str, Any], family: Architecture, name: str) -> None:
        self.values, self.family, self.name = values, family, name

    def key(self, field: str) -> str:
        """The key that the config uses for it, or ought to."""
        own = self.family.keys.get(field)
        usual = USUAL_KEYS.get(field, (field,))
        keys = [own] if own is not None and field not in _SYNONYMS else [own or usual[0], *usual]
        return next((key for key in keys if key in self.values), keys[0])

    def check_spelling(self) -> None:
        """Raises: `BadInput` where a key that decides a shape is missing and one that is none of them is nearly it.

        Other keys are ignored, of which configs are full, but of a family that says what may be there.
        """
        self._check_unknown()
        known = {key for keys in USUAL_KEYS.values() for key in keys} | set(self.family.keys.values())
        missing = {key for field in USUAL_KEYS if (key := self.key(field))} - set(self.values)
        for key in {key for key in self.values if not key.startswith("_")} - known:
            if near := nearest(key, missing, _NEARLY):
                raise BadInput(
                    f"{self.name}: {_short(key)} is no field of this family, and {near} is not given. Did you mean "
                    f"{near!r}? Rename it, or remove it."
                )

    def _check_unknown(self) -> None:
        if self.family.further is None:
            return
        sizes = dict.fromkeys(("vocab", "experts", "active", "expert_ffn", *self.family.keys, *self.family.defaults))
        known = [key for field in sizes for key in dict.fromkeys((self.key(field), self.family.keys.get(field))) if key]
        for key, value in self.values.items():
            if value is not None and key not in known and not matches_any(str(key), self.family.further):
                raise BadInput(
                    f"{self.name}: {_short(key)} is no key of such a config.{did_you_mean(str(key), known)} Keys are "
                    f"{', '.join((*known, *self.family.further))}."
                )

    def integer(self, field: str) -> int | None:
        """A size; None where the config says null, or where it says nothing and its class has no default."""
        key = self.key(field)
        if not key:
            return None
        value = self.values[key] if key in self.values else self.family.defaults.get(field)
        if value is None:
            return None
        lowest, highest = int(field not in _MAY_BE_ZERO), self._highest(field)
        if type(value) is not int or not lowest <= value <= highest:
            raise BadInput(
                f"{self.name}: {key} is {_short(value)}, but a whole number from {lowest} to {highest:,} is expected. "
                "Correct it in the config."
            )
        return value

    def required(self, field: str) -> int:
        """A size that the model cannot be without."""
        value = self.integer(field)
        if value is None:
            raise BadInput(
                f"{self.name}: {self.key(field)} is missing, and without it the model's shape is not known. Add it to "
                "the config."
            )
        return value

    def flag(self, field: str) -> bool:
        key = self.key(field)
        value = self.values.get(key)
        if value is None:
            return bool(self.family.defaults.get(field, False))
        if not isinstance(value, bool):
            raise BadInput(f"{self.name}: {key} is {_short(value)}, but true or false is expected.")
        return value

    def has(self, trait: bool | str) -> bool:
        """Whether a trait of the family is there: as it says, or as the flag does that it names."""
        return self.flag(trait) if isinstance(trait, str) else trait

    def indices(self, key: str) -> Sequence[int]:
        """A list of whole numbers; empty where there is none."""
        value = self.values.get(key) or []
        if not isinstance(value, list | tuple) or any(type(item) is not int for item in value):
            raise BadInput(f"{self.name}: {key} is {_short(value)}, but a list of layer numbers is expected.")
        return value

    def chosen_layers(self, key: str, layers: int) -> set[int]:
        """The layers that a list names by their numbers; none where there is no list."""
        chosen = set(self.indices(key))
        for layer in sorted(chosen):
            if not 0 <= layer < layers:
                raise BadInput(f"{self.name}: {key} has layer {layer}, and layers are 0 to {layers - 1}.")
        return chosen

    def nonlinearity(self) -> Nonlinearity:
        """That of the MLP; transformers writes `gelu_new` in plain operators."""
        usual = self.family.defaults.get("nonlinearity")
        if usual == "clamped":
            return "clamped"
        named = next((self.values[key] for key in _NONLINEARITIES if key in self.values), usual)
        return "plain_gelu" if named == "gelu_new" else "relu" if named == "relu" else "kernel"

    def drops(self, keys: Sequence[str]) -> bool:
        """Whether anything is dropped under one of these keys."""
        given = {key: self.values[key] for key in keys if self.values.get(key) is not None}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise BadInput(
                    f"{self.name}: {key} is {_short(value)}, but a probability from 0 to below 1 is expected."
                )
        return any(given.get(key, self.family.defaults.get(key)) for key in keys)

    def soft_cap(self, key: str) -> bool:
        """Whether scores, or logits, are kept within a cap by tanh; `key` is the config's."""
        value = self.values.get(key, self.family.defaults.get(key))
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise BadInput(f"{self.name}: {key} is {_short(value)}, but a number above 0, or null, is expected.")
        return value is not None

    def rotated(self, head_dim: int) -> int:
        """Channels of a query or key head of `head_dim` that a rotary embedding turns; 0 without one."""
        defaults, usual = self.family.defaults, self.family.rotary
        if not usual or self.flag("alibi"):
            return 0
        if "rope_dim" in defaults:
            return self.required("rope_dim")
        if "rotary_dim" in defaults:
            return min(head_dim, self.integer("rotary_dim") or head_dim)
        return int(head_dim * rotary_share(self.values, usual, self.name))

    def rotating(self, layers: int) -> list[bool]:
        """Which layers have a rotary embedding, of a family that has one: all, or of SmolLM3 all but every n-th."""
        if "no_rope_layer_interval" not in self.family.defaults:
            return [True] * layers
        if said := self.indices("no_rope_layers"):  # 1 for a layer with one
            return [bool(each) for each in self._of_each_layer("no_rope_layers", said, layers)]
        interval = self.required("no_rope_layer_interval")
        return [(n + 1) % interval != 0 for n in range(layers)]

    def windows(self, layers: int) -> list[int | None]:
        """How many tokens each layer looks back, None for all."""
        defaults = self.family.defaults
        window = self.integer("window") if "window" in defaults else None
        if not window or ("use_window" in defaults and not self.flag("use_window")):
            return [None] * layers
        kinds = self.values.get("layer_types")
        if kinds is not None:
            kinds = self._of_each_layer("layer_types", kinds, layers)
            for kind in kinds:
                if kind not in LAYER_TYPES:
                    raise BadInput(
                        f"{self.name}: layer_types has {_short(kind)}; entries are {' or '.join(LAYER_TYPES)}."
                    )
            return [window if kind == "sliding_attention" else None for kind in kinds]
        first = (self.integer("window_from") or 0) if "window_from" in defaults else 0
        period = self.integer("window_period") or self.family.windowed
        return [None if n < first or (period and (n + 1) % period == 0) else window for n in range(layers)]

    def _of_each_layer(self, key: str, values: Any, layers: int) -> Sequence[Any]:
        if not isinstance(values, list | tuple) or len(values) != layers:
            raise BadInput(
                f"{self.name}: {key} is {_short(values)}, but a list with one entry for each of the {layers} layers is "
                "expected."
            )
        return values

    def refused(self, field: str, why: str) -> BadInput:
        """The error that says why a value cannot be."""
        key = self.key(field)
        value = self.values.get(key, self.family.defaults.get(field))
        return BadInput(f"{self.name}: {key} is {_short(value)}, {why}.")

    def _highest(self, field: str) -> int:
        return LONGEST if field in ("positions", "window") else LARGEST_OF.get(field, LARGEST_SIZE)


def rotary_share(values: Mapping[str, Any], usual: float, name: str) -> float:
    """The share of a head's channels that a rotary embedding turns, or the usual one where a config says none.

    Raises:
        BadInput: it is no number above 0 and up to 1.
    """
    inner = values.get("rope_parameters") or values.get("rope_scaling")
    said = {**values, **inner} if isinstance(inner, Mapping) else values
    key, share = next(((key, said[key]) for key in _ROTARY_SHARES if said.get(key) is not None), ("", usual))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise BadInput(f"{name}: {key} is {_short(share)}, but a share above 0 and up to 1 is expected.")
    return float(share)


def _short(value: object) -> str:
    return shortened(repr(value))
