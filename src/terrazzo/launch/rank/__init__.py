"""A rank, whoever has started it: how it joins the others, and how it ends.

rank_process       one rank from its start to its exit code
failure_reporters  reports a rank's failure, such that the first failure is printed once
rendezvous         the address where ranks meet, and which ranks have not come in time
process_group      a rank's place in the run, and the check that all have the same configuration and data
restart_note       what a rank is told that is started again after a failure
scratch_folder     temporary folders that are never left behind
"""
