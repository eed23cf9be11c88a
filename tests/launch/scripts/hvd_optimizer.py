"""What ``hvd.DistributedOptimizer`` refuses and how it behaves, on 3 ranks; each rank records every scenario."""

import copy
import gc
import logging
import warnings
import weakref

import torch
from jobs import record
from torch import nn

import hvdbridge.torch as hvd
from hvdbridge.errors import ConfigurationError, RankMismatch

SCENARIOS = {}
AFTER_STEP = ("local_sgd:every=2", "diloco", "post_local_sgd", "adasum_delta", "warmup(steps=2, then=diloco)")


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def wrap(module, lr=0.1, momentum=0.0, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters(), **options)


def loss_of(module):
    return module(torch.full((2, 4), 1.0 + hvd.rank())).square().sum()


def said(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
    return "nothing was raised"


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def mean_of_ranks(module):
    """The gradients that every rank must have, by an all-reduce of what each has alone."""
    twin = model()
    twin.load_state_dict(module.state_dict())
    loss_of(twin).backward()
    return [hvd.allreduce(p.grad, op=hvd.Average, name=f"expected.{i}") for i, p in enumerate(twin.parameters())]


@scenario
def refusals():
    m = model()
    sgd = torch.optim.SGD(m.parameters(), lr=0.1)
    named = list(m.named_parameters())
    make = hvd.DistributedOptimizer
    return [
        said(lambda: make(sgd, named_parameters=[named[0], *named]), ValueError),
        said(lambda: make(sgd, named_parameters=named[1:]), ValueError),
        said(lambda: make(sgd, named_parameters=m.parameters()), ValueError),
        said(lambda: make(sgd, named, backward_passes_per_step=0), ValueError),
        said(lambda: make(sgd, named, op=hvd.Sum, gradient_predivide_factor=2.0), ValueError),
        said(lambda: make(sgd, named, groups=-1), ValueError),
        said(lambda: make(sgd, named, groups=[[m[0].weight], [m[0].weight]]), ValueError),
        said(lambda: make(sgd, named, groups=[["weight"]]), ValueError),
        said(lambda: make(sgd, named, policy="mean", op=hvd.Sum), ValueError),
        said(lambda: make(sgd, named, policy="no_such_policy"), ValueError),
        said(lambda: make(make(sgd, named), named), ValueError),
        said(lambda: make(sgd, named, op=77), ValueError),
        said(lambda: make(sgd, named, op=hvd.Adasum, policy="topk"), ValueError),
        *(said(lambda p=p: make(sgd, named, policy=p), ConfigurationError) for p in AFTER_STEP),
    ]


@scenario
def is_what_it_wraps():
    m = model()
    optimizer = wrap(m)
    schedulers = torch.optim.lr_scheduler
    schedulers.CosineAnnealingLR(optimizer, 10)
    restored = wrap(m)
    restored.load_state_dict(optimizer.state_dict())
    return isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"


@scenario
def order_of_calls():
    m = model()
    optimizer = wrap(m)
    loss_of(m).backward()
    early = said(optimizer.zero_grad, AssertionError)
    again = said(lambda: loss_of(m).backward(), AssertionError)
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=False)
    zeros = all(not g.any() for g in gradients(m))
    optimizer.zero_grad(set_to_none=True)
    none = all(g is None for g in gradients(m))
    loss_of(m).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [early, again, zeros, none, [str(w.message) for w in caught]]


@scenario
def final_after_synchronize():
    m = model()
    optimizer = wrap(m, lr=0.0)
    equal = []
    for _ in range(3):
        optimizer.zero_grad()
        expected = mean_of_ranks(m)
        loss_of(m).backward()
        optimizer.synchronize()
        equal.append(all(torch.allclose(a, b) for a, b in zip(gradients(m), expected, strict=True)))
        with optimizer.skip_synchronize():
            optimizer.step()
    return equal


@scenario
def held_over_zero_grad():
    """Gradients of two tasks, each held while the other is computed, as PCGrad does."""
    m = model()
    optimizer = wrap(m)
    equal = []
    for _ in range(2):
        held, expected = [], []
        for task in range(2):
            optimizer.zero_grad()
            m(torch.full((2, 4), 1.0 + hvd.rank()))[:, task].sum().backward()
            optimizer.synchronize()
            held.append([p.grad for p in m.parameters()])
            expected.append(gradients(m))
        pairs = [pair for task in range(2) for pair in zip(held[task], expected[task], strict=True)]
        equal += [torch.equal(a, b) for a, b in pairs]
        equal.append(not torch.equal(held[0][-1], held[1][-1]))
    return all(equal)


@scenario
def step_hooks_run_once():
    m = model()
    optimizer = wrap(m)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    loss_of(m).backward()
    optimizer.step()
    return calls


@scenario
def closure():
    m = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(m.parameters(), max_iter=5), m.named_parameters())

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(m)
        loss.backward()
        return hvd.allreduce(loss.detach(), name="loss").requires_grad_()

    first = optimizer.step(evaluate).item()
    last = evaluate().item()
    optimizer.synchronize()
    return [last < first, [p.detach().double().sum().item() for p in m.parameters()]]


@scenario
def scaled():
    """torch.amp.GradScaler skips the step of a gradient that is not finite on one rank, on all of them."""
    m = model()
    optimizer = wrap(m)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in m.parameters()]
    moved = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(m)
        scaler.scale(loss * (float("inf") if step == 1 and hvd.rank() == 1 else 1.0)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, m.parameters(), strict=True)))
        before = [p.detach().clone() for p in m.parameters()]
    return moved


@scenario
def parameters_that_come_later():
    m = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    hvd.broadcast_parameters(m.state_dict(), root_rank=0)
    m[1].requires_grad_(False)
    optimizer = wrap(m)
    x = torch.full((1, 2), 1.0 + hvd.rank())
    for step in range(4):
        if step != 2:
            optimizer.zero_grad()
        if step == 1:
            m[1].requires_grad_(True)
        if step == 2:
            late = nn.Linear(2, 2)
            hvd.broadcast_parameters(late.state_dict(), root_rank=0)
            m.append(late)
            optimizer.add_param_group({"params": list(late.parameters())})
            optimizer.zero_grad()
        sum(layer(x).square().sum() for layer in m).backward()
        optimizer.step()
    return [p.detach().double().sum().item() for p in m.parameters()]


@scenario
def parameters_that_come_while_gradients_travel():
    """Unfrozen, or added, where one rank has begun the step and the others have no gradient of the old ones yet."""
    found = []
    for added in (False, True):
        old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        new.requires_grad_(added)
        named = [(f"old.{added}", old), (f"new.{added}", new)]
        inner = torch.optim.SGD([old] if added else [old, new], lr=0.5)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=named)
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                new.requires_grad_(True)
            if step == 0:
                old.sum().backward()
            else:
                (old.sum() + new.sum() if hvd.rank() == 0 else new.sum()).backward()
            if step == 1 and added:
                optimizer.add_param_group({"params": [new]})
            optimizer.step()
        # three steps of old: 1, 1/N, 1/N; two of new: 1, 1
        part = 1 / hvd.size()
        found.append(torch.allclose(old.detach(), torch.tensor(1 - 0.5 * (1 + 2 * part))))
        found.append(torch.equal(new.detach(), torch.zeros(3)))
    return found


@scenario
def process_set():
    members = hvd.add_process_set([0, 2])
    m = model()
    optimizer = wrap(m, process_set=members)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(m).backward()
        optimizer.step()
    total = sum(p.detach().double().sum() for p in m.parameters()).item()
    return hvd.allgather_object(total)


@scenario
def policies():
    found = []
    for policy in ("mean:exact=true", "bf16", "ef(fp16)"):
        m = model()
        optimizer = wrap(m, lr=0.0, policy=policy)
        expected = mean_of_ranks(m)
        loss_of(m).backward()
        optimizer.synchronize()
        pairs = zip(gradients(m), expected, strict=True)
        found.append(all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in pairs))
    return found


class Lines(logging.Handler):
    """Collects what hvdbridge logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, log_record):
        self.lines.append(log_record.getMessage())


def train(module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        torch.manual_seed(100 * step + hvd.rank())
        module(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def resumed(policy, at, saved):
    """Parameters after steps ``at`` to 6, from what was saved after step ``at``."""
    m = model()
    m.load_state_dict(saved["model"])
    optimizer = wrap(m, lr=0.01, momentum=0.9, policy=policy)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # which shares its tensors
    if saved["policy"] is not None:
        optimizer.load_policy_state_dict(saved["policy"])
    return train(m, optimizer, range(at, 6))


@scenario
def policy_state():
    """Whether a resumed training has the bits of one that ran through: with the policy's state, of either form, and
    without it; the warnings; and what is refused."""
    handler, log = Lines(), logging.getLogger("hvdbridge")
    log.addHandler(handler)
    same, lines = {}, {}
    for policy in ("int4", "dgc:ratio=0.25", "int8", None):
        m = model()
        optimizer = wrap(m, lr=0.01, momentum=0.9, policy=policy)
        empty = optimizer.policy_state_dict(gather=True)
        optimizer._saves_policy_state = False  # as of a script that never calls it
        optimizer.state_dict()  # nothing is lost before the first step
        train(m, optimizer, range(3))
        before = len(handler.lines)
        states = [copy.deepcopy(optimizer.state_dict()) for _ in range(2)]
        lines[str(policy)] = handler.lines[before:]
        saved = {"model": copy.deepcopy(m.state_dict()), "optimizer": states[0]}
        own = optimizer.policy_state_dict()
        gathered = hvd.broadcast_object(optimizer.policy_state_dict(gather=True))
        through = train(m, optimizer, range(3, 6))
        for kind, state in (("gathered", gathered), ("own", own), ("without", None)):
            again = resumed(policy, 3, {**saved, "policy": state})
            same[f"{policy} {kind}"] = all(map(torch.equal, through, again))
        if policy == "int4":  # in place, after steps
            m.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            optimizer.load_policy_state_dict(gathered)
            same["in place"] = all(map(torch.equal, through, train(m, optimizer, range(3, 6))))
            refused = [said(lambda s=s, o=optimizer: o.load_policy_state_dict(s), ConfigurationError) for s in (
                {}, gathered | {"policy": "int8"},
            )]  # fmt: skip
            loss_of(m).backward()
            refused.append(said(lambda o=optimizer, s=gathered: o.load_policy_state_dict(s), AssertionError))
            optimizer.step()
            wide = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))
            late = wrap(wide, policy="int4")
            late.load_policy_state_dict(gathered)
            refused.append(said(lambda o=late, m=wide: train(m, o, range(1)), ConfigurationError))
    log.removeHandler(handler)
    return empty, same, lines, refused


class Halves:
    """A compressor that is an object, with something of its own."""

    def __init__(self, dtype):
        self.dtype = dtype

    def compress(self, tensor):
        return tensor.to(self.dtype), tensor.dtype

    def decompress(self, tensor, context):
        return tensor.to(context)


@scenario
def compressor_that_is_an_object():
    m = model()
    optimizer = wrap(m, compression=Halves(torch.float64))
    expected = mean_of_ranks(m)
    loss_of(m).backward()
    optimizer.synchronize()
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(gradients(m), expected, strict=True))


@scenario
def one_that_gave_way():
    """To another over a part of its parameters; an optimizer of other ranks takes nothing away."""
    m = model()
    first = wrap(m)
    loss_of(m).backward()
    first.step()
    head = wrap(m[2])
    for _ in range(3):
        m.zero_grad()
        loss_of(m).backward()
        head.step()
    said_so = [said(first.step, RuntimeError), said(first.synchronize, RuntimeError)]
    here, there = hvd.add_process_set([0, 1]), hvd.add_process_set([2])
    m, found = model(), []
    each = [wrap(m, lr=0.0, process_set=members) for members in (here, there)]
    mine = each[not here.included()] if hvd.rank() < 3 else None
    for _ in range(2):
        m.zero_grad()
        loss = loss_of(m)
        loss.backward()
        if mine is not None:
            mine.synchronize()
        found.append([p.grad.double().sum().item() for p in m.parameters()])
    if mine is not None:

        def closure():
            m.zero_grad()
            loss_of(m).backward()
            return 0.0

        with mine.skip_synchronize():
            mine.step()
        mine.step(closure)
        found.append([p.grad.double().sum().item() for p in m.parameters()])
    pairs = hvd.allgather_object([found[0] == other for other in found[1:]])
    for members in (here, there):
        hvd.remove_process_set(members)
    return [said_so, hvd.allgather_object(found[0])[:2], pairs]


@scenario
def one_after_the_other():
    """A model that is trained twice, each time with an optimizer of a function's own, which joins afterwards: of the
    first, which is garbage then, one rank knows nothing any more."""

    def train(m, steps):
        optimizer = wrap(m, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(m).backward()
            optimizer.step()
        return weakref.ref(optimizer)

    gc.disable()
    m = model()
    first = train(m, 2)
    wrap(m)  # which makes no step, and gives way as well
    train(m, 2 + hvd.rank())
    if hvd.rank() == 0:
        gc.collect()
    held = first() is not None
    last = hvd.join()
    gc.enable()
    gc.collect()
    hvd.broadcast_parameters(m.state_dict(), root_rank=last)
    weights = torch.cat([p.detach().view(-1) for p in m.parameters()])
    same = bool((hvd.allgather(weights[None], name="trained twice") == weights).all())
    return [same, last == hvd.size() - 1, held == (hvd.rank() > 0), first() is None]


@scenario
def ranks_that_differ():
    torch.manual_seed(0)
    m = nn.Linear(2, 2 + (hvd.rank() == 1))
    optimizer = wrap(m)
    m(torch.ones(1, 2)).sum().backward()
    return [said(optimizer.step, RankMismatch), said(optimizer.step, hvd.HorovodInternalError)]


def adasum_of(rows):
    """Maleki 2020, equation 7, in float64: pairs of neighbours; who has none goes up as it is."""
    while len(rows) > 1:
        pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        rows = [p[0] if len(p) == 1 else both(*p) for p in pairs]
    return rows[0]


def both(a, b):
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


@scenario
def adasum():
    m, alone = model(), model()
    optimizer, own = wrap(m, op=hvd.Adasum), torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    # What is combined is what each rank's optimizer changed, with the momentum in it.
    optimizer.param_groups[0]["momentum"] = 0.9
    errors = []
    for _ in range(3):
        start = [p.detach().double() for p in m.parameters()]
        alone.load_state_dict(m.state_dict())
        for net, each in ((m, optimizer), (alone, own)):
            each.zero_grad()
            loss_of(net).backward()
            each.step()
        for i, (p, q, s) in enumerate(zip(m.parameters(), alone.parameters(), start, strict=True)):
            changes = hvd.allgather((q.detach().double() - s)[None], name=f"change.{i}")
            errors.append(float((p.detach().double() - s - adasum_of(list(changes))).abs().max()))
    weights = torch.cat([p.detach().view(-1) for p in m.parameters()])
    same = bool((hvd.allgather(weights[None], name="weights") == weights).all())
    before, optimizer.compression = [p.grad for p in m.parameters()], Broken
    failed = said(optimizer.step, ArithmeticError)
    restored = all(p.grad is grad for p, grad in zip(m.parameters(), before, strict=True))
    refused = said(optimizer.skip_synchronize, AssertionError)
    return max(errors), float(weights.abs().max()), same, refused, failed, restored


class Broken(hvd.Compression.none):
    @staticmethod
    def compress(tensor):
        raise ArithmeticError(f"cannot compress {list(tensor.shape)}")


@scenario
def sync_batch_norm():
    """Statistics and gradients of one process on all batches."""
    torch.manual_seed(0)
    everything = [torch.randn(2 + rank, 3) for rank in range(hvd.size())]
    norm, whole = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    mine = everything[hvd.rank()].clone().requires_grad_()
    together = torch.cat(everything).requires_grad_()
    out, expected = norm(mine), whole(together)
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    begin = sum(len(x) for x in everything[: hvd.rank()])
    rows = slice(begin, begin + len(mine))
    pairs = [(out, expected[rows]), (norm.running_mean, whole.running_mean), (norm.running_var, whole.running_var)]
    pairs.append((mine.grad, together.grad[rows]))
    return [torch.allclose(a, b, atol=1e-5) for a, b in pairs]


if __name__ == "__main__":
    before = said(lambda: wrap(model()), ValueError)
    hvd.init()
    torch.set_num_threads(1)
    record(hvd.rank(), {"before init": before, **{name: function() for name, function in SCENARIOS.items()}})
    hvd.shutdown()
