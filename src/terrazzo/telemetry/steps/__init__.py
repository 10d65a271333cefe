"""What is measured of a step.

metrics        of a log step
memory         of this process, and of its machine
step_recorder  where the time of a step went, by phase and by cause
"""
