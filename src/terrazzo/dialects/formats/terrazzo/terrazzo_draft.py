"""A Terrazzo document on its way out: what is left to defaults, and what is taken over as it is."""

from __future__ import annotations

from terrazzo.config import CONFIG_KEYS
from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.terrazzo.paths import KEY_OF

__all__ = ["TerrazzoDraft"]


class TerrazzoDraft(Draft):
    """A draft of a Terrazzo document."""

    def __init__(self, description: Description) -> None:
        super().__init__(description, "Terrazzo", "terrazzo")

    def left_to_defaults(self, *paths: str) -> bool:
        """Whether there is nothing to write for these: not set, or Terrazzo's own defaults."""
        present = [self.setting(path) for path in paths if self.is_set(path)]
        if not present:
            return True
        own = self.own and not any(setting.key for setting in present)
        if own:
            self.implied(paths)
        return own

    def carry(self, *paths: str) -> None:
        """Settings of which each has a key that takes its value as it is."""
        for path in paths:
            if not self.left_to_defaults(path):
                self._carry(path, KEY_OF.get(path, path))

    def _carry(self, path: str, key: str) -> None:
        value, origin = self.setting(path).value, self.setting(path).origin
        default = not self.own and origin == "default" and value == CONFIG_KEYS[key].default
        null = CONFIG_KEYS[key].null and CONFIG_KEYS[key].default is not None  # None is a value, too
        if default or (value is None and not null and (not self.own or not self.setting(path).key)):
            self.implied(path)
        else:
            self.put(path, key, list(value) if isinstance(value, tuple) else value)
