"""Processes: where one may run, how it ends, with whom, who may ask it, and what the system says of it.

Open to other packages, which are all of its modules:

    cpus              those that it may run on
    ending            finalizers, threads, exit and forks
    socket_server     a server for processes of one user
    standard_streams  what it says there, where nobody may be reading any more
    system            what Linux says of the machine, of processes, and of the control groups that limit this one
    tether            processes that end with their parent
"""
