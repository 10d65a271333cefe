"""What `terrazzo checkpoint` does with a checkpoint, of whichever format; nothing of a run is needed for it.

describe  what one holds
audit     whether its bytes are those that were written
compare   two of them, tensor by tensor
convert   of any format, rewritten as a Terrazzo checkpoint
"""
