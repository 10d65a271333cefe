"""Step time and memory of Terrazzo beside its peers: `python -m benchmarks.compare --help`."""
