"""What is known of a model: its tensors in sharding units, from a preset, a config.json, a module or a bare count."""
