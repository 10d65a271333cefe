"""What a stock optimizer is given to step: flat runs of master weights, in the place of parameters.

    group_runs          members of a bucket that are in one param group, and what a rank holds of them
    state_placeholder   what `optimizer.state` has in the place of states that rest elsewhere
    segment             such a run as one 1-D tensor, with its gradient and its states
    state_memory        where a step of one segment finds states that are its bucket's
    segment_step        a step of one segment: its states are loaded for that and stored after it
    swapped_groups      param groups that hold segments inside a step, and parameters otherwise
    off_device_updates  what is asked of updates away from the device

Read them in that order.
"""
