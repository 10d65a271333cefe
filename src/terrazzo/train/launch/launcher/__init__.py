"""The process that starts ranks on this machine: it waits for them, and ends as they end.

start_ranks      starts them, once or again
local_ranks      their processes, and the pipes on which they report
labelled_output  what ranks print, with their numbers
run_end          in which of six ways they have ended, and what is said of it
restart_policy   whether ranks are started again after a failure, and from where they go on
rank_slots       where ranks may be, when some places are lost
"""
