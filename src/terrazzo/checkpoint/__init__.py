"""Checkpoints: a folder of safetensors files and one JSON manifest, written by any plan, read by any other.

    tz.checkpoint.save("runs/a/step-00000100", model, optimizer, extra={"step": 100})
    extra = tz.checkpoint.load("runs/a/step-00000100", model, optimizer)

Each rank writes the element ranges it owns; reading asks for ranges, whoever wrote them. A folder gets its name only
when it is complete and on disk. Nothing is pickled.
"""

from terrazzo.checkpoint.read import load, load_weights
from terrazzo.checkpoint.store import complete_checkpoints, latest, prune, step_folder
from terrazzo.checkpoint.weights import SafetensorsWeights
from terrazzo.checkpoint.write import save

__all__ = [
    "SafetensorsWeights",
    "complete_checkpoints",
    "latest",
    "load",
    "load_weights",
    "prune",
    "save",
    "step_folder",
]
