"""Processes: how ranks are started, meet, stop, and fail, and what they leave behind. From the lowest to the highest:

environment      whether torchrun, Slurm or this command has started this process as a rank, and as which
launcher_pipe    what a rank tells its launcher
labelled_output  what ranks print, with their numbers
scratch_folder   temporary folders that do not stay behind
preemption       a run that was asked to stop, and that torchrun would start again
rank_slots       where ranks may be, when some places are lost
machine          what this machine has for ranks: devices, threads, and how many there may be
notices          what is said of a run that ends, or that somebody stops
stop_signals     SIGTERM and Ctrl-C: heard by the launcher, and as a request that all ranks agree on
rank_process     one rank from its start to its exit code; who failed first is said once
restarts         whether ranks are started again after a failure, and what these are told
local_ranks      the processes that the launcher starts, and the pipes on which they report
outcome          how they have ended, and what is said of it
launcher         starts them, once or again
rendezvous       where ranks meet, and who has not come in time
process_group    a rank's place in the run, and the same configuration and data on all
script           a script of the user's own as what ranks run
script_rank      one rank of it
"""
