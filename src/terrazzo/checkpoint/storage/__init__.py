"""Where bytes lie: folders and object stores, locks, and the files of a checkpoint under their digests."""
