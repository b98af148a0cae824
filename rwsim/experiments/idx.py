"""Fashion-MNIST from a directory of its four IDX files, gzipped or not. Nothing is downloaded."""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwsim.errors import InvalidArgument

# Where Debian's package puts them.
FOLDER = Path("/usr/share/datasets/fashion-mnist")
SIDE, CLASSES = 28, 10
# Magic numbers: unsigned bytes in three dimensions, in one.
_IMAGES, _LABELS = 0x803, 0x801
_REMEDY = "--data DIR takes the four files of Fashion-MNIST, as in Debian's package dataset-fashion-mnist"


@dataclass(frozen=True)
class Images:
    """Images as uint8 (image, row, column), and their labels as int64 (image)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, end: int) -> "Images":
        return Images(self.pixels[start:end], self.labels[start:end])

    def at(self, places: Tensor) -> "Images":
        return Images(self.pixels[places], self.labels[places])

    def to(self, device: torch.device) -> "Images":
        return Images(self.pixels.to(device), self.labels.to(device))


def load(folder: Path) -> tuple[Images, Images]:
    """(training images, test images).

    Raises:
        InvalidArgument: A file is missing, cut off, or not what its name says.
    """
    return _load(folder, "train"), _load(folder, "t10k")


def _load(folder: Path, split: str) -> Images:
    pixels = _read(folder, f"{split}-images-idx3-ubyte", _IMAGES, (SIDE, SIDE))
    file = f"{split}-labels-idx1-ubyte"
    labels = _read(folder, file, _LABELS, ()).long()
    if len(labels) != len(pixels):
        raise _broken(folder / file, f"must hold a label for each of {len(pixels)} images", len(labels))
    if int(labels.max()) >= CLASSES:
        raise _broken(folder / file, f"must hold labels below {CLASSES}", int(labels.max()))
    return Images(pixels, labels)


def _read(folder: Path, name: str, magic: int, inner: tuple[int, ...]) -> Tensor:
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise InvalidArgument("--data", f"must hold {name}, gzipped or not", str(folder), _REMEDY)
    try:
        data = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, "must be readable", str(error)) from None
    start = 8 + 4 * len(inner)
    if len(data) < start or int.from_bytes(data[:4], "big") != magic:
        raise _broken(path, f"must begin with the magic number {magic}", int.from_bytes(data[:4], "big"))
    count, *sizes = (int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4))
    if tuple(sizes) != inner:
        raise _broken(path, f"must hold images of {SIDE} by {SIDE}", tuple(sizes))
    if not count or len(data) - start != count * math.prod(inner):
        raise _broken(path, f"must hold {count * math.prod(inner)} bytes after its header, and some", len(data) - start)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(count, *inner)


def _broken(path: Path, rule: str, got: object) -> InvalidArgument:
    return InvalidArgument(str(path), rule, got, _REMEDY)
