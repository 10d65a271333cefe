"""The format of a checkpoint.

manifest     what a checkpoint holds, where, and under which digests
rank_layout  where the bytes lie in one rank's file
parse        whether a manifest, of any version, says what can be
seal         what makes a manifest trustworthy
runs         a rectangle of a tensor as the ranges in which it lies in a file
tiling       whether rectangles are a tensor, each element once
"""
