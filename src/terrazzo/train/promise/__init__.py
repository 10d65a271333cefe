"""What the planner promises of a run, before it starts and beside what was measured."""
