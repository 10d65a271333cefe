"""Ranks that stand still: seen from outside, named with the cause, and ended once what they were doing has been kept.

standing     where a rank stands, by what it has recorded
whereabouts  where all ranks stand, for somebody who looks
causes       why a run may stand still, each in a row of one table
stall        why a run stands still
looking      whether it does, several times a second
stops        ranks that are stopped and let go on, again and again
recording    what a rank records, and where its threads are, in memory that another process reads
evidence     what ranks were doing, as files
warden       the process that looks, where others have started the ranks
wardens      what wardens of several machines tell each other
others       ranks of the other machines, by that
ward         a rank that it looks after

The launcher of `terrazzo train` looks after its ranks itself, and needs no warden.
"""
