"""The picture of a partition: who has how many images of which class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..data.federation import Federation, client_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def partition_figure(federation: Federation) -> Figure:
    """Clients × classes: the area of a disc is the number of training images, which also stands in it."""
    from matplotlib.figure import Figure

    counts = federation.describe().numpy()
    clients, classes = counts.shape
    names = federation.train.classes or tuple(str(c) for c in range(classes))
    shown = classes <= 30  # more would not be readable
    figure = Figure(figsize=(1.8 + 0.62 * min(classes, 30), 1.6 + 0.42 * clients), layout="constrained")
    axes = figure.subplots()
    largest = max(1, int(counts.max()))
    if shown:
        x, y = (grid.ravel() for grid in np.meshgrid(np.arange(classes), np.arange(clients)))
        sizes = [900 * int(n) / largest for n in counts.ravel()]
        axes.scatter(x, y, s=sizes, color="#4477aa", alpha=0.55, linewidths=0)
        for client in range(clients):
            for c in range(classes):
                if counts[client, c]:
                    axes.text(c, client, str(counts[client, c]), ha="center", va="center", fontsize=7)
        axes.set_xticks(range(classes), names, rotation=40, ha="right")
        axes.set_xlim(-0.7, classes - 0.3)
    else:
        image = axes.imshow(counts, aspect="auto", cmap="cividis")
        figure.colorbar(image, label="training images")
        axes.set_xlabel("class")
    labels = client_labels(federation.client_names, clients)
    axes.set_yticks(range(clients), [f"{name} ({int(own.sum())})" for name, own in zip(labels, counts, strict=True)])
    axes.set_ylim(clients - 0.4, -0.6)
    axes.set_ylabel("client (training images)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
