"""The process that starts ranks on this machine, waits for them, and ends as they end.

start_ranks      starts ranks, and starts them again
local_ranks      the ranks' processes, and the pipes on which they report
labelled_output  prefixes the lines that ranks print with their numbers
run_end          in which of six ways ranks have ended, and what is said about it
restart_policy   whether ranks are started again after a failure, and from which checkpoint
rank_slots       which devices are left for ranks when some are lost

What these have for names: LaunchSpec is what is started, so many ranks of a command; RunEnd is how they have ended;
RestartPolicy decides what is started after a failure, RestartPoint is the checkpoint that is gone on from, and Restart
(`rank.restart_note`) what the new ranks are told.
"""
