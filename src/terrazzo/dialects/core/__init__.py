"""What every dialect is made of.

In reading order:

    key_verdict  what became of one key
    sections     settings, in the sections of a description
    description  what a configuration asks for, in no dialect's words
    mesh         how many ranks the axes of a description have, and how many are left for others
    wording      values in messages and on pages
    agreement    whether two descriptions mean the same, and which settings have no effect
    keys         rows of a dialect's table of keys, and types of their values
    dialect      the record of functions that every dialect is, and what they take and return
    reader       a document on its way in: no key without a verdict
    draft        a document on its way out: no setting without a verdict
"""
