"""Finds ranks that stand still, from another process: names the rank and the cause, keeps evidence, and ends the ranks.

rank_progress    how far a rank has come, and what it waits for, from its flight
live_ranks       the same for all ranks of a run, for `terrazzo watch`
stall_causes     the table of causes of a stall, with their words
stall            finds the cause of a stall
watchdog         looks several times a second whether there is a stall
memory_kills     counts processes that the kernel killed for lack of memory
repeated_stops   ranks that are stopped and continued by signals, over and over
recording        the memory that a rank records into, as another process reads it
evidence         writes what ranks were doing to files
warden           the process with the watchdog, for ranks that the launcher did not start
warden_links     connections to the wardens of other machines
other_machines   the ranks of other machines, as their wardens report them
watched_rank     a rank's side of a warden

The launcher of `terrazzo train` watches its ranks itself, and needs no warden.
"""
