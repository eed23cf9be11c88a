"""The models of the examples.

Image models map ``[n, 1, side, side]`` to logits ``[n, 10]``. The text model maps ``[n, length]`` to
``[n, 128, length]``, the logits of the next character at each position.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Three convolutions and a linear layer; without normalisation, so that any batch size works on any rank."""

    def __init__(self, side: int = 8, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.linear = nn.Linear(2 * width * (side // 4) ** 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        return self.linear(x.flatten(1))


class Residual(nn.Module):
    """ResNet's basic block: two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet18(nn.Module):
    """ResNet18 with a 3x3 stem for small images; 11 million parameters, 20 batch norms."""

    def __init__(self, side: int = 28) -> None:
        super().__init__()
        # Images of 8x8 skip one halving: batch norm in training needs more than one value per channel,
        # and the last batch of a rank may have a single image.
        strides = (1, 2, 2, 2) if side >= 16 else (1, 1, 2, 2)
        widths = (64, 64, 128, 256, 512)
        self.stem = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Residual(inputs, outputs, stride), Residual(outputs, outputs, 1))
                for inputs, outputs, stride in zip(widths, widths[1:], strides, strict=False)
            )
        )
        self.linear = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.stages(self.stem(x)).mean((2, 3)))


class GatedCNN(nn.Module):
    """Causal convolutions with gates and residual connections (Dauphin 2017); 49,000 parameters.

    A position sees its character and the six before it. Without attention, SGD trains the model in seconds.
    """

    def __init__(self, length: int, width: int = 48, layers: int = 2, reach: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, reach) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 128)
        self.reach = reach

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters).transpose(1, 2)
        for layer in self.layers:
            x = x + F.glu(layer(F.pad(x, (self.reach - 1, 0))), dim=1)
        return self.linear(self.norm(x.transpose(1, 2))).transpose(1, 2)


MODELS = {"cnn": CNN, "gated-cnn": GatedCNN, "resnet18": ResNet18}
