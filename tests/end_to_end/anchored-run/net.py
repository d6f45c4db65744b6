"""The backbone of the kept run: small enough to keep."""

from torch import nn


def net(image_shape):
    return nn.Sequential(
        nn.Conv2d(image_shape[0], 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
