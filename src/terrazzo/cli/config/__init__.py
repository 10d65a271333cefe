"""`terrazzo config VERB`: `commands` has the verbs, `options` what they share, a file of its own what each does.

commands  the verbs with their options
options   options that several verbs have
context   what a configuration does not say, from the options
explain   what a configuration means, with effective values
check     what is wrong with a configuration
convert   a configuration in another dialect
diff      two configurations compared
text      what the verbs print: JSON, keys and what became of them, cells of tables
"""
