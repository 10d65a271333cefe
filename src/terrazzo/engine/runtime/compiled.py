"""What torch's compiler has made of modules, and whether it asks."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["compilation_of", "has_fixed_addresses", "is_of_compiler"]

_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor")


def compilation_of(module: nn.Module | None) -> Any:
    """A module as torch has compiled it; None where it has not."""
    if module is None:
        return None
    either = (module._compiled_call_impl, module.forward)
    return next((each for each in either if hasattr(each, "_torchdynamo_orig_callable")), None)


def has_fixed_addresses(compilation: Any) -> bool:
    """Whether torch runs it as a CUDA graph, which reads weights at fixed addresses."""
    config = getattr(compilation, "get_compiler_config", lambda: None)() or {}  # of inductor's alone
    return bool(config.get("triton.cudagraphs"))


def is_of_compiler(module_name: str) -> bool:
    """Whether code of that module looks at a parameter to compile what uses it, and writes nothing."""
    return module_name.startswith(_COMPILERS)
