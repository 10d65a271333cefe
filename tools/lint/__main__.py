"""Checks what ruff and mypy do not: how modules import one another, finalizers that may wait, modules that a
package's docstring does not name, and size budgets.

    python -m tools.lint src/terrazzo [more folders, for the size budgets only]

Prints one `path:line: finding` per line and exits 1 when there are any. The rules are in the modules beside this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.lint.docstrings import check_map, check_module_lists
from tools.lint.finalizers import find_waits
from tools.lint.imports import check_imports
from tools.lint.sizes import check_distribution, check_sizes
from tools.lint.source import Finding, read_modules
from tools.lint.uses import check_collectives, check_devices, check_module_names, check_names


def check(root: Path, *, layered: bool) -> list[Finding]:
    """All findings below `root`; the rules about imports apply only to a `layered` package."""
    modules = read_modules(root)
    findings = [*check_sizes(modules), *check_distribution(root, modules)]
    if layered:
        findings += [
            *check_imports(modules),
            *check_names(modules),
            *check_module_names(modules),
            *check_module_lists(modules, root.name),
            *check_map(modules, root.name),
            *check_collectives(modules, root.name),
            *check_devices(modules, root.name),
            *find_waits(modules),
        ]
    return findings


def main(arguments: list[str]) -> int:
    """Check every root named; the first is the layered package."""
    roots = [Path(argument) for argument in arguments]
    if not roots or not all(root.is_dir() for root in roots):
        print(f"usage: python -m tools.lint PACKAGE_FOLDER [FOLDER ...]; got {arguments}", file=sys.stderr)
        return 2
    findings = [finding for i, root in enumerate(roots) for finding in check(root, layered=i == 0)]
    for finding in findings:
        print(finding)
    print(f"structure: {len(findings)} findings in {', '.join(arguments)}", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
