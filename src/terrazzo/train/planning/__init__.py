"""What the planner says of a run: before it starts, beside what is measured, and when it is reviewed.

as_setup      what a configuration means to the planner
run_estimate  its estimate of a run
summary       promised beside measured, at the end of a run
rank_count    whether a run has too many ranks or too few
run_review    a run reviewed from outside, by what is in its folder: its verdict, its tables and its page
"""
