"""What stays of a unit's full weights from forward to backward, where the plan does not say it alone."""

from __future__ import annotations

import enum

__all__ = ["Keep"]


class Keep(enum.Enum):
    """What stays of full weights from forward to backward, whatever the plan."""

    AS_PLANNED = "all, or what `between` names, as the plan says"
    ALL = "all"
    BETWEEN = "what `between` names: all are gathered again"

    @classmethod
    def of(cls, is_root: bool, beside_packed: bool) -> Keep:
        """Choose for one bucket of a unit. The root's weights would be gathered again at once; a unit with packed
        weights is gathered again in any case, and what the plan keeps of its others is put beside.

        Args:
            beside_packed: whether the unit has weights in 4 bits, which never stay.
        """
        if is_root:
            return cls.ALL
        return cls.BETWEEN if beside_packed else cls.AS_PLANNED
