"""What the caching allocator makes of a step's allocations: `python -m benchmarks.allocator`. Needs no GPU."""
