"""`terrazzo config VERB`: `commands` has all verbs with their options; each verb's work is in the file of its name.

commands  the verbs with their options
options   options that several verbs have
context   what a configuration does not say, from the options
explain   shows what a configuration means, with effective values
check     finds what is wrong with a configuration
convert   writes a configuration in another dialect
diff      compares two configurations
text      printing: JSON, keys with their verdicts, cells of tables
"""
