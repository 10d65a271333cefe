"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

A run from its start to its end: run, preflight, build, session, loop. Then learning_rate, evaluate, keeping, resume,
report and export, what a session uses. Folders:

    data      from sources to batches
    launch    processes: how ranks are started, meet, stop and fail
    model     what is trained
    promise   what the planner says of a run

Open to other packages, which is to say to the command line:

    export, launch, promise, run   what it runs
"""
