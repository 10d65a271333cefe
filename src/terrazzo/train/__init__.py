"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

To understand a run, read these in turn; the rest is what they call:

    run                    from the arguments to the exit code: refuse, start ranks, open a session, train
    session.build_session  how model, data, optimizer and checkpoints become a `Session`
    loop                   what happens in each step and between two: `TrainingLoop`
    steps.step             forward, backward and update
    checkpoints.keeper     when a checkpoint counts as saved, and where a run goes on from

Each folder imports from those before it in this list, and none from `run` and `loop`, which bring them together:

    before there are ranks
        settings     what a configuration is to torch, to `tz.shard` and to a shell
        launch       processes: how ranks are started, meet, stop and fail
    what a run is made of
        data         from sources to batches
        model        what is trained, and what it learns
        checkpoints  what is saved, kept, gone on from and exported
        session      a run in memory, opened or taken up
    what is known of it
        planning     what the planner says of it, before, during and after
        preflight    what is refused before anything is started
    while it goes on
        steps        an optimizer step, what is done about it, and what is checked between steps
        report       what a run says
    beside it
        calibration  a few steps, measured for the planner

Open to other packages, which is to say to the command line:

    calibration, checkpoints.export, data.sources, launch, planning, preflight   what it runs, and asks for
    run, settings.command                                                        the same
"""
