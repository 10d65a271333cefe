"""What telemetry costs: the same training with and without it."""
