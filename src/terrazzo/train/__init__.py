"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

A run from its start to its end: run, session (of plan, optimizer and folders, and the reference of DPO), loop, with
evaluate and report between its steps; look is at one from outside. What is learnt, from the model to the metric, is in
objectives. Folders:

    preflight     what is refused before anything is started
    launch        processes: how ranks are started, meet, stop and fail
    data          from sources to batches
    model         what is trained
    checkpoints   what is saved, kept, gone on from and exported
    promise       what the planner says of a run

Open to other packages, which is to say to the command line:

    checkpoints.export, command, data.sources, launch, look, preflight, promise, run   what it runs, and asks for
"""
