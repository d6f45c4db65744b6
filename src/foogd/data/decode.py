"""One encoded image to uint8 pixels, here or in worker processes that decode on all cores.

Run as a script this file is the worker. It imports no other part of foogd, so that a worker starts in a moment, and it
is no `multiprocessing` child, so that a user's script needs no `if __name__ == "__main__"` to read images.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, final

import numpy as np

MAX_PIXELS = 64_000_000  # a larger image is a mistake or an attack on memory
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "GIF", "TIFF")  # Pillow starts other programs for some of the others
_CHUNK = 250  # images a job
_FEW = 1000  # so few images are decoded before workers have started
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}  # 8 bits a channel or fewer
_ORIENTATION = 0x0112  # the remark of a camera about how it was held


class BadImage(ValueError):
    """An image cannot be used; the message says why, without the name of the file."""


def decode(source: bytes | str, size: int | None = None) -> Any:
    """H×W×3 uint8 pixels of an encoded image or of the file with this name, upright.

    With `size` the shorter side is made so long (bilinear), and the centre is cut out as a square.
    """
    from PIL import Image

    with _one_error():
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not data:
            raise BadImage("it is empty")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return picture_pixels(image, size)


def picture_pixels(picture: Any, size: int | None = None) -> Any:
    """The pixels of a PIL picture, the same as those of the file that it was read from."""
    with _one_error():
        rgb = as_rgb(picture)
        if size is not None and rgb.size != (size, size):
            rgb = square(rgb, size)
        return np.array(rgb)


def as_rgb(picture: Any) -> Any:
    """A PIL picture of any mode with 8 bits a channel in colour and upright; what says how clear it is goes."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"it has {width}×{height} pixels, and {MAX_PIXELS:,} is the most that is read")
    if picture.mode not in _MODES:
        raise BadImage(f"its pixels have the mode {picture.mode}, and 8 bits a channel are needed")
    upright = _upright(picture)
    # Pillow warns unless such palettes become RGBA first.
    return (upright.convert("RGBA") if "transparency" in upright.info else upright).convert("RGB")


def _upright(picture: Any) -> Any:
    from PIL import ImageOps

    picture.load()  # some formats are turned by Pillow itself, and say afterwards that they are upright
    try:
        return ImageOps.exif_transpose(picture) if picture.getexif().get(_ORIENTATION, 1) != 1 else picture
    except Exception:  # a damaged remark about an image does not spoil the image
        return picture


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    from PIL import UnidentifiedImageError

    try:
        yield
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"it is not an image of a known format: {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's decoders raise anything on damaged data: SyntaxError, struct.error, …
        strerror = error.strerror if isinstance(error, OSError) else None
        raise BadImage(" ".join(str(strerror or error or type(error).__name__).split())) from error


def square(rgb: Any, size: int) -> Any:
    """A PIL image with its shorter side made `size` pixels long (bilinear), then its centre as a square."""
    from PIL import Image

    width, height = rgb.size
    short = min(width, height)
    new = (size * width // short, size * height // short)
    if new[0] * new[1] > MAX_PIXELS:
        raise BadImage(f"it has {width}×{height} pixels, too long and thin to be made {size} wide")
    left, top = round((new[0] - size) / 2), round((new[1] - size) / 2)
    return rgb.resize(new, Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def square_pixels(pixels: Any, size: int) -> Any:
    """The same of uint8 pixels H×W×C of any number of channels."""
    from PIL import Image

    if pixels.shape[:2] == (size, size):
        return pixels
    if pixels.shape[2] == 3:
        return np.array(square(Image.fromarray(pixels), size))
    channels = (np.ascontiguousarray(pixels[..., channel]) for channel in range(pixels.shape[2]))
    return np.stack([np.array(square(Image.fromarray(channel), size)) for channel in channels], axis=2)


def _attempt(source: bytes | str, size: int | None) -> Any:
    try:
        return decode(source, size)
    except BadImage as error:
        return str(error)


def decode_many(
    count: int, item: Callable[[int], bytes | str], size: int | None = None, workers: int | None = None
) -> Iterator[tuple[range, list[Any]]]:
    """Runs of decoded images in order; in place of a bad image stands the reason, a string."""
    chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    workers = min(workers, len(chunks))
    if count < _FEW or workers < 2 or not sys.executable:
        for chunk in chunks:
            yield chunk, [_attempt(item(i), size) for i in chunk]
        return
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    started = [_Worker() for _ in range(workers)]
    for worker in started:
        idle.put(worker)
    stopping = threading.Event()

    def decoded(chunk: range) -> list[Any]:
        worker = idle.get()
        try:
            return worker.decode([item(i) for i in chunk], size)
        except (OSError, ValueError, EOFError):
            if stopping.is_set():
                return []
            # A decoder that crashes takes its worker along: the images are tried one by one, each in a fresh process.
            worker = _Worker()
            started.append(worker)
            return [_alone(item(i), size) for i in chunk]
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(workers)
    try:
        yield from zip(chunks, pool.map(decoded, chunks), strict=True)
    finally:
        stopping.set()
        for worker in started:
            worker.kill()  # whoever waits for an answer sees the end of the pipe
        pool.shutdown(cancel_futures=True)
        for worker in started:
            worker.close()


def _alone(source: bytes | str, size: int | None) -> Any:
    worker = _Worker()
    try:
        return worker.decode([source], size)[0]
    except (OSError, ValueError, EOFError):
        return "the decoder crashed on it"
    finally:
        worker.kill()
        worker.close()


@final
class _Worker:
    """A process that decodes; jobs and answers are a line of JSON with raw bytes behind it."""

    def __init__(self) -> None:
        # -P: the folder of this file is no place to import from.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def decode(self, sources: list[bytes | str], size: int | None) -> list[Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        items = [source if isinstance(source, str) else len(source) for source in sources]
        stdin.write(json.dumps({"size": size, "items": items}).encode() + b"\n")
        stdin.writelines(source for source in sources if isinstance(source, bytes))
        stdin.flush()
        answers: list[Any] = []
        for answer in json.loads(_line(stdout)):
            if isinstance(answer, str):
                answers.append(answer)
            else:
                height, width = answer
                pixels = np.frombuffer(_exactly(stdout, height * width * 3), dtype=np.uint8)
                answers.append(pixels.reshape(height, width, 3))
        return answers

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not flushed has no reader any more
                continue


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the worker has ended")
    return line


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError("the worker has ended")
    return data


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """The worker: answers every job on `stdin` until there are no more."""
    for line in iter(stdin.readline, b""):
        job = json.loads(line)
        sources = [item if isinstance(item, str) else _exactly(stdin, item) for item in job["items"]]
        found = [_attempt(source, job["size"]) for source in sources]
        stdout.write(json.dumps([f if isinstance(f, str) else f.shape[:2] for f in found]).encode() + b"\n")
        stdout.writelines(f.data for f in found if not isinstance(f, str))
        stdout.flush()


if __name__ == "__main__":
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)  # the parent reports; a traceback here would only repeat it
