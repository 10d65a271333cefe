"""Where bytes lie: folders and object stores, locks, and the files of a checkpoint under their digests.

`store` says what a place for checkpoints can do, in three classes; each kind of place has its own of them:

    class              what it is                    on a POSIX folder   behind a URL    on several hosts
    CheckpointStore    a folder of checkpoints       LocalStore          RemoteStore     -
    CheckpointFolder   one of them, to read          LocalFolder         RemoteFolder    MultiHostFolder
    CheckpointDraft    one that is being written     LocalDraft          RemoteDraft     -

On several hosts each has a LocalFolder of its own, and a MultiHostFolder reads them as one: `file_sender` sends a
host's files to the others.

Beside these, in reading order:

    rank_file   one rank's file, written in one pass with a digest of every block
    blocks      bytes of a file, read under their digests
    lock        a file that says who is at work
    local       checkpoints in a POSIX folder
    remote      checkpoints behind a URL, through fsspec
    multi_host  one checkpoint whose files are on several hosts
    places      from a path or a URL to its store
"""
