"""The native library, loaded, with the signatures of its C interface. It has to be loaded before torch asks for CUDA.

torch asks once, while it is imported, and remembers the answer.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from typing import Any

from hostcuda import build

__all__ = ["CALLBACK", "native"]

CALLBACK = ctypes.CFUNCTYPE(None, c_char_p, c_char_p)

_SIGNATURES: dict[str, tuple[Any, ...]] = {  # the result's type, and those of the arguments
    "start": (None, CALLBACK, c_int, c_int),
    "get_device": (c_int,),
    "set_device": (None, c_int),
    "go_back_to_device": (None, c_int),
    "get_stream": (c_int64, c_int),
    "set_stream": (None, c_int, c_int64),
    "name_stream": (None, c_int, c_int64, c_char_p),
    "synchronize": (None, c_int),
    "sleep": (None, c_int, c_int64, c_double),
    "ready_s": (c_double, c_int, c_int64),
    "launch": (c_int64, c_int, c_int64, c_double, c_double),
    "postpone": (None, c_int, c_int64, c_void_p, c_int64, c_double),
    "use": (None, c_int, c_int64, c_void_p, c_int64, c_int, c_char_p),
    "use_on_host": (None, c_void_p, c_int64, c_int, c_char_p),
    "tell": (c_int64,),
    "hear": (None, c_int64),
    "forget": (None, c_int64),
    "name_thread": (None, c_char_p),
    "pin": (None, c_void_p, c_int64),
    "unpin": (None, c_void_p),
    "set_speeds": (None, c_double, c_double, c_double, c_double),
    "host_time_s": (c_double,),
    "spent_s": (c_double, c_int),
    "event_time_s": (c_double, c_void_p),
    "record_spans": (None, c_int),
    "span_count": (c_int64,),
    "spans": (None, c_void_p, c_int64),
    "record_events": (None, c_int),
    "event_count": (c_int64,),
    "events": (None, c_void_p, c_int64),
    "allocated": (c_int64, c_int),
    "peak": (c_int64, c_int),
    "reset_peak": (None, c_int),
}


class _Native:
    """The functions of `interface.cpp`, without their prefix, once they are loaded."""

    def load(self) -> None:
        """Raises: `RuntimeError` when torch has been imported before."""
        if "torch" in sys.modules:
            raise RuntimeError("hostcuda.load() comes too late: torch has been imported, and has asked for CUDA.")
        built = build.library()
        for needed in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
            ctypes.CDLL(str(build.torch_libraries() / needed), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, f"hc_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("There is no simulated device: call hostcuda.load() before torch is imported.")


native = _Native()
