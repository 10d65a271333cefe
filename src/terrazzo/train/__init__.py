"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

From `terrazzo train x.yaml` to the first step and its checkpoint, file by file; the rest is what these call:

    cli.train                    reads the arguments: this process is the launcher, or a rank that others have started
    start_trainer                the launcher: refuses what cannot run, starts the ranks, ends as they end
    trainer_rank                 a rank: joins the others, agrees on the configuration, opens the session, trains
    session.build_session        `open_session`: model, data, optimizer and checkpoints become a `Session`
    loop                         `TrainingLoop`: what happens in each step and between two
    steps.step                   forward, backward and update
    checkpoints.run_checkpoints  `RunCheckpoints`: when it saves, what it keeps, and what the run goes on from

Names that look alike, and what each is:

    Session         the run in memory; RunProgress is how far it has come
    RunCheckpoints  its saves, and what it goes on from: `checkpoint.Resumed` is what was read of a checkpoint, and
                    RestoreOutcome what the session has taken up with it
    RunReport       what it says while it runs: RunScreen on screen, RunFolder has the names of its files
    RunReview       what that folder says of a run afterwards, for `terrazzo verdict`, `watch` and `report`
    RunEnd          how ranks have ended, to the launcher
    LaunchSpec      what the launcher starts: so many ranks of a command
    RestartPolicy   decides what is started after a failure: RestartPoint is the checkpoint that is gone on from, and
                    Restart what the new ranks are told

Each folder imports from those before it in this list, and none from `start_trainer`, `trainer_rank` and `loop`, which
bring them together:

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
    start_trainer, trainer_rank                                                  the same
"""
