"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

A run from its start to its end: run refuses (preflight), starts or joins ranks (launch), opens a session and has the
loop go through its steps; report says what comes of them. Each folder imports from those before it in this list, and
none from `run` and `loop`, which bring them together:

    settings     what a configuration is to torch, to `tz.shard` and to a shell
    launch       processes: how ranks are started, meet, stop and fail
    data         from sources to batches
    model        what is trained, and what it learns
    checkpoints  what is saved, kept, gone on from and exported
    session      a run in memory, opened or taken up
    promise      what the planner says of it, and what was measured beside
    preflight    what is refused before anything is started
    steps        an optimizer step, what is done about it, and what is measured between steps
    replay       whether ranks compute the same of the same data
    look         a run looked at from outside
    report       what a run says
    calibration  a few steps of a run, measured for the planner

Open to other packages, which is to say to the command line:

    calibration, checkpoints.export, data.sources, launch, look, preflight   what it runs, and asks for
    promise, run, settings.command                                           the same
"""
