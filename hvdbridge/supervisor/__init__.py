"""The job's one helper process: key-value store, monitor and PMI-1 server, and each rank's end of it.

::

    start.py    start the process; the address and secret that reach the other ranks
    client.py   Monitor: what a rank says and hears;  exits.py  how a rank's end is noticed
    job.py      the rules: store, agreement, waits, failures;  pmi.py  PMI-1     (both: logic without I/O)
    server.py   sockets, guests without a secret, the end;  __main__.py  from stdin to a daemon
    wire.py     frames;  processes.py  what /proc tells: identity, segments

Nothing here imports torch, mpi4py or horovod: the process starts in a tenth of a second and outlives them all.
"""
