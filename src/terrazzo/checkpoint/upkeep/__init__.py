"""What is done with checkpoints that are there.

series        those of a run in one place: their names, which is newest, which are kept, resuming from a good one
partners      local checkpoints of several hosts, each with a copy of another's part
partner_copy  such a copy, received in the background
describe      what one holds
audit         whether its bytes are those that were written
compare       two of them, tensor by tensor
convert       of any format, rewritten as a Terrazzo checkpoint
"""
