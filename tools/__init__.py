"""Tools of the project: pages made from code, and the check of its structure."""
