"""What a configuration may hold that is nobody else's business: passwords in URLs."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["without_passwords"]

_AFTER_SCHEME = re.compile(r"(?<=://)(?:(?!://)\S)+")
# A host and its port, and what ends them: the end of an authority, or of a URL inside a sentence.
_HOST = re.compile(r"(?:[\w.-]+|\[[\da-f:.]+\])(?::\d+)?(?=$|:$|[/?#'\"`,;)\]}>|\\])", re.IGNORECASE)


def without_passwords(value: Any) -> Any:
    """`value`, text or JSON, with `***` in place of user and password in each URL (`s3://key:secret@host/path`).

    An `@` in a path stays. A password may have an `@` or a `/` in it, which should have been percent-encoded. Of one
    with both, the `@` first, the end stays wherever it may as well be host and path: as in `key:a@host/b@c`.
    """
    if isinstance(value, str):
        return _AFTER_SCHEME.sub(lambda url: _hidden(url[0]), value)
    if isinstance(value, dict):
        return {key: without_passwords(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_passwords(entry) for entry in value]
    return value


def _hidden(url: str) -> str:
    """A URL after its `://`, up to the next blank."""
    authority = url.partition("/")[0]
    end = authority.rfind("@") + 1  # as every program takes a URL apart, and 0 for one without
    if not _HOST.match(url[end:]) and (end or ":" in authority):
        # What should be a host is none: the password goes on behind the slash. A quote may be the end of the URL.
        quote = re.search("['\"]", url[end:])
        end = max(end, url.rfind("@", end, end + quote.start() if quote else None) + 1)
    return f"***@{url[end:]}" if end else url
