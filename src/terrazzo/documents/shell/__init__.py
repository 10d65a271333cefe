"""Arguments of a program as a shell script gives them, read without running it.

In reading order; each imports from those before it:

words      the text as words and marks
variables  what the script's variables hold, as far as that is known without running it
script     its statements, followed to the commands
arguments  the arguments of the one program that it starts
"""
