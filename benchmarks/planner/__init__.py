"""How far the planner is from published measurements: `python -m benchmarks.planner`."""
