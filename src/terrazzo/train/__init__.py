"""`terrazzo train`: configuration, data, model, schedule and loop of a sharded training run.

Open to other packages, which is to say to the command line:

    calibrate, export, launch, promise, run   what it runs
    config, config_file, secrets              what a configuration is, and what of it is not shown
"""
