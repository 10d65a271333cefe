"""`terrazzo plan`: `command` has its options, the other files what it does."""
