"""Everything that can be refused before a process is started or a byte is written."""

from terrazzo.train.preflight.checks import check

__all__ = ["check"]
