"""What every dialect is made of.

key_verdict    what became of one key
sections       settings, in the sections of a description
description    what a configuration asks for, in no dialect's words
meaning        what settings mean together, and whether two descriptions mean the same
keys           rows of a dialect's table, and types of values
dialect        the record of functions that every dialect is, and what they are called with
reader, draft  a document on its way in, a document on its way out
"""
