"""The flight recorder: the last steps of each rank, exchange by exchange, in memory that may outlive the rank.

ring        a ring buffer of events in shared memory, and how it is read back
recorder    writes what the engine reports into the ring
folder      where the rings of a run are, while it runs and after it has ended
spans       pairs events into spans of time
units       what each unit takes of a step
clocks      what clocks of several machines differ by
trace       the spans of all ranks in Chrome's trace format
"""
