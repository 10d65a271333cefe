"""The flight recorder: the last steps of each rank, exchange by exchange, in memory that outlives it.

ring        events of fixed size in shared memory, and how they are read back
recorder    what the engine tells, written there
folder      where the rings of a run are, while it goes on and when it has ended
spans       events as what began and ended
units       what each unit takes of a step
trace       all ranks on one line of time, as Chrome's trace format has it
"""
