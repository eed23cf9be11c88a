"""Start-up: the ranks meet over their launcher's own channel, agree, and start one library together.

::

    start.py      the order of a start
    channels.py   the launcher's channel: torchrun's store, horovodrun's HTTP store, MASTER_ADDR, a file
    starter.py    what a library's start consists of;  torch.py  horovod.py  mpi.py  one each
    network.py    which address others can reach, which ranks share a host
"""
