"""Other people's configurations: read into one neutral description, and written from it.

Open to other packages:

    accelerate.launched, deepspeed.keys   what integrations of these libraries read besides a file
    core, registry, verbs                 as below

Each folder imports from those before it in this list:

    core                       what every dialect is made of
    shared                     what several dialects say alike
    deepspeed, fsdp1           the dialects whose documents stand inside of others'
    nested                     these documents, for the dialects that carry them
    accelerate, fsdp2, lightning, megatron, terrazzo, torchtitan, trainer   the other dialects
    registry                   all dialects, by name
    verbs                      what is done with a configuration, from a file to its meaning on
"""
