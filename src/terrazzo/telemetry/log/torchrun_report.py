"""The file that tells torchrun why a rank failed, for torchrun's own report on screen."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

__all__ = ["report_to_torchrun", "torchrun_file"]


def torchrun_file() -> Path | None:
    """FOLDER/attempt_N/LOCAL_RANK/error.json; None if torchrun did not start this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def report_to_torchrun(message: str, callstack: str = "") -> None:
    """Have torchrun show this message, and log the call stack, as torch's own error handler would."""
    if (file := torchrun_file()) is not None:
        more = {"timestamp": str(int(time.time())), **({"py_callstack": callstack} if callstack else {})}
        with contextlib.suppress(OSError):
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))
