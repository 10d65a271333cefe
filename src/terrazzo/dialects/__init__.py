"""Other people's configurations: read into one neutral description, and written from it.

Each folder imports from those before it in this list:

    core      what every dialect is made of
    formats   the dialects, a folder for each: DeepSpeed's JSON, Accelerate's YAML, TrainingArguments and others
    registry  all dialects, by name
    verbs     what is done with a configuration, from a file to its meaning on

Open to other packages:

    core, registry, verbs                                 as above
    formats.accelerate.launched, formats.deepspeed.keys   what integrations of these libraries read besides a file
"""
