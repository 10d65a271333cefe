"""Processes: how ranks are started, meet, stop and fail. The folders are divided by who runs the code:

launcher       the process that starts ranks on this machine
rank           a rank, whoever has started it
stopping       both, when a run is asked to stop
script         ranks that run a user's script in place of the trainer

The modules are needed by all of these:

environment    whether torchrun, Slurm or this command has started this process as a rank, and as which one
launcher_pipe  what a rank reports to its launcher
machine        what this machine has for ranks: devices, threads, and how many ranks there may be

Where SIGTERM goes: the launcher receives it (`stopping.received_signals`) and passes it on to its ranks
(`launcher.local_ranks`). Each rank notes it (`stopping.stop_request`), and the training loop asks at the end of each
step whether any rank has.
"""
