"""Random crops and flips of training images, the same for the same place in the data whoever asks for them.

Only training batches are augmented; probes, evaluations and line searches see images as they are.
"""

import torch
from torch import Tensor

from growth_service.core.streams import stream_seed
from growth_service.errors import UserError
from growth_service.training.batches import DataPosition
from growth_service.training.gradients import Shard

PAD_SHARE = 1 / 8
"""Pixels added at each border before a crop, as a share of the side."""


def augmented(shards: list[Shard], kind: str, *, seed: int, position: DataPosition) -> list[Shard]:
    """Shards of a global batch with each image shifted by up to an eighth and flipped half of the time.

    Args:
        shards: Of one batch.
        kind: ``crop_flip``, or ``none``.
        seed: Of the trial.
        position: Behind the batch; with the number of the shard it names the random stream, so that a shard is the
            same on whichever rank it is worked on, and after a resume.

    Raises:
        UserError: If the samples are no images.
    """
    if kind == "none":
        return shards
    return [
        (_crop_flip(inputs, seed=stream_seed(seed, "augment", position.epoch, position.offset, number)), targets)
        for number, (inputs, targets) in enumerate(shards)
    ]


def check_augmentable(kind: str, input_shape: list[int]) -> None:
    """Refuse augmentation of what is no image.

    Raises:
        UserError: Naming the shape.
    """
    if kind != "none" and len(input_shape) != 3:
        raise UserError(f"training.augment {kind} is for images [C, H, W]: samples have shape {input_shape}; use none")


def _crop_flip(images: Tensor, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    num, _, height, width = images.shape
    pads = [max(1, int(PAD_SHARE * side)) for side in (height, width)]
    padded = torch.nn.functional.pad(images, (pads[1], pads[1], pads[0], pads[0]), mode="replicate")
    top, left = (torch.randint(0, 2 * pad + 1, (num,), generator=generator) for pad in pads)
    flip = torch.rand(num, generator=generator) < 0.5
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    sample = torch.arange(num)[:, None, None]
    found: Tensor = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return found.contiguous()
