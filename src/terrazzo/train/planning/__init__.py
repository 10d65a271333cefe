"""What the planner says about a run.

as_setup      translates a configuration into the planner's terms
run_estimate  the planner's estimate of a run
"""
