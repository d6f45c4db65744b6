"""The command line of the data sets: `foogd data list | get | verify`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from ..config import Config
from ..core.errors import InputError
from ..data.cache import cache_folder, open_folder
from ..data.catalogue import CATALOGUE
from ..data.fetch import adopt, fetch
from ..data.layouts import Entry, Facts, locate
from ..data.readers import SEVERITIES, OnBad, Progress
from ..data.sources import cache_options, load_source, read_layout, require
from ..data.store import ImageStore
from .common import console, make_app

data_app = make_app(
    "data",
    "Data sets: what is known and present, download, check. Example: foogd data get cifar10 svhn",
    no_args_is_help=True,
)

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names from foogd data list.")]
Root = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the data sets (data_root of a run).")]


@data_app.command("list")
def list_sets(root: Root = Path("data")) -> None:
    """List every data set, its role, size, licence and whether it is present. Example: foogd data list --root data"""
    grid = Table("name", "role", "images", "pixels", "licence", "present", "what it is", box=None, pad_edge=False)
    for entry in CATALOGUE.values():
        row = (entry.role.upper(), entry.images, f"{entry.px}×{entry.px}", entry.licence, presence(entry, root))
        grid.add_row(entry.name, *(escape(cell) for cell in (*row, entry.description)))
    console.print(grid, highlight=False)


@data_app.command()
def get(
    names: Names,
    root: Root = Path("data"),
    local: Annotated[
        Path | None, typer.Option("--from", metavar="PATH", help="Take it from this folder, archive or file instead.")
    ] = None,
    mirror: Annotated[str | None, typer.Option(metavar="URL", help="Download from this folder of a server.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the parts that no role needs (SVHN train).")] = False,
) -> None:
    """Download data sets from their official addresses, or take them from a path. Example: foogd data get cifar10"""
    for entry in entries(names):
        if entry.embedded:
            say(f"{entry.name} is inside the package")
        elif local is not None:
            say(f"{entry.name}: taken from {local} as {adopt(entry, root, local)}")
            require(entry, root)
        elif locate(entry, root) is not None and not everything:
            say(f"{entry.name} is present: {presence(entry, root)}")
        else:
            with bars(DownloadColumn()) as progress:
                fetched = fetch(entry, root, mirror=mirror, everything=everything, progress=reporter(progress))
            for file in fetched:
                note = "as published" if file.checked else "no published one is known here"
                say(f"{entry.name}: {file.path}, md5 {file.md5} ({note})")
            require(entry, root)


@data_app.command()
def verify(
    names: Names,
    root: Root = Path("data"),
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad images instead of stopping there.")] = False,
) -> None:
    """Check files and counts and name the first thing that is wrong. Example: foogd data verify cifar10"""
    for entry in entries(names):
        with bars(MofNCompleteColumn()) as progress:
            text = check(entry, root, "skip" if skip_bad else "error", reporter(progress)(entry.name))
        say(f"{entry.name}: {text}")


def entries(names: list[str]) -> list[Entry]:
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        raise InputError(f"unknown data set {unknown[0]!r}; known are {', '.join(CATALOGUE)}")
    return [CATALOGUE[name] for name in names]


def presence(entry: Entry, root: Path) -> str:
    """Whether and in which form a data set is there."""
    if entry.embedded:
        return "in the package"
    found = locate(entry, root)
    if found is None:
        return "no"
    layout, _ = found
    standard = entry.layouts[0].name if entry.role == "in-c" else entry.name
    return layout.kind if layout.name == standard else f"{layout.kind}: {layout.name}"


def check(entry: Entry, root: Path, on_bad: OnBad = "error", progress: Progress | None = None) -> str:
    """Read a data set from its files, past the cache, and compare it with the published facts; says what was found."""
    if entry.embedded:
        store = load_source(entry.name, root)
        return f"good, {len(store):,} images inside the package"
    check_archives(entry, root)
    layout, found = require(entry, root)
    if entry.role == "in-c":
        return check_corruptions(entry, root, on_bad, progress)
    skipped: list[str] = []
    options: dict[str, Any] = {"on_bad": on_bad, "progress": progress, "skipped": skipped} if layout.decodes else {}
    store = read_layout(layout, found, **options)
    if skipped:
        return f"{len(store):,} images can be read, {len(skipped)} cannot; the first: {skipped[0]}"
    compare(entry.name, store, layout.facts)
    folder = cache_folder(root, entry.name, found, cache_options(layout))
    decoded = open_folder(folder)
    if decoded is not None and decoded.content_hash() != store.content_hash():
        raise InputError(f"{entry.name}: the decoded images in {folder} are damaged; remove that folder")
    held = f"{int((~store.test).sum()):,} + {int(store.test.sum()):,}" if store.test is not None else f"{len(store):,}"
    return f"good, {held} images as {store.name} ({layout.kind}), sha256 {store.content_hash()[:16]}…"


def check_archives(entry: Entry, root: Path) -> None:
    """Compare the checksums of the official files that are still there."""
    import pooch

    for remote in entry.files:
        path = root / entry.name / remote.name
        if remote.md5 is not None and path.is_file():
            found = pooch.file_hash(str(path), alg="md5")
            if found != remote.md5:
                raise InputError(f"{entry.name}: {path} has the md5 {found}; the published one is {remote.md5}")


def check_corruptions(entry: Entry, root: Path, on_bad: OnBad, progress: Progress | None) -> str:
    layout, found = require(entry, root)
    folder = found[0]
    if layout.decodes:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    else:
        names = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
    for name in names:
        options: dict[str, Any] = {"on_bad": on_bad, "progress": progress} if layout.decodes else {}
        store = read_layout(layout, found, part=(name, None), **options)
        compare(f"{entry.name}/{name}", store, layout.facts)
        assert store.domains is not None
        levels = (store.domains % len(SEVERITIES)).bincount(minlength=len(SEVERITIES)).tolist()
        if len(set(levels)) != 1:
            raise InputError(f"{entry.name}/{name} has {levels} images at the severities 1 to 5; all must be alike")
    wanted = layout.facts.corruptions
    if wanted is not None and len(names) != wanted:
        raise InputError(f"{entry.name} has {len(names)} corruptions ({', '.join(names)}); {wanted} are known")
    return f"good, {len(names)} corruptions as {layout.name} ({layout.kind})"


def compare(name: str, store: ImageStore, facts: Facts) -> None:
    """Complain about the first fact that the images do not show."""
    train = store.labels if store.test is None else store.labels[~store.test]
    test = store.labels[:0] if store.test is None else store.labels[store.test]

    def expect(what: str, found: object, wanted: object) -> None:
        if wanted is not None and found != wanted:
            raise InputError(f"{name} has {found} {what}; {wanted} are known")

    expect("images" if facts.test is None else "training images", len(train), facts.train)
    expect("test images", len(test), facts.test)
    if facts.px is not None:
        expect("pixels (height, width)", store.shape[1:], (facts.px, facts.px))
    expect("classes", len(set(store.labels.tolist())), facts.classes)
    for part, wanted in ((train, facts.train_classes), (test, facts.test_classes)):
        if wanted is None:
            continue
        counts = part.bincount(minlength=facts.classes or 1).tolist()
        for label, count in enumerate(counts):
            each = wanted if isinstance(wanted, int) else wanted[label]
            expect(f"{'test' if part is test else 'training'} images of class {label}", count, each)
    if facts.domains is not None:
        found = None if store.domains is None else tuple(store.domains.bincount().tolist())
        expect("images by domain", found, facts.domains)
    first = int(train[0])
    if facts.first_label is not None and first != facts.first_label:
        raise InputError(f"{name} has the label {first} at its first image; {facts.first_label} is known")


def decode(config: Config) -> str:
    """Decode what a run needs and the cache does not have yet, with progress; afterwards it opens at once.

    Returned is the note about the IN data: what people should know of how it was read, or nothing.
    """
    note = ""
    with bars(MofNCompleteColumn()) as progress:
        start = reporter(progress)

        def shown(name: str) -> Progress:
            begun: list[Progress] = []  # a bar appears with the first image: what is cached needs none

            def step(done: int, total: int) -> None:
                if not begun:
                    begun.append(start(name))
                begun[0](done, total)

            return step

        sources = ((config.data, config.sites), *((name, "") for name in config.out))
        for number, (spec, sites) in enumerate(sources):
            if ".py:" not in spec:  # a user's function makes its own images, and is asked once only
                on_bad: OnBad = "skip" if config.on_bad == "skip" else "error"
                found = load_source(spec, Path(config.data_root), sites=sites, on_bad=on_bad, progress=shown(spec))
                note = found.note if number == 0 else note  # classes of OUT do not matter
    return note


def bars(column: Any) -> RichProgress:
    """A live line on a terminal; nothing where the output is a file."""
    parts = (TextColumn("{task.description}"), BarColumn(), column, TimeRemainingColumn())
    return RichProgress(*parts, console=console, disable=not console.is_terminal)


def reporter(progress: RichProgress) -> Callable[[str], Progress]:
    """A line in the display for each name, as a function of (done, total)."""

    def start(name: str) -> Progress:
        task = progress.add_task(name, total=None)
        return lambda done, total: progress.update(task, completed=done, total=total)

    return start


def say(text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
