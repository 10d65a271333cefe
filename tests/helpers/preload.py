"""What the server has imported before it forks: all that many tests and their programs ask for.

Terrazzo's modules keep nothing from their import but who the parent is (`forkserver.py`).
"""

import contextlib
import gc
import sys
import weakref
from importlib import import_module
from importlib.metadata import entry_points

import torch.library

OF_TORCH = ("_dynamo.testing", "_inductor.fx_passes.joint_graph", "distributed.checkpoint", "distributed.fsdp")
"""The second is nearly all that the first module that is compiled in a process asks for."""
OTHERS = ("accelerate", "lightning.pytorch", "peft", "pydantic", "safetensors.torch", "transformers", "typer", "yaml")
"""Of the tests' extras; the dearest take three seconds each."""
TERRAZZO = (
    "checkpoint.loading.load",
    "checkpoint.saving.background",
    "cli",
    "telemetry.attachment",
    "train.start_trainer",
)
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


_leave_operators_registered()
gc.freeze()  # no fork has to look at all this
