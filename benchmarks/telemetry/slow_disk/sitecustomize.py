"""Makes a drive slow for whichever Python has this folder in PYTHONPATH: the first flush in a while lasts."""

import os
import time
from typing import Any

_SLOW_S = float(os.environ.get("TERRAZZO_SLOW_S", "0"))
_flush, _last = os.fsync, [0.0]


def _slow_flush(descriptor: Any) -> None:
    if time.monotonic() - _last[0] > 0.3:
        time.sleep(_SLOW_S)
        _last[0] = time.monotonic()
    _flush(descriptor)


os.fsync = _slow_flush  # type: ignore[assignment]
