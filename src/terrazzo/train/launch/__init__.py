"""Processes: how ranks are started, meet, stop, and fail, and what they leave behind.

starting     which ranks this command starts, or joins because torchrun or Slurm has started them
script       a script of the user's own as what ranks run
script_rank  one rank of it
again        whether ranks are started again after a failure, and what these are told
places       where ranks may be, when places are lost
local_ranks  the processes that it starts, and the pipes on which they report
telling      what they report
labelled     what they print, with their numbers
joining      where ranks meet, and who has not come in time
here         a process on its machine: its number there, the ranks beside it, its device and threads
ranks        a rank's place in the run, and the same configuration on all
stop         a signal as a request that all ranks hear of
preempted    a run that was asked to stop, and that torchrun would start again
failure      who failed first is said once, with the exit code
scratch      temporary folders that do not stay behind
"""
