"""From a folder of any format to a sharded model: what fits, then element ranges in the place of what is there."""
