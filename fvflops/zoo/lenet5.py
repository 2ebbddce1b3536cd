"""LeNet-5, a convolutional network for 28x28 grey images.

Published in LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition"
(Proceedings of the IEEE, 1998), with about 60,000 parameters. This is the form in use today: its second
convolution has all six input channels, its pooling has no weights, its last layer is linear.
"""

import torch
from torch import Tensor, nn


class LeNet5(nn.Module):
    """LeNet-5: 61,706 parameters, 416,520 multiply-adds per image.

    Takes images (b, 1, 28, 28), returns logits (b, classes).

    >>> with torch.device("meta"):
    ...     model = LeNet5()
    >>> sum(p.numel() for p in model.parameters())
    61706
    """

    def __init__(self, *, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))
