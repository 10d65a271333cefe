"""Combinations that are known to be bad, with the reason and an alternative."""
