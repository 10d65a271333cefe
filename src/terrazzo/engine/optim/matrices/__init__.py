"""Updates of whole matrices, such as Muon's: each is brought to one rank, updated there, and sent back.

    matrix_owners      which rank updates which matrix, and what goes where for that
    matrix_exchange    what ranks have of matrices on their way, and the exchanges
    matrix_host_steps  what is elementwise in these updates, where states rest away from the device
    matrix_steps       the updates themselves, and what they hold and send in a dry run

Read them in that order. The arithmetic is that of a `terrazzo.optim.MatrixOptimizer`.
"""
