"""Stopping a run by SIGTERM, Ctrl-C or SIGHUP.

received_signals  the signals that ask for a stop, and those that a launcher receives
stop_request      the request to stop on a rank, on which all ranks agree at the end of a step
ending_at_once    signals that end a process while it waits in C++
notices           what is said about it, and what to call when ranks have ended
preemption        keeps a run stopped that was asked to stop, and that torchrun would start again
"""
