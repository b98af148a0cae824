"""Data, a network and an experiment that are quick to train."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import nn

from rwsim.experiments import EXPERIMENTS
from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.train import Recipe

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_pair(count, seed):
    """(bytes of an images' file, of a labels' file): noise that is brighter the larger the label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    pixels = (rng.random((count, 28, 28)) * 25 * (1 + labels)[:, None, None]).astype(np.uint8)
    head = count.to_bytes(4, "big")
    side = (28).to_bytes(4, "big")
    return b"\0\0\x08\x03" + head + side + side + pixels.tobytes(), b"\0\0\x08\x01" + head + labels.tobytes()


def make_data(folder: Path) -> Path:
    folder.mkdir()
    for name, content in zip(FILES, idx_pair(96, 0) + idx_pair(40, 1), strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    words = np.random.default_rng(2).choice(["to", "be", "or", "not", "that", "is", "the", "question"], 2000)
    (folder / "some.txt.gz").write_bytes(gzip.compress(" ".join(words).encode()))
    return folder


class Nothing:
    """A probe that measures nothing."""

    due = False

    def replayed(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def nothing(model, optimizer):
    return Nothing()


class Tiny(nn.Module):
    """Quick to train, too small to learn its images by heart; scale-invariant where it is standardized."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(49, width, bias=False), nn.Linear(width, 10, bias=False)

    def forward(self, x):
        return self.head(F.gelu(self.hidden(F.avg_pool2d(x, 4).flatten(1))))


def tiny_experiment(steps: int = 240, seeds: int = 2, **changed) -> Experiment:
    """An experiment of `dynamics`' kind whose trainings take a second; its network must be among `NETWORKS` as ``tiny``."""
    recipe = Recipe("tiny", "adamw", {"lr": 2e-2, "weight_decay": 4.0, "betas": (0.9, 0.99)}, steps, 16, standardized=True, every=2)
    config = Config((Case("tiny", replace(recipe, **changed)),), seeds)
    return replace(EXPERIMENTS["dynamics"], configs={"smoke": config})
