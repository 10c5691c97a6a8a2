"""The candidates that a probe looks at where none are named."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from growth_service.blocks import Calibrated
from growth_service.core.streams import stream_seed
from growth_service.errors import UserError
from growth_service.models import default_block, resolve, site_of
from growth_service.models import sites as known_sites
from growth_service.models.sites import reader
from growth_service.probing.candidates import Candidate, Taps, first_samples, is_projected, run_model, untouched

Inner = Literal["copy", "random"]
_CALIBRATION_SAMPLES = 64


def default_candidates(
    model: nn.Module,
    paths: Sequence[str] | None,
    blocks: dict[str, nn.Module | Sequence[nn.Module]] | None,
    *,
    example: Any,
    inner: Inner | Sequence[Inner],
    seed: int,
) -> list[Candidate]:
    """New blocks at every site: the user's, or shaped like the nearest block.

    Args:
        model: The network.
        paths: Sites; None: those of ``blocks``, else the known ones.
        blocks: By site, one or several.
        example: Inputs, on which the streams are seen.
        inner: Where inner weights of default blocks come from, one candidate each.
        seed: Of random draws.
    """
    kinds: list[Inner] = [inner] if isinstance(inner, str) else list(inner)
    if unknown := [k for k in kinds if k not in ("copy", "random")]:
        raise UserError(f"unknown inner weights {unknown[0]!r}: use 'copy', 'random' or both")
    wanted = list(paths) if paths is not None else list(blocks or [s.path for s in known_sites(model)])
    for path in wanted:
        resolve(model, path)
    few = first_samples(example, _CALIBRATION_SAMPLES)
    with untouched(model, with_gradient=False), Taps(model, wanted, with_gradient=False) as taps:
        run_model(model, few)
        taps.check()
    made = []
    for path in wanted:
        z = taps.stream[path]
        given = (blocks or {}).get(path)
        if given is not None:
            made += _given(path, list(given) if isinstance(given, Sequence) else [given])
            continue
        work = torch.float32 if z.dtype in (torch.float16, torch.bfloat16) else z.dtype
        sources: list[str | None] = []
        for number, kind in enumerate(kinds):
            generator = torch.Generator().manual_seed(stream_seed(seed, "candidate", path, number))
            site = site_of(z, path=path)
            block, source = default_block(model, site, generator=generator, copy=kind == "copy")
            if kind == "copy" and (source is None or source in sources) and len(kinds) > 1:
                continue  # nothing (else) to copy here
            sources.append(source)
            block.to(dtype=work, device=z.device)
            if source is None and isinstance(block, Calibrated):
                block.calibrate(z.to(work))
            shared = source if source is not None and source == reader(model, site) else None
            name = f"{kind} {number}" if kinds.count(kind) > 1 else kind
            name = name if len(kinds) > 1 else ""
            made.append(Candidate(path=path, block=block, shared=shared, name=name))
    return made


def _given(path: str, given: list[nn.Module]) -> list[Candidate]:
    made = []
    for number, block in enumerate(given):
        if not any(p.requires_grad for p in block.parameters()) and not is_projected(block):
            raise UserError(f"the block {type(block).__name__} for {path!r} has no trainable parameters")
        made.append(Candidate(path=path, block=block, name=str(number) if len(given) > 1 else ""))
    return made
