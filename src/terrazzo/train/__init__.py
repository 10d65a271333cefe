"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

From `terrazzo train x.yaml` to the first step and its checkpoint, file by file; the rest is what these call:

    cli.train                    reads the arguments: this process is the launcher, or a rank that others have started
    start_trainer                the launcher: has `preflight.check` refuse what cannot run, starts the ranks by
                                 `terrazzo.launch`, and ends as they end
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

Each folder imports from those before it in this list, and none from `start_trainer`, `trainer_rank` and `loop`, which
bring them together:

    what a run is made of
        settings     what a configuration is to torch, to `tz.shard` and to a shell
        data         from sources to batches
        model        what is trained, and what it learns
        checkpoints  what is saved, kept, gone on from and exported
    before there are ranks
        planning     what the planner expects of it
        preflight    what is refused before anything is started
    on each rank
        session      a run in memory, opened or taken up
        steps        an optimizer step, what is done about it, and what is checked between steps
        report       what a run says, and what its folder says afterwards
    beside it
        calibration  a few steps, measured for the planner

Open to other packages, which is to say to the command line:

    calibration, checkpoints.export, data.sources, planning, preflight, report   what it runs, and asks for
    settings.plan, start_trainer, trainer_rank                                   the same
"""
