"""What the planner promises of a run, before it starts and beside what was measured.

as_setup  what a configuration means to the planner
planned   its estimate of a run
summary   promised beside measured, at the end of a run
"""
