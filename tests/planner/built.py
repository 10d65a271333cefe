"""Models that transformers alone can build, built in this process: another one would import for seconds first."""

from __future__ import annotations

import json
from typing import Any

from terrazzo.planner.model import meta

__all__ = ["ASKED", "answer_here"]

ASKED = "terrazzo.planner.model.transformers._answer"
"""In whose place `answer_here` is put."""


def answer_here(request: str, name: str) -> Any:
    return json.loads(json.dumps(meta.answer(json.loads(request))))
