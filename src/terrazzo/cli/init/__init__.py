"""`terrazzo init`: `command` has its options, the other files what it asks and writes."""
