"""What offloading costs: the update on the CPU, swap files, updates from drives, and whole training steps."""
