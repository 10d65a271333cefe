"""What is told and counted while a step runs: which exchange it is, where the time goes, and who hears of it.

places     where each rank is in what all run, as errors say it
label      what an exchange is for; it is in the messages too, so that two which do not belong together raise
recorder   called with exchanges, waits, phases and units
times      how long exchanges take, and how long the host waits
traffic    bytes sent, time waited, transient memory
phases     where in a step the host is
tally      all of it, of one model

Read them in that order.
"""
