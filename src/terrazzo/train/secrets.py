"""What a configuration may hold that is nobody else's business: passwords in URLs."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["without_passwords"]

_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")


def without_passwords(value: Any) -> Any:
    """`value`, text or JSON, with `***` in place of user and password in each URL (`s3://key:secret@host/path`)."""
    if isinstance(value, str):
        return _USER_INFO.sub("***@", value)
    if isinstance(value, dict):
        return {key: without_passwords(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_passwords(entry) for entry in value]
    return value
