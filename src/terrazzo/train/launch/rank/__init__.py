"""A rank, whoever has started it: it joins the others, and says how it ends.

rank_process       one rank from its start to its exit code
failure_reporters  whom it tells of its failure, so that who failed first is said once
rendezvous         where ranks meet, and who has not come in time
process_group      a rank's place in the run, and the same configuration and data on all
restart_note       what a rank is told that is started again after a failure
scratch_folder     temporary folders that do not stay behind
"""
