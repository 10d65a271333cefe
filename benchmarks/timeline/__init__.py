"""Virtual step times of plans and of torch's own wrappers on one simulated device: `terrazzo bench --suite timeline`.

model        what is trained, at its own size and at the size that is simulated
machines     GPUs and links, and the figures of their likeness
contenders   who trains
measure      a step's parts, in a rank
rank         a rank's process: the device first, then torch
outcome      floors and ratios
above        what lies between a step and its floor
waits        what computation waits for, from the work on all streams
estimate     what the planner says of the same step
report       tables and a picture
suite        all of it
page         the targets in docs/performance.md
axes         a step in which ranks share matrices or sequences, in a rank
exposed      what of their exchanges nothing hides: a table, by a command of its own
staged       a step of a pipeline, in its ranks
bubbles      how long ranks of pipelines wait: a table, by a command of its own
"""
