"""The rules of the tree that `tools/lint_structure.py` checks."""
