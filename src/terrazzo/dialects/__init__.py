"""Other people's configurations: read into one neutral description, and written from it.

Open to other packages:

    accelerate.launched, deepspeed.keys   what doors for these libraries read besides a file
    core, registry                        what a dialect is made of; which there are
    verbs                                 what is done with a configuration, from a file to its meaning on

Every dialect has a folder. What several of them share is in `shared`, and a document inside another's in `nested`.
"""
