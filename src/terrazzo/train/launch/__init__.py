"""Processes: how ranks are started, meet, stop, and fail, and what they leave behind. By whose side a module is on:

the launcher, which starts ranks on this machine
    launcher         starts them, once or again
    local_ranks      their processes, and the pipes on which they report
    outcome          in which of six ways they have ended, and what is said of it
    restarts         whether ranks are started again after a failure, and what these are told
    rank_slots       where ranks may be, when some places are lost
    machine          what this machine has for ranks: devices, threads, and how many there may be
    labelled_output  what ranks print, with their numbers
a rank, whoever has started it
    environment      whether torchrun, Slurm or this command has started this process as a rank, and as which
    rank_process     one rank from its start to its exit code; who failed first is said once
    rendezvous       where ranks meet, and who has not come in time
    process_group    a rank's place in the run, and the same configuration and data on all
    preemption       a run that was asked to stop, and that torchrun would start again
    scratch_folder   temporary folders that do not stay behind
both
    launcher_pipe    what a rank reports to its launcher
    stop_signals     SIGTERM and Ctrl-C: received by the launcher, and as a request that all ranks agree on
    notices          how a run has ended, and what is said of one that somebody stops
    trainer_notices  the same of a run of the trainer
a script of the user's own in the place of the trainer
    script           how it is started as ranks
    script_rank      one rank of it
"""
