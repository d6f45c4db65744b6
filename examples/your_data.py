"""Makes a small data set of your own kind: three sites, three shapes, one folder of things nobody trained on.

    python examples/your_data.py shapes
    foogd run shapes/my.toml --out runs/shapes

Below the folder it writes sites/SITE/CLASS/*.png, table.csv with the same images as a table, strange/*.png and my.toml.
"""

import csv
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SITES = {"north": 40, "south": 90, "west": 140}  # each site's camera has its own background
CLASSES = ("circle", "square", "triangle")
PRESET = """\
# Three sites that keep their images, three classes, and a folder of images that belong to none of them.
data = "{folder}/sites"
sites = "folder"               # SITE/CLASS/image; or data = "{folder}/table.csv" and sites = "site", a column
partition = "by_domain"        # one client a site
clients = 0                    # as many as there are sites
out = ["{folder}/strange"]
corruptions = ["gaussian_noise", "brightness"]
severities = [1, 3, 5]
data_root = "{folder}"         # decoded images are cached below it
calibration = 0.15             # of each site's training images, set aside to find thresholds
detectors = ["msp", "energy", "score_norm", "score_span_all"]

method = "fedavg+foogd"
backbone = "cnn"
rounds = 8
local_epochs = 2
batch_size = 32
lr = 0.05
"""


def picture(kind: str, background: int, rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (32, 32), (background, background, background))
    draw = ImageDraw.Draw(image)
    x, y, r = rng.randint(12, 19), rng.randint(12, 19), rng.randint(6, 10)
    colour = tuple(rng.randint(150, 255) for _ in range(3))
    if kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "triangle":
        draw.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=colour)
    else:  # strange: a tangle of lines
        for _ in range(9):
            draw.line([(rng.randint(0, 31), rng.randint(0, 31)) for _ in range(2)], fill=colour, width=2)
    return image


def main(folder: Path) -> None:
    rng, rows = random.Random(0), []
    for site, background in SITES.items():
        for label in CLASSES:
            place = folder / "sites" / site / label
            place.mkdir(parents=True, exist_ok=True)
            for number in range(80):
                path = place / f"{number:03}.png"
                picture(label, background + rng.randint(-10, 10), rng).save(path)
                rows.append({"file": path.relative_to(folder).as_posix(), "label": label, "site": site})
    (folder / "strange").mkdir(exist_ok=True)
    for number in range(120):
        background = rng.choice(list(SITES.values()))
        picture("strange", background, rng).save(folder / "strange" / f"{number:03}.png")
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("file", "label", "site"))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "my.toml").write_text(PRESET.format(folder=folder.as_posix()))
    print(f"{len(rows)} images of {len(SITES)} sites; now: foogd run {folder / 'my.toml'} --out runs/shapes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/your_data.py FOLDER")
    main(Path(sys.argv[1]))
