"""A Terrazzo document on its way out: settings that are taken over as they are."""

from __future__ import annotations

from terrazzo.config import CONFIG_KEYS
from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.terrazzo.paths import KEY_OF

__all__ = ["TerrazzoDraft"]


class TerrazzoDraft(Draft):
    """A draft of a Terrazzo document."""

    def __init__(self, description: Description) -> None:
        super().__init__(description, "Terrazzo")

    def carry(self, *paths: str) -> None:
        """Write settings of which each has a key that takes its value as it is."""
        for path in paths:
            if self.is_set(path):
                self._carry(path, KEY_OF.get(path, path))

    def _carry(self, path: str, key: str) -> None:
        value, origin, row = self.setting(path).value, self.setting(path).origin, CONFIG_KEYS[key]
        null = row.null and row.default is not None  # None is a value, too
        if (origin == "default" and value == row.default) or (value is None and not null):
            self.implied(path)
        else:
            self.put(path, key, list(value) if isinstance(value, tuple) else value)
