"""Where bytes lie: folders and object stores, locks, and the files of a checkpoint under their digests.

`store` says what a place for checkpoints can do, in three classes; each kind of place has its own of them:

    class              what it is                    on a POSIX folder   behind a URL    on several hosts
    CheckpointStore    a folder of checkpoints       LocalStore          RemoteStore     -
    CheckpointFolder   one of them, to read          LocalFolder         RemoteFolder    MultiHostFolder
    CheckpointDraft    one that is being written     LocalDraft          RemoteDraft     -

On several hosts each has a LocalFolder of its own, and a MultiHostFolder reads them as one: `file_sender` sends a
host's files to the others.
"""
