"""`terrazzo profile`: where the steps of any training script spend their time, with the script unchanged.

hook        `sitecustomize`, which Python imports at its start: installs the probe once torch is imported
probe       within the script's process, writes where its steps spend time; needs torch alone
wraps       wraps the functions of torch that a step calls, for the probe
merging     turns what all ranks have written into the records of a run
advice      what to change, in the terms of such a script
command     starts the script with the hook, and ends as it ends
"""
