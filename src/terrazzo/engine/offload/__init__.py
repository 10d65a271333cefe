"""What is away from the device, in host memory or in files: where it rests, how it is updated, when it comes back.

Read options and needs; host, disk (on disk_file and disk_folder), drive and store, where states rest; then staging,
sending, topology, update and background, how they are updated. activations is about what checkpointed units keep for
backward.
"""
