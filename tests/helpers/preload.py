"""What the server has imported before it forks: all that many tests and their programs ask for.

Terrazzo's modules keep nothing from their import but who the parent is (`forkserver.py`).
"""

import contextlib
import ctypes
import gc
import sys
import weakref
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import torch.library

OF_TORCH = ("_dynamo", "distributed.checkpoint", "distributed.fsdp")
OTHERS = ("accelerate", "lightning.pytorch", "peft", "pydantic", "safetensors.torch", "transformers", "typer", "yaml")
"""Of the tests' extras; the dearest take three seconds each."""
TERRAZZO = ("checkpoint.loading.load", "checkpoint.saving.background", "cli", "telemetry.attachment", "train.start")
"""And so nearly all that a rank runs: half a second."""

for name in (*(f"torch.{name}" for name in OF_TORCH), "tests.helpers.processes"):
    import_module(name)
for name in OTHERS:
    with contextlib.suppress(ImportError):
        import_module(name)
for name in TERRAZZO:
    import_module(f"terrazzo.{name}")
with contextlib.suppress(ImportError):  # it imports what is asked for
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer  # noqa: F401

for plugin in entry_points(group="pytest11"):  # what pytest imports itself in forks that are of it
    sys.modules.pop(plugin.module.partition(".")[0], None)


def _leave_operators_registered() -> None:
    """A program that ends would take apart what torch has registered: 40 ms, where the process goes anyway."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and alive[1] is torch.library._del_library:
            finalizer.atexit = False


def _move_to_large_pages() -> None:
    """A fork copies one entry for each page: with pages of 2 MiB it takes 12 ms in place of 30.

    Kernels before Linux 6.1 and other systems leave the pages as they are.
    """
    maps, size, collapse = Path("/proc/self/maps"), 1 << 21, 25  # MADV_COLLAPSE
    if not maps.exists():
        return
    advise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        if access == "rw-p" and name in ([], ["[heap]"]):
            for start in range(-(-first // size) * size, end - size + 1, size):
                advise(ctypes.c_void_p(start), ctypes.c_size_t(size), collapse)


_leave_operators_registered()
_move_to_large_pages()
gc.freeze()  # no fork has to look at all this
