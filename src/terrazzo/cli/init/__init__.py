"""`terrazzo init`: questions, the planner's choice for the answers, and a configuration that says why.

command    the options, and who answers a question: an option, its default, or somebody at the terminal
questions  the questions, each of which is an option
answers    what an answer to each means, and its default by the answers before it
document   the configuration for the answers: chosen by the planner, checked, written
"""
