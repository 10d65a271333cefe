"""Ranks that stand still: seen from outside, named with the cause, and ended once what they were doing has been kept.

rank_progress    how far a rank has come, and what it waits for, by what it has recorded
live_ranks       that of all ranks of a run, for somebody who looks from another terminal
stall_causes     why a run may stand still, each in a row of one table
stall            why a run stands still
watchdog         whether it does, several times a second
memory_kills     processes that the kernel has ended for want of memory
repeated_stops   ranks that are stopped and let go on, again and again
recording        what a rank records, and where its threads are, in memory that another process reads
evidence         what ranks were doing, as files
warden           the process that looks, where others have started the ranks
warden_links     connections to the wardens of other machines
other_machines   the ranks there, by what these report
watched_rank     the side of a rank that a warden looks after

The launcher of `terrazzo train` looks after its ranks itself, and needs no warden.
"""
