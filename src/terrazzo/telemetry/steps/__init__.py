"""What is measured in a step.

metrics        the numbers of a log step, and a stopwatch
memory         memory of this process and of its machine
step_recorder  where the time of a step went, by phase and by cause
time_left      how long a run still takes
"""
