"""Processes: how ranks are started, meet, stop, and fail, and what they leave behind. By who runs the code:

launcher       the process that starts ranks on this machine
rank           a rank, whoever has started it
stopping       either, when somebody asks a run to stop
script         a script of the user's own in the place of the trainer

Beside the folders, what all of these need:

environment    whether torchrun, Slurm or this command has started this process as a rank, and as which
launcher_pipe  what a rank reports to its launcher
machine        what this machine has for ranks: devices, threads, and how many there may be

Where SIGTERM goes: the launcher receives it (`stopping.received_signals`) and passes it on to its ranks
(`launcher.local_ranks`). Each rank notes it (`stopping.stop_request`), and the training loop asks at the end of each
step whether any rank has.
"""
