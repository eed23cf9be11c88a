"""A Horovod script that knows nothing of hvdbridge: it trains in many ways and records the bits of what came out."""

import hashlib

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.torch.compression import Compressor
from jobs import record
from torch import nn

STEPS = 4


class Coarse(Compressor):
    """Of a script's own: what travels has another shape."""

    @staticmethod
    def compress(tensor):
        return (tensor.flatten() * 64).round().double(), tensor.shape

    @staticmethod
    def decompress(tensor, shape):
        return (tensor / 64).float().view(shape)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 37), nn.ReLU(), nn.Linear(37, 5))


def digest(model):
    data = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def loss_of(model):
    return F.cross_entropy(model(torch.randn(8, 10)), torch.randint(0, 5, (8,)))


def train(make=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), passes=1, clip=False, **options):
    model = mlp()
    optimizer = make(model.parameters())
    if options.get("groups") == "lists":
        options["groups"] = [list(model[0].parameters())]
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    torch.manual_seed(1 + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of(model).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    return digest(model)


def embedding(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options
    )
    torch.manual_seed(5 + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(0, 20, (6, 3))).square().sum().backward()
        optimizer.step()
    return digest(model)


def dynamic():
    """Ranks use other layers in other steps; weight decay acts on what nobody used."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=0.1, weight_decay=0.1), named_parameters=layers.named_parameters()
    )
    torch.manual_seed(5 + hvd.rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        layers[(step + hvd.rank()) % 3](torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return digest(layers)


def two_losses():
    """Two backwards before one step, each for other parameters."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    both = nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=0.1), named_parameters=both.named_parameters(), op=hvd.Sum
    )
    torch.manual_seed(5 + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        first(torch.randn(5, 4)).square().mean().backward()
        second(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    return digest(both)


def adversaries():
    """Two optimizers; the gradients of one are frozen while the other trains."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), named_parameters=m.named_parameters(name))
        for name, m in (("generator", generator), ("judge", judge))
    ]
    torch.manual_seed(5 + hvd.rank())
    for step in range(2 * STEPS):
        turn = step % 2
        for i, module in enumerate((generator, judge)):
            for p in module.parameters():
                p.requires_grad_(i == turn)
        for optimizer in optimizers:
            optimizer.zero_grad()
        judge(generator(torch.randn(5, 3))).square().mean().backward()
        optimizers[turn].step()
    return digest(nn.ModuleList([generator, judge]))


hvd.init()
torch.set_num_threads(1)
record(
    hvd.rank(),
    {
        "average": train(),
        "clipped": train(clip=True),
        "adam": train(lambda p: torch.optim.Adam(p, lr=0.01)),
        "sum": train(op=hvd.Sum),
        "min": train(op=hvd.Min),
        "max": train(op=hvd.Max),
        "product": train(op=hvd.Product),
        "fp16": train(compression=hvd.Compression.fp16),
        "fp16 clipped": train(compression=hvd.Compression.fp16, clip=True),
        "own compression": train(compression=Coarse),
        "predivide": train(gradient_predivide_factor=3.0),
        "predivide fp16": train(gradient_predivide_factor=3.0, compression=hvd.Compression.fp16),
        "three passes": train(passes=3),
        "two groups": train(groups=2),
        "lists of groups": train(groups="lists"),
        "sparse": embedding(),
        "sparse as dense": embedding(sparse_as_dense=True),
        "dynamic": dynamic(),
        "two losses": two_losses(),
        "adversaries": adversaries(),
    },
)
hvd.shutdown()
