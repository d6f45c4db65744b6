"""What the generator of FedATOL draws after some rounds of the demo: the picture in docs/methods.md.

python benchmarks/gan_images.py docs/fedatol_images.png [--rounds 0 5 10 20] [--gan-lr 0.001]

Each row is one number of rounds: eight latents of class means, as auxiliary images have them, and eight of outliers.
The model trains beside it, as plainly as it can: the GAN does not see it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from foogd.engine.eager import EagerEngine
from foogd.methods.fedatol import FedATOL, LatentImages, class_latents, outlier_latents
from foogd.presets.loader import read_preset, resolve
from foogd.runs import make_federation
from foogd.simulate import initial_state, simulate

SHOWN = 8  # images of each kind in a row


def rows(rounds: list[int], lr: float) -> Iterator[tuple[int, Tensor]]:
    """The numbers of rounds and the images after them."""
    alone = {"aux_id": False, "lambda_ood": 0.0, "lambda_al": 0.0}
    config, method = resolve(read_preset("demo"), {"method": "fedatol", "gan_lr": lr, **alone})
    assert isinstance(method, FedATOL)
    method, config = replace(method, gan_rounds=max(rounds)), replace(config, rounds=max(rounds))
    engine = EagerEngine(method, make_federation(config), config)
    start = initial_state(engine)
    states = {0: start.server}
    for result in simulate(method, engine.federation, config, engine, start=start):
        if result.state.server.round in rounds:
            states[result.state.server.round] = result.state.server
    for number, server in states.items():
        generator = engine.server_nets().load(server)["generator"].eval()
        assert isinstance(generator, LatentImages)
        stream = torch.Generator().manual_seed(0)
        near = class_latents(generator.means, torch.arange(SHOWN) % len(generator.means), s=method.s, stream=stream)
        bound = 0.5 * method.mu * method.space
        far = outlier_latents(SHOWN, bound, stream=stream, device=torch.device("cpu"))
        with torch.no_grad():
            yield number, generator(torch.cat([near, far]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 5, 10, 20])
    parser.add_argument("--gan-lr", type=float, default=read_preset("demo")["fedatol"]["gan_lr"])
    chosen = parser.parse_args()
    made = dict(rows(chosen.rounds, chosen.gan_lr))
    lines = [torch.cat([pad(image[0], (1, 1, 1, 1)) for image in images], 1) for images in made.values()]
    pixels = (255 * torch.cat(lines)).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(chosen.picture, optimize=True)
    print(f"{chosen.picture}: after {', '.join(map(str, made))} rounds")


if __name__ == "__main__":
    main()
