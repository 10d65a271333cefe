"""`terrazzo init`: questions, the planner's choice for the answers, and a configuration that says why.

command    the command; asks the questions that its options leave open
questions  the table of questions, each of which is also an option
answers    parses the answer to each question, and its default, which earlier answers decide
document   has the planner choose a configuration for the answers, checks it and writes it
"""
