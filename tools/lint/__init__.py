"""The rules of the tree, a module for each kind; `python -m tools.lint` checks them."""
