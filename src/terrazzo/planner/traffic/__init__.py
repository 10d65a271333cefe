"""What one rank sends in a step, by collective and by link."""
