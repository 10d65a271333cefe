"""`terrazzo profile`: where the steps of somebody else's script spend their time, with the script unchanged.

hook        `sitecustomize`, which Python imports when it starts: has the probe begin as soon as torch is there
probe       writes down where a step is, and what it waits for; needs no Terrazzo
wraps       what a step of a script calls, so that the probe hears of it
merging     what all ranks have written down, as the records of a run
advice      what to change, in the words of such a script
command     starts the script so, and passes on how it ends
"""
