"""ResNet-50, a residual convolutional network for images.

Published in He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385, table 1: 3.8 GMACs).
This is the common version 1.5: the 3x3 convolution has the stride, and the cost is 4.09 GMACs. Names and shapes
of the parameters are torchvision's, so that its checkpoints can be loaded.
"""

import torch
from torch import Tensor, nn

EXPANSION = 4  # output channels of a block / channels of its 3x3 convolution


class Bottleneck(nn.Module):
    """A residual block: 1x1 to `width`, 3x3 with the stride, 1x1 to four times `width`, plus the shortcut.

    Takes (b, channels, h, w), returns (b, 4*width, h/stride, w/stride).
    """

    def __init__(self, channels: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * EXPANSION, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * EXPANSION)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != width * EXPANSION:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width * EXPANSION, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(width * EXPANSION),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 v1.5: 25,557,032 parameters, 4,089,184,256 multiply-adds per 224x224 image.

    These are in the convolutions and in `fc`. Takes images (b, 3, h, w), returns logits (b, classes).

    >>> with torch.device("meta"):
    ...     model = ResNet50()
    >>> sum(p.numel() for p in model.parameters())
    25557032
    """

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = build_stage(64, 64, blocks=3, stride=1)
        self.layer2 = build_stage(256, 128, blocks=4, stride=2)
        self.layer3 = build_stage(512, 256, blocks=6, stride=2)
        self.layer4 = build_stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * EXPANSION, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def build_stage(channels: int, width: int, *, blocks: int, stride: int) -> nn.Sequential:
    """Chain `blocks` bottlenecks; the first has `channels` input channels and the stride."""
    first = Bottleneck(channels, width, stride=stride)
    return nn.Sequential(first, *(Bottleneck(width * EXPANSION, width) for _ in range(blocks - 1)))
