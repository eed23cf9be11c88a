"""Models as lists of layers: the parameters of ResNet-50, BERT-base and GPT-2 small, and their arithmetic.

Rules:

1. The shapes are those of the published models; a test counts the parameters.
2. A layer is the three matrix products that it costs in training (forward, gradient of the input, gradient of the
   weights), on rows of its own: what else a model does (attention, normalisation) is little beside them, and no
   data set and no model library is needed.
3. Every gradient is random, dense and different in every step, so that a policy has real work.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdbridge.errors import ConfigurationError, nearest

FEWEST = 8
"""Rows of a product: from one alone the gradient would be a matrix of rank 1."""
Loss = Callable[[nn.Module], Tensor]


class Layer(NamedTuple):
    """A weight matrix with its vectors (biases, normalisation).

    Attributes:
        rows: rows per sample that are multiplied with ``weight``, e.g. pixels or tokens; 0: a table that is looked up.
    """

    weight: tuple[int, ...]
    vectors: tuple[int, ...] = ()
    rows: float = 1.0


def resnet50(side: int = 224) -> list[Layer]:
    """He et al., *Deep residual learning for image recognition*, 2016; a sample is an image of ``side`` x ``side``.

    >>> sum(math.prod(layer.weight) + sum(layer.vectors) for layer in resnet50())
    25557032
    """
    layers = [Layer((64, 3, 7, 7), (64, 64), (side / 2) ** 2)]
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, pixels = 64 << stage, (side / (4 << stage)) ** 2
        for block in range(blocks):
            for shape in ((width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                layers.append(Layer(shape, (shape[0],) * 2, pixels))
            if block == 0:
                layers.append(Layer((4 * width, width_in, 1, 1), (4 * width,) * 2, pixels))
            width_in = 4 * width
    return [*layers, Layer((1000, 2048), (1000,))]


def transformer(vocabulary: int, positions: int, layers: int, width: int) -> Iterator[Layer]:
    """What BERT and GPT-2 have in common; a sample is a token."""
    yield Layer((positions, width), (), 0)
    for _ in range(layers):
        yield Layer((3 * width, width), (3 * width, width, width))
        yield Layer((width, width), (width,))
        yield Layer((4 * width, width), (4 * width, width, width))
        yield Layer((width, 4 * width), (width,))
    yield Layer((vocabulary, width))


def bert_base() -> list[Layer]:
    """Devlin et al., *BERT*, 2019, base, uncased, with its pooler; a sample is a token.

    >>> sum(math.prod(layer.weight) + sum(layer.vectors) for layer in bert_base())
    109482240
    """
    return [*transformer(30522, 512, 12, 768), Layer((2, 768), (768, 768), 0), Layer((768, 768), (768,))]


def gpt2() -> list[Layer]:
    """Radford et al., *Language models are unsupervised multitask learners*, 2019, small; a sample is a token.

    >>> sum(math.prod(layer.weight) + sum(layer.vectors) for layer in gpt2())
    124439808
    """
    return [*transformer(50257, 1024, 12, 768), Layer((768, 1), (768,), 0)]


def small(layers: int = 300) -> list[Layer]:
    """Many small layers, where the cost of an operation counts and not its bytes."""
    return [Layer((64, 64), (64,)) for _ in range(layers)]


MODELS: dict[str, tuple[Callable[..., list[Layer]], int]] = {
    "resnet50": (resnet50, 1),
    "bert-base": (bert_base, 64),
    "gpt2": (gpt2, 64),
    "small": (small, 128),
}
"""name -> (layers, samples per step unless told otherwise)"""


class LayerList(nn.Module):
    """A model that is a list of layers; called with the number of samples it returns a loss.

    >>> model = LayerList(small(2))
    >>> model(4).backward()
    >>> [tuple(p.grad.shape) for p in model.parameters()]
    [(64, 64), (64,), (64, 64), (64,)]
    """

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Product(layer) for layer in layers)

    def forward(self, samples: int) -> Tensor:
        signal = torch.ones((), device=next(self.parameters()).device, requires_grad=True)
        for layer in self.layers:
            signal = layer(signal, samples)
        return signal


class Product(nn.Module):
    """One layer: it passes a scalar on, and costs what the layer would."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.rows = layer.rows
        self.weight = nn.Parameter(torch.randn(layer.weight) / math.prod(layer.weight[1:]) ** 0.5)
        self.vectors = nn.ParameterList(torch.zeros(n) for n in layer.vectors)
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def forward(self, signal: Tensor, samples: int) -> Tensor:
        return _Product.apply(signal, *self._rows(samples), self.weight, *self.vectors)  # type: ignore

    def _rows(self, samples: int) -> tuple[Tensor, ...]:
        rows = max(FEWEST, round(self.rows * samples))
        if rows not in self._kept:
            weight = self.weight.detach().flatten(1)  # x and gradient:
            self._kept = {rows: tuple(torch.randn(rows, n, device=weight.device) for n in weight.T.shape)}
        return self._kept[rows]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, signal: Tensor, x: Tensor, grad: Tensor, weight: Tensor, *vectors: Tensor) -> Tensor:
        ctx.save_for_backward(x, grad, weight, *vectors)
        x @ weight.flatten(1).T
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, grad, weight, *vectors = ctx.saved_tensors
        grad @ weight.flatten(1)
        # Gradients of one direction would flatter low rank, and equal ones whatever remembers the step before
        grad = grad * torch.randn(len(grad), 1, device=grad.device)
        return upstream, None, None, (grad.T @ x).view_as(weight), *(torch.randn_like(v) for v in vectors)


def check_name(text: str, samples: int | None = None) -> None:
    """What :func:`model` refuses without a look into the user's module.

    Raises:
        ConfigurationError: no such name, or a number of samples or layers that cannot be.
    """
    name, _, argument = text.partition(":")
    if name not in MODELS and not argument:
        raise ConfigurationError(
            f"unknown model {text!r}. {nearest(name, MODELS)} Your own: module:function or path/to/file.py:function"
        )
    if name.endswith(".py") and not os.path.isfile(name):
        raise ConfigurationError(f"model {text!r}: no file {name} in {os.getcwd()}")
    if name in MODELS and argument and (name != "small" or not argument.isdigit() or int(argument) < 1):
        raise ConfigurationError(f"unknown model {text!r}: only small takes a number, of layers, as in small:3000")
    if samples is not None and (samples < 1 or name not in MODELS):
        raise ConfigurationError(
            f"--samples {samples} with {text}: a positive number, for the models that are known by name. "
            "The loss of your own module:function says how many samples a step has."
        )


def model(text: str, samples: int | None = None) -> tuple[nn.Module, Loss]:
    """A model and its loss by name: ``resnet50``, ``bert-base``, ``gpt2``, ``small``, ``small:3000``, or
    ``module:function`` or ``file.py:function``, whose function returns ``(module, loss)`` and ``loss(module)`` a
    scalar to differentiate.

    Raises:
        ConfigurationError: no such name, module or function, or ``samples`` for the user's own.

    >>> module, loss = model("small:2")
    >>> loss(module).backward()
    """
    check_name(text, samples)
    name, _, argument = text.partition(":")
    if name in MODELS:
        make, default = MODELS[name]
        count = samples or default
        return LayerList(make(int(argument)) if argument else make()), lambda module: module(count)
    with _told(text):
        module, loss = getattr(_imported(name), argument)()
    return module, loss


def import_own(text: str) -> None:
    """Import the user's own module, where ``text`` names one: what it registers is known then.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    name = text.partition(":")[0]
    if name not in MODELS:
        with _told(text):
            _imported(name)


@contextmanager
def _told(text: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{text}: {error}. It must name a function without arguments in a module that can be imported, "
            "which returns (torch.nn.Module, loss), where loss(module) is a scalar"
        ) from error


@cache  # a file, too, is imported once: a class that it registers is another one each time
def _imported(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a console script has its own folder there
        sys.path.insert(0, os.getcwd())
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(os.path.basename(name)[:-3], name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # classes are copied and pickled by it
    spec.loader.exec_module(module)
    return module
