"""Processes: where one may run, how it ends, with whom, and who may ask it.

Open to other packages, which are all of its modules:

    cpus           those that it may run on
    ending         finalizers, threads, exit and forks
    socket_server  a server for processes of one user
    tether         processes that end with their parent
"""
