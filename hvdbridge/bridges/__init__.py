"""Bridges to what others have written: hooks of DistributedDataParallel, Horovod's compressions, DDP's own signature.

==============================  ===========================================================================
:mod:`.comm_hook`               a policy as a DDP communication hook
:mod:`.fsdp`                    a policy between the replicas of a model that FSDP2 shards
:mod:`.hook_state`              what these two hooks have in common
:mod:`.foreign_hook`            a DDP communication hook as a policy, on every backend
:mod:`.process_group`           the ``torch.distributed`` that such a hook finds
:mod:`.compression`             Horovod's compressions as policies, and policies as such compressions
:mod:`.ddp`                     DistributedDataParallel's signature on every backend
==============================  ===========================================================================
"""
