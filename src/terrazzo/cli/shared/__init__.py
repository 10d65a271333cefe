"""What all verbs have: arguments, answers to wrong options, what they print with, readers that leave."""
