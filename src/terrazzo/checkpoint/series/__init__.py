"""The checkpoints of a run as a series: one for each saved step, in one place, and copies of them on other hosts.

listing        which there are, and which is newest
retention      which stay: old ones removed, damaged and suspect ones renamed
claim          one run at a time saves in a folder
resume         going on from the newest that is whole
partner_hosts  local checkpoints of several hosts, each with a copy of another's part
partner_copy   such a copy, received in the background
"""
