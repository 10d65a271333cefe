"""What is told and counted while a step runs: where the time goes, and who hears of it.

recorder   called with exchanges, waits, phases and units
times      how long exchanges take, and how long the host waits
traffic    bytes sent, time waited, transient memory
phases     where in a step the host is
tally      all of it, of one model

Read them in that order.
"""
