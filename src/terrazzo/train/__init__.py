"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

A run from its start to its end: run refuses (preflight), starts or joins ranks (launch), opens a session (opening) and
has the loop go through its steps. A session is all that a run has, and what is saved of it; who looks at its steps is
guard, divergence, cadence and replay, and who speaks of them report. Imports go one way, from the last of this list to
the first:

    command, plan, optimizer         what a run is called, and what a configuration is to torch and to `tz.shard`
    folders, mesh_picture            the folders that it makes, and how its ranks are arranged
    launch                           processes: how ranks are started, meet, stop and fail
    data                             from sources to batches
    model                            what is trained, and what it learns
    checkpoints                      what is saved, kept, gone on from and exported
    parts, reference, session        a run in memory
    promise, preflight               what the planner says of it, and what is refused before anything is started
    first_use                        what libraries load at a first step, loaded before it
    opening                          a run opened, or taken up
    micro_batches, evaluate, replay  what the model makes of data, and ranks of each other's
    guard, divergence, cadence       what is done about a step, and when one is saved
    report, look, sizing             what a run says, and what is said of it from outside
    loop, calibration, run           its steps, a few of them measured, and all of it

Open to other packages, which is to say to the command line:

    calibration, checkpoints.export, command, data.sources, launch, look   what it runs, and asks for
    preflight, promise, run                                                the same
"""
