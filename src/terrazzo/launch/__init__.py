"""Processes: how ranks are started, meet, stop and fail, whether they train or run a script of the user's.

The folders are divided by who runs the code; each imports from those before it:

stopping       launcher and ranks, when a run is asked to stop
rank           a rank, whoever has started it
launcher       the process that starts ranks on this machine
script         `terrazzo run`: ranks that run a user's script

The modules are needed by all of these:

environment    whether torchrun, Slurm or this command has started this process as a rank, and as which one
launcher_pipe  what a rank reports to its launcher
machine        what this machine has for ranks: devices, threads, and how many ranks there may be

Where SIGTERM, SIGINT and SIGHUP go: the launcher receives one (`stopping.received_signals`) and passes it on to its
ranks (`launcher.local_ranks`). Each rank notes it (`stopping.stop_request`), and the training loop asks at the end of
each step whether any rank has.

Open to other packages, which is to say to the trainer and the command line:

    environment, machine             where this process is, and what there is for ranks
    launcher                         starts ranks, and starts them again
    launcher_pipe, rank              what a rank does and tells
    stopping                         what is said and asked when a run is stopped
    script.start_script              `terrazzo run`
"""
