"""What the planner says about a run: before it starts, beside what is measured, and in reviews.

as_setup      translates a configuration into the planner's terms
run_estimate  the planner's estimate of a run
summary       what was promised beside what was measured, at the end of a run
rank_count    whether a run has too many ranks or too few
run_review    reviews a run from its folder: its verdict, its tables and its page
"""
