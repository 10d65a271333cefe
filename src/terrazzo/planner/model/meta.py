"""The program that builds a model of `transformers` from a config, on the meta device and within bounds.

It reads a JSON object from its input, and writes the model's shape as another one, or why there is none.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.planner.model.modules import shape_of_module
from terrazzo.planner.model.shapes import ModelShape

__all__ = ["answer", "bounded", "causal_lm_config", "refused"]

MAX_REGISTRATIONS = 100_000
"""Modules and parameters: far above every model there is."""
MAX_BYTES = 2 << 30
"""Memory beyond what torch and `transformers` take; `MAX_REGISTRATIONS` take 0.7 GB of it."""


def main() -> None:
    """Answer the request on standard input, on standard output."""
    request = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        import_module("transformers")  # first: its own size has no part in the limit
        _limit_memory()
        reply = answer(request)
    json.dump(reply, sys.stdout)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelShape`, or under `error` why there are none.

    Args:
        request: a `name` for messages, the `model_type`, and the other `values` of the config.
    """
    name = request["name"]
    try:
        return asdict(_built_shape(request["model_type"], request["values"], name))
    except MemoryError:
        error = (
            f"{name}: transformers takes more than {MAX_BYTES >> 30} GiB of memory to build this model, even without "
            "its weights; no real one needs as much. Correct the config."
        )
    except BadInput as refusal:
        error = str(refusal)
    return {"error": error}


def _limit_memory() -> None:
    """Have allocations beyond `MAX_BYTES` fail from here on. Linux alone keeps to it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except OSError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _built_shape(model_type: str, values: Mapping[str, Any], name: str) -> ModelShape:
    import transformers

    config = causal_lm_config(transformers, model_type, values, name)
    try:
        with torch.device("meta"), bounded(name):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (BadInput, MemoryError):
        raise
    except Exception as error:
        raise refused(name, model_type, error) from error
    return shape_of_module(model, name)


def causal_lm_config(transformers: Any, model_type: object, values: Mapping[str, Any], name: str) -> Any:
    """The `PretrainedConfig` of `values`, of a causal language model.

    Raises:
        BadInput: `transformers` has no such model, or refuses the values; `name` is whose they are.
    """
    known: Mapping[str, Any] = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if not isinstance(model_type, str) or model_type not in known:
        raise BadInput(
            f"{name}: model_type is {model_type!r}, which transformers {transformers.__version__} does not know."
            f"{did_you_mean(str(model_type), known)} Correct it, or install a transformers that has it."
        )
    try:
        config = transformers.AutoConfig.for_model(model_type, **values)
    except MemoryError:
        raise
    except Exception as error:
        raise refused(name, model_type, error) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(
            f"{name}: model_type {model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}. Give a decoder such as 'llama', 'qwen3' or 'gpt2'."
        )
    return config


def refused(name: str, model_type: str, error: Exception) -> BadInput:
    """The error for a config that transformers does not take."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return BadInput(
        f"{name}: transformers cannot build a {model_type!r} from this config ({reason}). Correct the config."
    )


class _Bound(threading.local):
    """What a thread may still register of the model that it builds: `left` of `MAX_REGISTRATIONS`, None without one."""

    name = ""
    left: int | None = None


_BOUND = _Bound()


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Stops the construction of a model that registers more modules and parameters than any real one."""
    before = _BOUND.name, _BOUND.left
    _BOUND.name, _BOUND.left = name, MAX_REGISTRATIONS
    try:
        yield
    finally:
        _BOUND.name, _BOUND.left = before


def _registered(_owner: nn.Module, _key: str, _value: object) -> None:
    if _BOUND.left is None:
        return
    _BOUND.left -= 1
    if _BOUND.left < 0:
        raise BadInput(
            f"{_BOUND.name}: the config describes a model of more than {MAX_REGISTRATIONS:,} modules and parameters. "
            "Lower its number of layers or experts."
        )


# For good, and with the import: torch goes through its hooks without a lock, so that a hook which comes or goes while
# another thread builds a model makes that one fail.
register_module_module_registration_hook(_registered)
register_module_parameter_registration_hook(_registered)

if __name__ == "__main__":
    main()
