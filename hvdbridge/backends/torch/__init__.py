"""The backend over torch.distributed: Gloo on CPUs, NCCL on GPUs."""
