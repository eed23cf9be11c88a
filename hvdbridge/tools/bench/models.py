"""Models as lists of layers, with the parameters and the computation of ResNet-50, BERT-base and GPT-2 small.

Rules:

1. The shapes are those of the published models; a test counts the parameters.
2. A layer computes the three matrix products of its training (forward, gradient of the input, gradient of the weight)
   on random rows. Other operations (attention, normalization) cost little in comparison. So no data set and no model
   library is needed.
3. Every gradient is random, dense and different in every step, so policies compress realistic data.
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

MIN_ROWS = 8
"""The minimum of rows in a product, because the gradient of a single row would have rank 1."""
Loss = Callable[[nn.Module], Tensor]


class Layer(NamedTuple):
    """The shapes of a weight and of the vectors beside it (biases, normalization).

    Attributes:
        rows: rows per sample that are multiplied with ``weight``, e.g. pixels or tokens; 0 for an embedding.
    """

    weight: tuple[int, ...]
    vectors: tuple[int, ...] = ()
    rows: float = 1.0


def resnet50(side: int = 224) -> list[Layer]:
    """ResNet-50 (He et al., *Deep residual learning for image recognition*, 2016) for ``side`` x ``side`` images.

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
    """Yield the layers that BERT and GPT-2 have in common; a sample is a token."""
    yield Layer((positions, width), (), 0)
    for _ in range(layers):
        yield Layer((3 * width, width), (3 * width, width, width))
        yield Layer((width, width), (width,))
        yield Layer((4 * width, width), (4 * width, width, width))
        yield Layer((width, 4 * width), (width,))
    yield Layer((vocabulary, width))


def bert_base() -> list[Layer]:
    """BERT-base, uncased, with its pooler (Devlin et al., *BERT*, 2019); a sample is a token.

    >>> sum(math.prod(layer.weight) + sum(layer.vectors) for layer in bert_base())
    109482240
    """
    return [*transformer(30522, 512, 12, 768), Layer((2, 768), (768, 768), 0), Layer((768, 768), (768,))]


def gpt2() -> list[Layer]:
    """GPT-2 small (Radford et al., *Language models are unsupervised multitask learners*, 2019); a sample is a token.

    >>> sum(math.prod(layer.weight) + sum(layer.vectors) for layer in gpt2())
    124439808
    """
    return [*transformer(50257, 1024, 12, 768), Layer((768, 1), (768,), 0)]


def small(layers: int = 300) -> list[Layer]:
    """Many layers of 64 x 64, whose time depends on the cost per operation instead of bytes."""
    return [Layer((64, 64), (64,)) for _ in range(layers)]


MODELS: dict[str, tuple[Callable[..., list[Layer]], int]] = {
    "resnet50": (resnet50, 1),
    "bert-base": (bert_base, 64),
    "gpt2": (gpt2, 64),
    "small": (small, 128),
}
"""Name -> (function that returns the layers, default number of samples per step)."""


class LayerList(nn.Module):
    """A model made of a list of layers; ``model(samples)`` returns a loss, a scalar tensor.

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
    """A layer that returns its scalar input, and computes the matrix products of the layer in forward and backward."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.rows = layer.rows
        self.weight = nn.Parameter(torch.randn(layer.weight) / math.prod(layer.weight[1:]) ** 0.5)
        self.vectors = nn.ParameterList(torch.zeros(n) for n in layer.vectors)
        self._inputs: dict[int, tuple[Tensor, ...]] = {}

    def forward(self, signal: Tensor, samples: int) -> Tensor:
        return _Product.apply(signal, *self._rows(samples), self.weight, *self.vectors)  # type: ignore

    def _rows(self, samples: int) -> tuple[Tensor, ...]:
        rows = max(MIN_ROWS, round(self.rows * samples))
        if rows not in self._inputs:
            weight = self.weight.detach().flatten(1)  # an input and an output gradient, of the widths in and out
            self._inputs = {rows: tuple(torch.randn(rows, n, device=weight.device) for n in weight.T.shape)}
        return self._inputs[rows]


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
        # Without random factors gradients would repeat from step to step, which would favor policies that exploit it
        grad = grad * torch.randn(len(grad), 1, device=grad.device)
        return upstream, None, None, (grad.T @ x).view_as(weight), *(torch.randn_like(v) for v in vectors)


def check_name(text: str, samples: int | None = None) -> None:
    """Check the arguments of :func:`model` without importing the user's module.

    Raises:
        ConfigurationError: the name is unknown, or a number of samples or layers is out of range.
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
    """Return a model and its loss by name: ``resnet50``, ``bert-base``, ``gpt2``, ``small``, ``small:3000``, or
    ``module:function`` or ``file.py:function``. The user's function returns ``(module, loss)``, and ``loss(module)``
    returns a scalar to differentiate.

    Raises:
        ConfigurationError: the name, module or function is unknown, or ``samples`` is given for the user's own model.

    >>> module, loss = model("small:2")
    >>> loss(module).backward()
    """
    check_name(text, samples)
    name, _, argument = text.partition(":")
    if name in MODELS:
        make, default = MODELS[name]
        count = samples or default
        return LayerList(make(int(argument)) if argument else make()), lambda module: module(count)
    with _explain_errors(text):
        module, loss = getattr(_import_module(name), argument)()
    return module, loss


def import_own(text: str) -> None:
    """Import the user's module if ``text`` names one, so that the policies that it registers are known.

    Raises:
        ConfigurationError: the module cannot be imported.
    """
    name = text.partition(":")[0]
    if name not in MODELS:
        with _explain_errors(text):
            _import_module(name)


@contextmanager
def _explain_errors(text: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{text}: {error}. It must name a function without arguments in a module that can be imported, "
            "which returns (torch.nn.Module, loss), where loss(module) is a scalar"
        ) from error


@cache  # so that a file is imported once: each import would make new classes to register
def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(os.path.basename(name)[:-3], name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # copy and pickle find classes there
    spec.loader.exec_module(module)
    return module
