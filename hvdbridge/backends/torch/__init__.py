"""The torch.distributed backend: Gloo on CPUs, NCCL on GPUs."""

from hvdbridge.backends.registry import Backend

BACKEND = Backend(
    "PyTorch", "torch", "Run: pip install torch", ".communicator:TorchCommunicator", ".starter:TorchStarter",
    ".communicator:TorchMessages", front_end="ddp",
)  # fmt: skip
