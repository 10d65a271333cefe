"""What is done with checkpoints that are there: the series of a run, what one holds, audit, comparison, conversion."""
