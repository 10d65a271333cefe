"""Writing a document setting by setting, so that none is dropped in silence.

    draft = Draft(description, "FSDP2")
    draft.put("precision.reduce", "mp_policy.reduce_dtype", "bfloat16")
    draft.implied("prefetch.backward")
    return draft.finish()

What nobody has spoken of when the draft finishes is lossy, unless its value asks for nothing or follows from others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.agreement import OF_AXIS, has_no_effect, same_value
from terrazzo.dialects.core.description import Description, Setting, asks_for_nothing
from terrazzo.dialects.core.dialect import Writing
from terrazzo.dialects.core.key_verdict import KeyVerdict, VerdictKind, worst
from terrazzo.dialects.core.keys import Key
from terrazzo.dialects.core.wording import as_text, found, meant
from terrazzo.documents.dotted_keys import put, split

__all__ = ["Draft"]


class Draft:
    """A document under way.

    Args:
        description: what is to be said.
        library: the target's name in messages.
        keys: rows of what the target knows.

    Attributes:
        document: nested, so far.
    """

    def __init__(self, description: Description, library: str, keys: Mapping[str, Key] | None = None) -> None:
        self.description, self.library, self.keys = description, library, keys or {}
        self.document: dict[str, Any] = {}
        self._verdicts: dict[str, KeyVerdict] = {}
        self._missing: list[KeyVerdict] = []

    def setting(self, path: str) -> Setting[Any]:
        return self.description[path]

    def value(self, path: str, default: Any = None) -> Any:
        """The value at a path; the default where it is unset or None."""
        value = self.description[path].value
        return default if value is None else value

    def is_set(self, path: str) -> bool:
        return self.description[path].is_set

    # -- what becomes of a setting ---------------------------------------------------------------------------------

    def put(
        self, paths: str | Iterable[str], key: str, value: Any, why: str = "", kind: VerdictKind = "applied"
    ) -> None:
        """Write a key, which says one or more settings; `why`: a remark. Unset ones get no verdict."""
        self.write(key, value)
        self._mark(paths, kind, key, why)

    def copy(self, path: str, key: str) -> None:
        """Write a setting's value as it is, if it is set and not None."""
        if (value := self.value(path)) is not None:
            self.put(path, key, list(value) if isinstance(value, tuple) else value)
        else:
            self.implied(path)

    def option(self, path: str, key: str, words: Mapping[Any, Any] | None = None) -> None:
        """Write a setting that one key says, in the target's words, unless the key's default says the same."""
        value = self.value(path)
        if words is not None and value is not None and value not in words:
            self.lossy(path, f"{self.library} cannot say {found(value)}: {_listed(words)}")
        elif value is None or value == self.keys[key].neutral:
            self.implied(path)
        else:
            value = words[value] if words is not None else value
            self.put(path, key, list(value) if isinstance(value, tuple) else value)

    def implied(self, paths: str | Iterable[str], why: str = "", key: str = "") -> None:
        """The target does so without a key, or by `key`, already written, and the document read back says so.

        `why`: a remark.
        """
        self._mark(paths, "applied", key, why)

    def holds(self, paths: str | Iterable[str], why: str, key: str = "") -> None:
        """The setting holds, although the document read back says nothing of it, or another value.

        A claim that nothing confirms: `implied` is for what the document says itself.

        Args:
            why: how it holds. Without a word there is no claim.
            key: that says it, already written.
        """
        self._mark(paths, "applied", key, why, holds=bool(why))

    def does(self, path: str, value: Any) -> None:
        """The target has no key for it, and does it in one of `_WAYS`, which may be what is asked for."""
        asked = self.description[path].value
        if has_no_effect(self.description, path) or same_value(path, asked, value):
            self.implied(path)
        else:
            ways = _WAYS[path]
            self.lossy(path, f"in {self.library} {ways[value]}; asked was: {ways.get(asked, as_text(asked))}")

    def lossy(self, paths: str | Iterable[str], why: str, key: str = "") -> None:
        self._mark(paths, "lossy", key, why)

    def missing(self, path: str, key: str, why: str) -> None:
        """The target needs a key that the source leaves to code."""
        self._missing.append(KeyVerdict(path, self.description[path].value, "lossy", key, why))

    def refuse(self, paths: str | Iterable[str], why: str) -> None:
        """The target cannot do this; `why` says what to do instead."""
        self._mark(paths, "refused", "", why)

    def write(self, key: str, value: Any) -> None:
        """Write a dotted key that no setting stands behind."""
        put(self.document, key, value)

    def has(self, key: str) -> bool:
        place: Any = self.document
        for name in split(key):
            if not isinstance(place, dict) or name not in place:
                return False
            place = place[name]
        return True

    def has_verdict(self, path: str) -> bool:
        """Whether a setting has its verdict."""
        return path in self._verdicts

    def _mark(self, paths: str | Iterable[str], kind: VerdictKind, key: str, why: str, *, holds: bool = False) -> None:
        """The gravest verdict on a setting stands, in whatever order they come; of equal ones the last."""
        for path in [paths] if isinstance(paths, str) else paths:
            setting, before = self.description[path], self._verdicts.get(path)
            if setting.is_set and (before is None or worst([before.kind, kind]) == kind):
                self._verdicts[path] = KeyVerdict(path, setting.value, kind, key, why, holds=holds)

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> Writing:
        """The document, with a verdict for every setting that is set."""
        for path, setting in self.description.items():
            if not setting.is_set or path in self._verdicts:
                continue
            follows = setting.origin == "derived" or has_no_effect(self.description, path)
            axis = self._verdicts.get(f"mesh.{OF_AXIS.get(path)}")
            if axis is not None and axis.kind in ("lossy", "refused") and not axis.target:
                why = f"without {axis.key} it says nothing"
                self._mark(path, "lossy" if setting.keys else "applied", "", why, holds=not setting.keys)
            elif path == "precision.output" and setting.value == self.value("precision.compute"):
                self.holds(path, "the model returns what it computes in")
            elif asks_for_nothing(path, setting.value) or follows:
                self.implied(path)
            else:
                self.lossy(path, f"{self.library} has nothing for {path} = {meant(path, setting.value)}")
        return Writing(self.document, tuple(self._verdicts.values()), tuple(self._missing))


def _listed(words: Mapping[Any, Any]) -> str:
    return f"it has {', '.join(str(word) for word in dict.fromkeys(words))}"


_WAYS: Mapping[str, Mapping[Any, str]] = {
    "optimizer.decay": {
        "all": "all parameters have weight decay",
        "matrices": "norms and biases have no weight decay",
    },
    "training.loss_mean": {
        "tokens": "a step's loss is the mean of its tokens",
        "rank_tokens": "a step's loss is the mean of its ranks' means",
        "micro_batches": "a step's loss is the mean of its micro-batches' means",
    },
    "training.nonfinite": {
        "go_on": "a step that is not finite is learnt from",
        "stop": "a step that is not finite ends the run",
        "skip": "a step that is not finite is left out",
        "rollback": "a step that is not finite is gone back from, to a checkpoint",
    },
    "schedule.decay_shape": {
        "linear": "the final decay is a line",
        "cosine": "the final decay is a cosine",
        "sqrt": "the final decay is 1 - √t",
        "exponential": "the final decay is 2^(1-t) - 1",
    },
}
"""What libraries do by themselves, in words by path and value."""
