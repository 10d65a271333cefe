"""The tier `nvme`: states in swap files on local disks.

    swap_folder  folders for swap files: whether they can be used, and what kind of disk is behind them
    swap_file    one swap file: made, locked, read and written, removed
    swap_space   all swap files of a rank as one space of bytes, read and written by threads
    nvme_buffer  a state that rests there, cell by cell
    staging      the buffers that such states stream through as they are updated

Read them in that order.
"""
