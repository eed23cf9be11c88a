"""The helper process of a job (key-value store, monitor and PMI-1 server), and each rank's client of it.

::

    spawn.py    starts the helper and returns its address and secret
    client.py   Monitor, the client of a rank;  link.py  its connection;  last_step.py  agreement on a last step
    exits.py    hooks that report a rank's end;  causes.py  classifies errors;  guard.py  watches MPI_Init
    job.py      state of the job: store, agreement, waits, failures;  pmi.py  PMI-1     (both: logic without I/O)
    server.py   sockets, authentication, end of the helper;  __main__.py  entry point of the helper process
    wire.py     frames;  clock.py  clock of limits;  processes.py  identity and shared-memory segments, from /proc

No module here imports torch, mpi4py or horovod. So the helper starts fast, and a failure of these libraries does not
affect it.
"""
