"""The benchmark of one GPU: `python -m benchmarks.gpu`."""
