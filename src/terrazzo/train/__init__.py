"""`terrazzo train`: data, model, schedule and loop of a sharded training run.

Open to other packages, which is to say to the command line:

    calibrate, export, launch, promise, run   what it runs
"""
