"""Step time and memory of Terrazzo beside its peers: `terrazzo bench --help`."""
