"""Writing Lightning's word for precision, and a `mixed_precision` beside it where that misses fewer dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import LOADED, PATHS, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.wording import as_text
from terrazzo.dialects.formats.lightning.precision import POLICY, WORDS, precision_row
from terrazzo.dialects.formats.shared.fsdp_words import TORCH_NAMES

__all__ = ["write_precision"]

_POLICY = "trainer.strategy.init_args.mixed_precision"
_PLAIN = tuple(word for word in WORDS if isinstance(word, str) and "-" in word and "engine" not in word)
_WORDS = tuple(sorted(_PLAIN, key="32-true".__ne__))
"""Lightning's full words; of several that fit alike the first is taken, which casts no weights to 16 bits."""


def write_precision(draft: Draft, kind: str, context: ReadingContext) -> None:
    """The word that misses the fewest dtypes, alone or, under FSDP, with a `mixed_precision` of its own beside it."""
    wanted = {path: draft.setting(path) for path in PATHS if path.startswith("precision.") and draft.is_set(path)}
    if "precision.compute" not in wanted:
        return
    policies = (None, _policy(draft)) if kind == "FSDPStrategy" else (None,)
    count = draft.setting("batch.accumulation")
    rows = [
        (word, policy, precision_row(kind, Setting(word, "file"), count, context, policy)[0])
        for policy in policies
        for word in _WORDS
    ]
    word, policy, row = min(rows, key=lambda each: _misses(wanted, each[2]))
    draft.write("trainer.precision", word)
    for state, setting in (policy or {}).items():
        draft.write(f"{_POLICY}.{POLICY[state]}", f"torch.{TORCH_NAMES[setting.value]}")  # which LightningCLI imports
    for path, setting in wanted.items():
        does, state = row.get(path), path.partition(".")[2]
        if does is None:  # no word decides it: `finish` says so of what asks for something
            continue
        if _is_met(path, wanted, row):
            cast = "" if does.value == setting.value or not setting.value else _cast(word, does.value)
            key = f"{_POLICY}.{POLICY[state]}" if policy and state in policy else "trainer.precision"
            draft.holds(path, cast, key)
        elif path == "precision.autocast":
            how = "runs under autocast: norms, softmax and losses compute in fp32" if does.value else "has no autocast"
            draft.lossy(path, f"under {word} the forward {how}", "trainer.precision")
        elif setting.value == LOADED and path == "precision.buffers":
            draft.lossy(path, f"Lightning casts them to {does.value}, and here they stay as loaded")
        elif setting.value == LOADED:
            draft.lossy(
                path, f"it depends on the dtype in which the model is loaded; {word} is written: say --load-dtype"
            )
        else:
            draft.lossy(path, f"under {word} it is {as_text(does.value)}", "trainer.precision")


def _policy(draft: Draft) -> dict[str, Setting[Any]]:
    """The dtypes that `mixed_precision` can say, as far as they are known. Without one, buffers are left alone."""
    wanted = {state: draft.setting(f"precision.{state}") for state in POLICY}
    return {state: setting for state, setting in wanted.items() if setting.value in TORCH_NAMES}


def _cast(word: str, dtype: str) -> str:
    return f"{word} casts them to {dtype}, in which the model is loaded"


def _is_met(path: str, wanted: Mapping[str, Setting[Any]], row: SettingsByPath) -> bool:
    """Whether a word does what is wanted. Buffers that stay as loaded may be cast to what the model is loaded in."""
    does, value = row[path].value, wanted[path].value
    if path == "precision.buffers" and value == LOADED and path in row:
        masters = wanted.get("precision.master")
        return does == LOADED or (masters is not None and does == masters.value)
    return bool(does == value) or (not does and not value)


def _misses(wanted: Mapping[str, Setting[Any]], row: SettingsByPath) -> tuple[int, int]:
    """How many dtypes a word gets wrong; what is stored and computed counts before the rest."""
    wrong = [path for path in wanted if path in row and not _is_met(path, wanted, row)]
    known = [path for path in wrong if wanted[path].value != LOADED or path == "precision.buffers"]
    grave = ("precision.compute", "precision.master", "precision.loss_scaling")
    return sum(path in grave for path in known), len(known)
