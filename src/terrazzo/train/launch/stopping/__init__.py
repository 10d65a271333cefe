"""A run that somebody asks to stop, by SIGTERM or Ctrl-C.

received_signals  signals that a launcher receives
stop_request      the same on a rank: a request on which all ranks agree at the end of a step
notices           what is said of it, and who is told how ranks have ended
trainer_notices   the same of a run of the trainer
preemption        a run that was asked to stop, and that torchrun would start again
"""
