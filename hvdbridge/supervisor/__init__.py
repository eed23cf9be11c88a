"""The job's one helper process: key-value store, monitor and PMI-1 server, and each rank's end of it.

::

    spawn.py    starts the process; its address and secret
    client.py   Monitor, a rank's end;  link.py  its connection;  exits.py  hooks that notice a rank's end
    job.py      the rules: store, agreement, waits, failures;  pmi.py  PMI-1     (both: logic without I/O)
    server.py   sockets, guests without a secret, the end;  __main__.py  from stdin to a daemon
    wire.py     frames;  processes.py  identity and shared-memory segments, from /proc

Nothing here imports torch, mpi4py or horovod: the process starts in a tenth of a second and outlives them all.
"""
