"""`terrazzo train`: configuration, data, model, schedule and loop of a sharded training run."""
