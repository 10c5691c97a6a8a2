"""The networks and the data that ``growth probe`` can be pointed at: code, torchvision, local checkpoints."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from growth_service.errors import DataNotFoundError, GrowthError, UserError
from growth_service.probing.candidates import Batch, Loss, Reduction

SCHEMES = ("python:", "torchvision:", "hf:")
CONTEXT = 64
"""Tokens of a sequence cut from a text."""
IMAGE_SIZE = 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeData:
    """What a probe looks at; a factory given as ``--data python:module:factory`` returns one of these."""

    batches: Iterable[Batch]
    """Held-out samples, in random order."""
    train_batches: Iterable[Batch] | None = None
    pool: Iterable[Any] | None = None
    """Inputs without labels, disjoint from ``batches``; needed where there are no training samples."""
    loss: Loss | None = None
    """None: cross-entropy of (logits, classes), of every token for sequences."""
    reduction: Reduction = "mean"
    sites: tuple[str, ...] | None = None


def load_model(name: str, *, checkpoint: Path | None, weights: str | None) -> nn.Module:
    """Build the network that MODEL means, and load its weights where there are some.

    Args:
        name: ``python:package.module:factory``, ``torchvision:resnet18`` or ``hf:FOLDER``.
        checkpoint: A state dictionary (safetensors, or torch's format with tensors only).
        weights: Name of torchvision weights, for example ``DEFAULT``, from torchvision's own cache.

    Raises:
        UserError: If there is no such network, or the weights do not fit it.
    """
    scheme, _, rest = name.partition(":")
    match scheme:
        case "python":
            model = _call(rest, what="MODEL")
            if not isinstance(model, nn.Module):
                raise UserError(f"{name} returned a {type(model).__name__}: the factory must return a torch nn.Module")
        case "torchvision":
            model = _torchvision(rest, weights)
        case _:
            model = _hugging_face(rest)
    if checkpoint is not None:
        _load(model, checkpoint)
    return model


def load_data(name: str, model: nn.Module, *, samples: int | None, batch_size: int, seed: int) -> ProbeData:
    """The samples that ``--data`` means.

    Args:
        name: ``python:module:factory``; a ``.npz`` file with ``inputs`` and ``targets`` (held out), and
            ``train_inputs``, ``train_targets`` or ``pool``; a ``.txt`` file (sequences of tokens); or a
            folder with ``train/`` and ``val/`` class folders of images.
        model: Gives the vocabulary for texts.
        samples: Most held-out samples, and most training samples.
        batch_size: Samples a batch.
        seed: Of the order: samples are shuffled, since limits assume a random order.
    """
    if name.startswith("python:"):
        found = _call(name.removeprefix("python:"), what="--data")
        if isinstance(found, Mapping):
            try:
                found = ProbeData(**found)
            except TypeError as error:
                raise UserError(f"--data {name} returned a mapping that is no ProbeData: {error}") from error
        if not isinstance(found, ProbeData):
            raise UserError(
                f"--data {name} returned a {type(found).__name__}: return a ProbeData, or a mapping with its fields "
                "(batches, train_batches, pool, loss, reduction, sites)"
            )
        return found
    path = Path(name)
    if not path.exists():
        raise DataNotFoundError(
            f"--data {name}: no such file or folder; use a .npz or .txt file, a folder with train/ and val/, or "
            "python:module:factory"
        )
    if path.is_dir():
        return _image_folder(path, samples=samples, batch_size=batch_size, seed=seed)
    match path.suffix:
        case ".npz":
            return _arrays(path, model, samples=samples, batch_size=batch_size, seed=seed)
        case ".txt":
            return _text(path, model, samples=samples, batch_size=batch_size, seed=seed)
        case suffix:
            raise UserError(f"--data {name}: cannot read {suffix or 'a file without an ending'}; use .npz or .txt")


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean over samples of the cross-entropy of classes; for sequences, mean over their tokens."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if logits is None:
        logits = outputs[0] if isinstance(outputs, tuple | list) else None
    if not isinstance(logits, Tensor):
        raise UserError(f"the network returns a {type(outputs).__name__} without logits: give a loss in a ProbeData")
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


def _call(path: str, *, what: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise UserError(f"{what} python:{path}: write python:package.module:factory")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
        factory: Callable[[], Any] = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{what} python:{path}: {error}; start the command where {module_name} can be imported"
        ) from error
    finally:
        sys.path.pop(0)
    try:
        return factory()
    except GrowthError:
        raise
    except Exception as error:  # somebody else's code: whatever is wrong with it, say so
        raise UserError(
            f"{what} python:{path}: calling it without arguments failed with {type(error).__name__}: {error}"
        ) from error


def _torchvision(name: str, weights: str | None) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        near = [m for m in models.list_models() if m.startswith(name[:4])] or models.list_models()
        raise UserError(f"torchvision has no model {name!r}: use one of {', '.join(near[:8])}, ...")
    try:
        model: nn.Module = models.get_model(name, weights=weights)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the weights {weights!r} of {name} cannot be loaded ({error}): put the file into torchvision's cache, or "
            "pass --checkpoint"
        ) from error
    return model


def _hugging_face(folder: str) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UserError("hf: models need the extra: pip install 'growth-service[transformers]'") from error
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"hf:{folder}: no config.json there; give the folder that save_pretrained wrote")
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"hf:{folder} cannot be loaded: {error}") from error
    return model


def _load(model: nn.Module, checkpoint: Path) -> None:
    try:
        if checkpoint.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(checkpoint)
        else:
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state.get("state_dict", state))  # type: ignore[arg-type]
    except Exception as error:  # a file of somebody else's: whatever is wrong with it, say so
        raise UserError(f"--checkpoint {checkpoint} does not fit {type(model).__name__}: {error}") from error


def _arrays(path: Path, model: nn.Module, *, samples: int | None, batch_size: int, seed: int) -> ProbeData:
    """Arrays of numbers; those with a fraction in the number type of the network."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    except (ValueError, TypeError, OSError, BadZipFile) as error:
        raise UserError(f"--data {path} is no archive of arrays of numbers: {error}") from error
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    arrays = {k: v.to(own) if v.is_floating_point() else v for k, v in arrays.items()}
    if missing := [n for n in ("inputs", "targets") if n not in arrays]:
        raise UserError(f"--data {path} has no array {missing[0]!r}: it has {', '.join(arrays) or 'none'}")
    rng = np.random.default_rng(seed)
    held_out = _shuffled(arrays["inputs"], arrays["targets"], rng, limit=samples)
    train = None
    if "train_inputs" in arrays and "train_targets" in arrays:
        train = _shuffled(arrays["train_inputs"], arrays["train_targets"], rng, limit=samples)
    pool = arrays.get("pool")
    return _split(held_out, train, pool, batch_size=batch_size)


def _text(path: Path, model: nn.Module, *, samples: int | None, batch_size: int, seed: int) -> ProbeData:
    tokens = _tokens(path, model)
    length = min(CONTEXT, _context(model) or CONTEXT)
    num = (len(tokens) - 1) // length
    if num < 8:
        raise UserError(f"--data {path}: {len(tokens)} tokens make {num} sequences of {length}; at least 8 are needed")
    inputs = torch.from_numpy(tokens[: num * length].reshape(num, length))
    targets = torch.from_numpy(tokens[1 : num * length + 1].reshape(num, length))
    held_out = _shuffled(inputs, targets, np.random.default_rng(seed), limit=None if samples is None else 2 * samples)
    return _split(held_out, None, None, batch_size=batch_size)


def _tokens(path: Path, model: nn.Module) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Token ids of a text: the model folder's own tokenizer where it has one, else its bytes."""
    text = path.read_text(encoding="utf-8", errors="replace")
    folder = getattr(getattr(model, "config", None), "_name_or_path", "")
    if folder and any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        from transformers import AutoTokenizer

        return np.array(AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"], dtype=np.int64)
    vocab = getattr(getattr(model, "config", None), "vocab_size", None)
    found = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    if vocab is not None and found.max(initial=0) >= vocab:
        raise UserError(
            f"--data {path}: without a tokenizer in the model's folder a text is read as bytes, but the vocabulary has "
            f"only {vocab} entries: save the tokenizer beside the model, or give batches by python:module:factory"
        )
    return found


def _context(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    value = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return value if isinstance(value, int) else None


def _image_folder(path: Path, *, samples: int | None, batch_size: int, seed: int) -> ProbeData:
    if not (path / "val").is_dir():
        raise UserError(f"--data {path}: no folder val/ in it; expected val/CLASS/*.png, and train/CLASS/*.png if any")
    from torchvision import datasets, transforms

    steps = transforms.Compose(
        [
            transforms.Resize(IMAGE_SIZE * 8 // 7),
            transforms.CenterCrop(IMAGE_SIZE),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    rng = np.random.default_rng(seed)

    def batches(part: str) -> Any:
        found = datasets.ImageFolder(str(path / part), transform=steps)
        order = rng.permutation(len(found))[: samples or len(found)]
        return torch.utils.data.DataLoader(torch.utils.data.Subset(found, order.tolist()), batch_size=batch_size)

    held_out = batches("val")
    if (path / "train").is_dir():
        return ProbeData(batches=held_out, train_batches=batches("train"))
    listed = [tuple(b) for b in held_out]
    half = len(listed) // 2
    if not half:
        raise UserError(f"--data {path}: without train/ at least two batches of val/ are needed, one of them as a pool")
    return ProbeData(batches=listed[half:], pool=[inputs for inputs, _ in listed[:half]])


def _shuffled(inputs: Tensor, targets: Tensor, rng: np.random.Generator, *, limit: int | None) -> tuple[Tensor, Tensor]:
    if len(inputs) != len(targets):
        raise UserError(f"{len(inputs)} inputs and {len(targets)} targets: they must be as many")
    order = torch.from_numpy(rng.permutation(len(inputs))[: limit or len(inputs)])
    return inputs[order], targets[order]


def _split(
    held_out: tuple[Tensor, Tensor], train: tuple[Tensor, Tensor] | None, pool: Tensor | None, *, batch_size: int
) -> ProbeData:
    """Batches; without training samples or a pool, the first half of the held-out inputs is the pool."""
    inputs, targets = held_out
    if train is None and pool is None:
        half = len(inputs) // 2
        pool, inputs, targets = inputs[:half], inputs[half:], targets[half:]
    return ProbeData(
        batches=list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True)),
        train_batches=None if train is None else list(zip(*(t.split(batch_size) for t in train), strict=True)),
        pool=None if pool is None else list(pool.split(batch_size)),
    )
