"""Checkpoints: base spec, growth log, weights, optimiser state, streams, records - no pickle.

A checkpoint is a folder; its ``manifest.json`` is written last and holds the sha256 of every
other file, so a checkpoint is complete and undamaged or it is not used.
"""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim

from growth_service.core.receipts import Receipt
from growth_service.errors import CheckpointError, GrowthError
from growth_service.growth import growth_log, rebuild
from growth_service.models import build
from growth_service.training.files import sha256_of, write_json
from growth_service.training.layout import stage_folders

FORMAT_VERSION = 3
"""Written. 2 knows wider streams and removals; since 3 new units of a sequential transformer block read attention too.
Logs of earlier formats are ones of 3 that have none of these."""
_READABLE = (1, 2, 3)
_FILES = ("weights.safetensors", "optimizer.safetensors", "streams.json", "history.json")
_MANIFEST: dict[str, type] = {"base": dict, "growth_log": list, "sha256": dict}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A network with its optimiser state and everything needed to go on."""

    model: nn.Module
    base: dict[str, Any]
    """Specification and seed of the base network: ``{"spec": ..., "seed": ...}``."""
    optimizer_state: dict[str, Tensor]
    """``<parameter>/<state>`` to tensor; empty for a jumpboard."""
    streams: dict[str, Any]
    """Data position and whatever else the loop counts."""
    history: list[dict[str, Any]]
    """Records of the stages so far."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint so that a kill leaves the old state or the new one (or, between two renamings, neither)."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {k: v.detach().contiguous() for k, v in checkpoint.model.state_dict().items()}
    save_file(weights, partial / "weights.safetensors")
    save_file(
        {k: v.detach().contiguous() for k, v in checkpoint.optimizer_state.items()}, partial / "optimizer.safetensors"
    )
    write_json(partial / "streams.json", checkpoint.streams)
    write_json(partial / "history.json", checkpoint.history)
    manifest = {
        "format_version": FORMAT_VERSION,
        "base": checkpoint.base,
        "growth_log": [r.to_dict() for r in growth_log(checkpoint.model)],
        "sha256": {p.name: sha256_of(p) for p in sorted(partial.iterdir())},
    }
    write_json(partial / "manifest.json", manifest)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and rebuild its network.

    Raises:
        CheckpointError: If it is incomplete, damaged, of an unknown format, or does not fit its log.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no complete checkpoint: its manifest.json cannot be read ({error})"
        ) from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{folder / 'manifest.json'} is damaged: use the checkpoint before it")
    version = manifest.get("format_version")
    if version not in _READABLE:
        known = ", ".join(map(str, _READABLE))
        raise CheckpointError(
            f"{folder} has checkpoint format {version!r}, this version reads {known}: update growth-service"
        )
    if not all(isinstance(manifest.get(key), kind) for key, kind in _MANIFEST.items()):
        raise CheckpointError(f"{folder / 'manifest.json'} lacks one of {', '.join(_MANIFEST)}: use the one before it")
    for name in (*_FILES, *manifest["sha256"]):
        if not (folder / name).is_file() or sha256_of(folder / name) != manifest["sha256"].get(name):
            raise CheckpointError(
                f"{folder / name} is damaged or missing (its sha256 differs): use the checkpoint before it"
            )
    base = manifest["base"]
    widened = any(r.get("kind") == "widen" and r["block"].get("type") != "conv" for r in manifest["growth_log"])
    if version < FORMAT_VERSION and widened and base["spec"].get("family") == "gpt":
        raise CheckpointError(
            f"{folder} has checkpoint format {version} and units or heads that were added to a transformer block: what "
            f"those read has changed in format {FORMAT_VERSION}; train the network anew"
        )
    try:
        log = [Receipt.from_dict(r) for r in manifest["growth_log"]]
        model = rebuild(build(base["spec"], seed=base["seed"]), log)
        model.load_state_dict(load_file(folder / "weights.safetensors"), strict=True)
        optimizer_state = load_file(folder / "optimizer.safetensors")
    except (GrowthError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"weights in {folder} do not fit its growth log: {error}") from error
    return Checkpoint(
        model=model,
        base=base,
        optimizer_state=optimizer_state,
        streams=json.loads((folder / "streams.json").read_text(encoding="utf-8")),
        history=json.loads((folder / "history.json").read_text(encoding="utf-8")),
    )


def newest(stages: Path) -> Checkpoint | None:
    """The last undamaged stage checkpoint in a trial's folder; damaged ones are passed over with a warning."""
    for folder in stage_folders(stages):
        try:
            return load_checkpoint(folder)
        except CheckpointError as error:
            logger.warning("Going back to the checkpoint before, since %s", error)
    return None


def optimizer_tensors(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Optimiser state by parameter name: ``<parameter>/<state>``."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }


def restore_optimizer(optimizer: optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Inverse of :func:`optimizer_tensors`; parameters without an entry keep a zero state."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"optimiser state for {name!r} has no parameter in the network")
        optimizer.state[parameters[name]][entry] = value.clone()
