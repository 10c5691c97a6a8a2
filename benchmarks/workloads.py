"""The workloads of the benchmarks: data, family and training settings, without sizes, budgets or schedules.

Those of ``CALIBRATION`` tune the default policy; those of ``HELD_OUT`` judge it and are never tuned on.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np


def planted() -> dict[str, Any]:
    """12,000 + 2,000 points in 16 dimensions, classed by a random network of three layers: depth is in the task."""
    rng = np.random.default_rng(20260830)
    z = inputs = rng.standard_normal((14_000, 16)).astype(np.float32)
    for _ in range(3):
        weight = rng.standard_normal((z.shape[1], 32)).astype(np.float32) / z.shape[1] ** 0.5
        z = np.tanh(1.5 * z @ weight)
    logits = z @ rng.standard_normal((32, 6)).astype(np.float32)
    targets = (logits - logits.mean(axis=0)).argmax(axis=1)
    return {
        "inputs": inputs[:12_000],
        "targets": targets[:12_000],
        "test_inputs": inputs[12_000:],
        "test_targets": targets[12_000:],
    }


def given_data(name: str) -> Path | None:
    """A file of the data that cannot be downloaded everywhere, or None where it is missing."""
    here = Path(__file__).resolve().parents[1]
    for folder in (os.environ.get("GROWTH_DATA"), here.parent / "shared" / "data"):
        if folder is not None and (Path(folder) / name).is_file():
            return Path(folder) / name
    return None


def _text(**data: Any) -> dict[str, Any]:
    return {
        "data": {"context": 64, "limits": {"probe": 512, "val": 512, "test": 1024}} | data,
        "model": {"family": "gpt", "heads": 4},
        "training": {"batch_size": 12, "evaluate_samples": 256},
        "probe": {"samples": 128, "train_samples": 128},
    }


def _images(
    *, batch_size: int, learning_rate: float, stem_stride: int = 1, evaluate_samples: int = 1024, **data: Any
) -> dict[str, Any]:
    return {
        "data": data,
        "model": {"family": "resnet", "stem_stride": stem_stride},
        "training": {"batch_size": batch_size, "learning_rate": learning_rate, "evaluate_samples": evaluate_samples},
        "probe": {"samples": 1000, "train_samples": 1000},
    }


COMMON: dict[str, Any] = {
    "version": 1,
    "training": {
        "optimizer": "adamw", "weight_decay": 0.01, "shards": 1, "rates": "wsd", "rewarm": "new",
        "warmup_share": 0.1, "decay_share": 0.2, "floor_share": 0.02,
    },
}  # fmt: skip

CALIBRATION: dict[str, dict[str, Any]] = {
    "docs": _text(name="python", folder="search_spaces.texts:python_documentation"),
    "sources": _text(name="python", folder="search_spaces.texts:python_sources"),
    "digits": _images(name="digits", batch_size=32, learning_rate=0.006),
    "planted": {
        "data": {"name": "python", "folder": "benchmarks.workloads:planted"},
        "model": {"family": "mlp"},
        "training": {"batch_size": 128, "learning_rate": 0.005, "evaluate_samples": 1024},
        "probe": {"samples": 1000, "train_samples": 1000},
    },
}


def learning_rate(workload: str, width: int) -> float:
    """Of texts: 3e-3 up to 32 channels, 1e-3 at 128, the root of the width between."""
    fixed = (CALIBRATION | HELD_OUT)[workload]["training"].get("learning_rate")
    return float(fixed or min(3e-3, 1e-3 * (128 / width) ** 0.8))


HELD_OUT: dict[str, dict[str, Any]] = {
    "shakespeare": _text(name="text", folder=str(given_data("tinyshakespeare.txt"))),
    "fashion": _images(
        name="fashion_mnist",
        batch_size=64,
        learning_rate=0.005,
        stem_stride=2,
        evaluate_samples=512,
        limits={"train": 20000, "probe": 1000, "val": 1000, "test": 5000},
    ),
    "cifar": _images(
        name="cifar10",
        folder=str((given_data("cifar10_jpeg.npz") or Path()).parent),
        batch_size=64,
        learning_rate=0.005,
        stem_stride=2,
        evaluate_samples=512,
        limits={"train": 20000, "probe": 1000, "val": 1000, "test": 5000},
    ),
}


def job_data(
    workload: str, *, width: int, budget: float, seed: int, stages: list[float], storage: str
) -> dict[str, Any]:
    """A job of one workload as plain data, without schedules: widths double from group to group of images."""
    own = (CALIBRATION | HELD_OUT)[workload]
    widths = [width, 2 * width] if own["model"]["family"] == "resnet" else [width]
    return COMMON | own | {
        "name": workload,
        "seed": seed,
        "model": own["model"] | {"widths": widths},
        "training": COMMON["training"] | own["training"] | {"learning_rate": learning_rate(workload, width)},
        "budget": {"trial": budget},
        "search": {"stages": stages, "schedules": [{"use": "scratch", "name": "x", "blocks": [1], "hidden": [8]}]},
        "storage": storage,
    }  # fmt: skip
