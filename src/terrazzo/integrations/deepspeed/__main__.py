"""Run an unmodified DeepSpeed script on this integration.

    torchrun --nproc-per-node 2 -m terrazzo.integrations.deepspeed script.py --its arguments
    torchrun --nproc-per-node 2 -m terrazzo.integrations.deepspeed -m package.module --its arguments

    deepspeed --module terrazzo.integrations.deepspeed script.py --its arguments

`import deepspeed`, and every import from inside it, then means this package, in this process alone.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from terrazzo.integrations import deepspeed as replacement
from terrazzo.integrations.deepspeed.absent import AbsentName
from terrazzo.integrations.shared.script_runner import run_and_exit
from terrazzo.processes.tether import become

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the script named first with the rest as its arguments; 2 if there is none.

    The deepspeed launcher puts --local_rank=N first, which a script of its own would get.
    """
    first = arguments[:1] if arguments and arguments[0].startswith("--local_rank=") else []
    arguments = arguments[len(first) :]
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        print(__doc__, file=sys.stderr)
        return 2
    _stand_in()
    named = 2 if arguments[0] == "-m" else 1
    become([*arguments[:named], *first, *arguments[named:]])
    return 0


def _stand_in() -> None:
    """Have every later import of `deepspeed` find this package. What that does not have is refused when it is used."""
    sys.modules["deepspeed"] = replacement
    for module in pkgutil.walk_packages(replacement.__path__, f"{replacement.__name__}."):
        if not module.name.endswith("__main__"):
            name = module.name.replace(replacement.__name__, "deepspeed", 1)
            sys.modules[name] = importlib.import_module(module.name)
    sys.meta_path.insert(0, _AbsentFinder())


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `deepspeed.X` for what the integration does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname.startswith("deepspeed.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentName(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
