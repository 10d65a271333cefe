"""The seconds of a step, and what bounds it."""
