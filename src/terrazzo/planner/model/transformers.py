"""The shape of a model that only `transformers` can tell: another process makes its modules on the meta device.

A config may come from anyone. None makes code run that is not already in `transformers`, nothing is downloaded, and a
config that would take memory or time without end is refused, or stopped there. What comes back is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.messages import install, shortened
from terrazzo.planner.caching import once
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape
from terrazzo.processes.tether import tethered

__all__ = ["harmless", "shape_of_built"]

MAX_DEPTH = 16
MAX_SIZE = 1 << 20
"""The largest number in a config that may become a width, or the length of a list."""
MAX_LAYERS = 1_000
MAX_SECONDS = 60
"""Time for the import of `transformers`, some three seconds on one core, and for all modules of a model."""

_UNBOUNDED = (
    "vocab",
    "position",
    "token",
    "theta",
    "seq",
    "length",
    "window",
    "seed",
    "freq",
    "context",
    "max_",
    "_id",
)
"""Parts of the names of numbers that make no lists and no modules, and are large in real configs."""

IMPLEMENTATIONS = frozenset(
    {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "batched_mm", "grouped_mm"}
)
"""Names of attention and expert kernels that transformers or an installed package has."""

_IMPLEMENTATIONS = frozenset({"attn_implementation", "experts_implementation"})

_IGNORED = frozenset({"model_type", "quantization_config", "dtype", "torch_dtype", "pretraining_tp"})


def shape_of_built(values: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of the causal language model that `transformers` makes of `values`.

    Raises:
        BadInput: `transformers` is missing, does not know the architecture or refuses the config; the config names code
            of its own; or its sizes are beyond any model.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput(
            f"{name}: model_type is {model_type!r}; it names the architecture, such as 'llama' or 'gpt2'. Add it, "
            "as the config.json of a Hugging Face model has it."
        )
    known = {key: value for key, value in harmless(values, name).items() if key not in _IGNORED}
    if find_spec("transformers") is None:
        raise BadInput(
            f"The architecture {model_type!r} is not among those whose shape is known here, and the package "
            f"'transformers', which could tell, is not installed. {install('hf')}. Known without it: "
            f"{', '.join(FAMILIES)}."
        )
    try:
        request = json.dumps({"name": name, "model_type": model_type, "values": known})
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}: the config holds what no config.json can ({error}). Remove it.") from error
    answer = _answer(request, name)
    if "error" in answer:
        raise BadInput(answer["error"])
    return _shape(answer)


@once
def _answer(request: str, name: str) -> dict[str, Any]:
    """What `terrazzo.planner.model.meta` says of the config, in a process of its own, which can be stopped."""
    program = tethered("-m", "terrazzo.planner.model.meta", flags=("-P",))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            program,
            input=request.encode(),
            capture_output=True,
            env=environment,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"{name}: transformers was still building this model after {MAX_SECONDS} s, and was stopped. Lower its "
            "number of layers or experts."
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BadInput(
            f"{name}: the process in which transformers builds this model ended with exit code {done.returncode}"
            f"{f' ({shortened(said[0])})' if said else ''}. Correct the config, or the installation of torch and "
            "transformers."
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _shape(answer: Mapping[str, Any]) -> ModelShape:
    """The inverse of `dataclasses.asdict`."""
    return ModelShape(**{**answer, "units": tuple(_unit(unit) for unit in answer["units"])})


def _unit(values: Mapping[str, Any]) -> UnitShape:
    tensors = tuple(TensorShape(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in values["tensors"])
    block = BlockShape(**values["block"]) if values["block"] else None
    return UnitShape(values["name"], tensors, values["count"], block, values["buffer_bytes"])


def harmless(values: Mapping[str, Any], name: str, depth: int = 0) -> dict[str, Any]:
    """A config without what could fetch or run anything, with every number in bounds. Raises: `BadInput`."""
    if depth > MAX_DEPTH:
        raise BadInput(f"{name}: the config is nested more than {MAX_DEPTH} deep, so it is no model config.")
    if "auto_map" in values:
        raise BadInput(
            f"{name}: the config has an 'auto_map': it asks to run Python code that comes with the model, which is "
            "never done here. Use an architecture that transformers itself has, or build the model in your own program "
            "and plan for the module."
        )
    if values.get("use_pretrained_backbone"):
        raise BadInput(
            f"{name}: use_pretrained_backbone asks for a download, which is never made here. Set it to false."
        )
    for key in _IMPLEMENTATIONS & values.keys():
        _check_implementation(key, values[key], name)
    # One that begins with _ is transformers' own note, and can name a kernel as well.
    public = {key: value for key, value in values.items() if isinstance(key, str) and not key.startswith("_")}
    return {key: _bounded_value(key, value, name, depth) for key, value in public.items()}


def _check_implementation(key: str, value: Any, name: str) -> None:
    """Refuse kernels that transformers would fetch and run: those named as `organisation/repository`."""
    for each in value.values() if isinstance(value, Mapping) else (value,):
        if each is not None and not (isinstance(each, str) and each in IMPLEMENTATIONS):
            raise BadInput(
                f"{name}: {key} is {each!r:.80}, which may be code to be fetched and run; that is never done here. "
                f"Use one of {', '.join(sorted(IMPLEMENTATIONS))}, or remove the key."
            )


def _bounded_value(key: str, value: Any, name: str, depth: int) -> Any:
    if isinstance(value, Mapping):
        return harmless(value, name, depth + 1)
    if isinstance(value, list | tuple):
        if depth > MAX_DEPTH or len(value) > MAX_LAYERS:
            raise BadInput(f"{name}: {key} holds {len(value):,} entries, far more than any model's. Correct it.")
        _check_repeats(key, value, name)
        return [_bounded_value(key, item, name, depth + 1) for item in value]
    limit = MAX_LAYERS if "layer" in key and "norm" not in key else MAX_SIZE
    bounded = not any(part in key for part in _UNBOUNDED) or "layer" in key
    if type(value) is int and bounded and abs(value) > limit:
        raise BadInput(
            f"{name}: {key} is {value:,}, far more than any model's; at most {limit:,} is taken. Correct it."
        )
    return value


def _check_repeats(key: str, value: Sequence[Any], name: str) -> None:
    """A number beside a list may say how often that is repeated, as in GPT-Neo's `attention_types`."""
    entries = sum(len(item) for item in value if isinstance(item, list | tuple))
    times = max((abs(item) for item in value if type(item) is int), default=0)
    if entries * times > MAX_LAYERS:
        raise BadInput(
            f"{name}: {key} repeats {entries:,} entries {times:,} times, far more than any model has layers; at most "
            f"{MAX_LAYERS:,} in all are taken. Correct it."
        )
