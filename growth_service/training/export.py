"""A grown network as a folder of plain files: weights, and the recipe that rebuilds it. No pickle anywhere.

``weights.safetensors`` holds every tensor by name, ``recipe.json`` the base (where it is a network of this
project's families), the growth log, and a digest of the weights. A base of one's own is built by the reader, with
fresh weights of any kind, and handed to :func:`load_network`.
"""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from growth_service.core.receipts import Receipt
from growth_service.errors import CheckpointError, GrowthError, UserError
from growth_service.growth import growth_log, rebuild
from growth_service.growth.check import growable
from growth_service.models import Family, build
from growth_service.training.files import sha256_of, write_json

FORMAT_VERSION = 1
_FIELDS: dict[str, type] = {"growth_log": list, "tied": dict, "sha256": str}


def save_network(model: nn.Module, folder: Path | str) -> None:
    """Write a grown network.

    Args:
        model: Any network that grew through this package, or did not grow at all.
        folder: Made if it is not there; an older network in it is replaced.
    """
    folder = Path(folder)
    _check_savable(model)
    weights, tied = _untied(model)
    recipe = {
        "format_version": FORMAT_VERSION,
        "base": {"spec": model.spec} if isinstance(model, Family) else None,
        "growth_log": [r.to_dict() for r in growth_log(model)],
        "tied": tied,
    }
    try:
        json.dumps(recipe)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the network's specification or growth log is no plain JSON: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".weights.partial"
    save_file(weights, partial)
    (folder / "recipe.json").unlink(missing_ok=True)  # weights without a recipe are no network
    partial.replace(folder / "weights.safetensors")
    write_json(folder / "recipe.json", recipe | {"sha256": sha256_of(folder / "weights.safetensors")})


def _check_savable(model: nn.Module) -> None:
    """Refuse what could not be read back.

    Raises:
        CheckpointError: If the network is wrapped, compiled, sharded, or its log is not that of its modules.
    """
    try:
        inner = growable(model)
    except UserError as error:
        raise CheckpointError(f"cannot be saved: {error}") from error
    if inner is not model:
        raise CheckpointError("cannot be saved: a compiled network; save the module inside (model._orig_mod)")
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            raise CheckpointError(
                f"cannot be saved: {name!r} is a {type(tensor).__name__}; gather a sharded network first (its full "
                "state dictionary in an unsharded network that follows it)"
            )


def load_network(folder: Path | str, *, base: nn.Module | None = None) -> nn.Module:
    """Read a grown network.

    Args:
        folder: Of :func:`save_network`.
        base: The network as it was before it grew, with any weights, in the precision of the saved ones; it is
            changed in place. None: as the recipe says, for networks of this project's families.

    Returns:
        The network, with the saved weights and its growth log.

    Raises:
        CheckpointError: If a file is missing, damaged or of an unknown version, or does not fit the base.
    """
    folder = Path(folder)
    recipe = _read_recipe(folder)
    if base is None:
        if recipe["base"] is None:
            raise CheckpointError(
                f"{folder} holds a network that is none of this project's families: build its base as it was before "
                "it grew, and pass it as base="
            )
        try:
            base = build(recipe["base"]["spec"], seed=0)
        except (KeyError, TypeError, GrowthError) as error:
            raise CheckpointError(f"the base in {folder / 'recipe.json'} is damaged: {error!r}") from error
    state = _read_weights(folder, recipe)
    try:
        log = [Receipt.from_dict(r) for r in recipe["growth_log"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the growth log in {folder / 'recipe.json'} is damaged: {error}") from error
    if isinstance(base, Family):  # in the precision of the file
        names = [n for n, p in base.named_parameters() if p.is_floating_point() and n in state]
        base.to(state[names[0]].dtype if names else torch.float32)
    _check_fit(base, log, state, folder)
    rebuild(base, log)
    base.load_state_dict(state, strict=True)
    return base


def export_onnx(model: nn.Module, example: Any, path: Path | str) -> None:
    """Write the network's forward pass as ONNX, with a free batch size.

    Raises:
        CheckpointError: If the packages for it are not installed.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise CheckpointError(f"ONNX export needs {', '.join(missing)}: pip install 'growth-service[onnx]'")
    training = model.training
    model.eval()
    try:
        batch = torch.export.Dim("batch")
        program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    finally:
        model.train(training)
    assert program is not None
    program.save(str(path))


def _untied(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the names that share another's; views of a part of another are copied."""
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    known: dict[Any, str] = {}
    stored: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in known:
            tied[name] = known[key]
            continue
        known[key] = name
        place = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.detach().clone().contiguous() if place in stored else tensor.detach().contiguous()
        stored.add(place)
    return weights, tied


def _read_recipe(folder: Path) -> dict[str, Any]:
    try:
        recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no exported network: its recipe.json cannot be read ({error})"
        ) from error
    version = recipe.get("format_version") if isinstance(recipe, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has export format {version!r}, this version reads {FORMAT_VERSION}: update growth-service"
        )
    if not all(isinstance(recipe.get(name), kind) for name, kind in _FIELDS.items()) or "base" not in recipe:
        raise CheckpointError(f"{folder / 'recipe.json'} lacks one of base, {', '.join(_FIELDS)}: export again")
    found: dict[str, Any] = recipe
    return found


def _read_weights(folder: Path, recipe: dict[str, Any]) -> dict[str, Tensor]:
    path = folder / "weights.safetensors"
    if not path.is_file() or sha256_of(path) != recipe["sha256"]:
        raise CheckpointError(f"{path} is damaged or missing (its sha256 differs from the recipe's): export again")
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return state | {name: state[first] for name, first in recipe["tied"].items()}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'recipe.json'} is damaged: no tensor {error} in the file") from error


def _check_fit(base: nn.Module, log: list[Receipt], state: dict[str, Tensor], folder: Path) -> None:
    """Compare names, shapes and precision on a copy, so that a base that does not fit is left as it was.

    Raises:
        CheckpointError: Naming what differs.
    """
    try:
        trial = rebuild(copy.deepcopy(base), log)
    except GrowthError as error:
        raise CheckpointError(f"the growth log in {folder} does not fit this base: {error}") from error
    own = trial.state_dict()
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unknown:
        lacking = f"the file lacks {missing[0]!r}" if missing else f"the base lacks {unknown[0]!r}"
        raise CheckpointError(
            f"weights in {folder} do not fit this base: {lacking} ({len(missing) + len(unknown)} names)"
        )
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise CheckpointError(
                f"weights in {folder} do not fit this base: {name!r} is {tuple(tensor.shape)} in the file and "
                f"{tuple(own[name].shape)} in the base"
            )
        if own[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"weights in {folder} have another precision: {name!r} is {tensor.dtype} in the file and "
                f"{own[name].dtype} in the base; call base.to({tensor.dtype}) first"
            )
