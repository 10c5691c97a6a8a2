"""``growth probe``: certificates of a trained network - a study's, or anybody's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dashboards.terminal import advice_text, certificate_table
from growth_service.cli.console import emit_json, out
from growth_service.cli.runs import checkpoint_folder
from growth_service.core.units import parse_quantity
from growth_service.errors import UserError

PICTURES = (".png", ".pdf", ".svg")
SCHEMES = ("python:", "torchvision:", "hf:")


def probe_command(
    model: str,
    *,
    data: str | None,
    checkpoint: Path | None,
    weights: str | None,
    sites: list[str],
    until_decided: bool,
    batch_size: int,
    device: str,
    uri: str | None,
    storage: Path,
    tolerance: str | None,
    samples: int | None,
    level: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Find the network, probe it, print certificates and what to do next."""
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise UserError(f"--plot {plot}: a picture's name must end in one of {', '.join(PICTURES)}")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no folder {plot.parent}: make it, or name another file")
    nats = None if tolerance is None else parse_quantity(tolerance, dimension="nats")
    if model.startswith(SCHEMES):
        report = _probe_any(
            model,
            data=data,
            checkpoint=checkpoint,
            weights=weights,
            sites=sites,
            until_decided=until_decided,
            batch_size=batch_size,
            device=device,
            tolerance=nats,
            samples=samples,
            level=level,
            seed=seed,
        )
    else:
        foreign = {
            "--data": data,
            "--checkpoint": checkpoint,
            "--weights": weights,
            "--site": sites or None,
            "--until-decided": until_decided or None,
        }
        given = [name for name, value in foreign.items() if value is not None]
        if given:
            raise UserError(
                f"{given[0]} goes with {', '.join(SCHEMES)} models: {model!r} is a run of a study, which has its own"
            )
        folder = checkpoint_folder(model, uri=uri, storage=storage)
        from growth_service.training.probe_checkpoint import probe_checkpoint

        report = probe_checkpoint(folder, tolerance=nats, samples=samples, level=level, seed=seed)
        report["checkpoint"] = str(folder)
    if plot is not None:
        _draw(report, plot, title=model)
    if as_json:
        emit_json(report)
        return
    console = out()
    console.print(": ".join(filter(None, (model, report.get("checkpoint")))), style="bold", soft_wrap=True)
    console.print(certificate_table(report))
    console.print(advice_text(report), soft_wrap=True)
    if "next" in report:
        console.print(Text.assemble(("The schedule's own rule: ", "bold"), report["next"]), soft_wrap=True)
    for look in report["looks"]:
        console.print(f"look at {look['num_samples']} samples, level {look['level']:.3g}: {look['verdict']}")
    if plot is not None:
        console.print(f"picture: {plot}", soft_wrap=True)


def _probe_any(
    name: str,
    *,
    data: str | None,
    checkpoint: Path | None,
    weights: str | None,
    sites: list[str],
    until_decided: bool,
    batch_size: int,
    device: str,
    tolerance: float | None,
    samples: int | None,
    level: float,
    seed: int,
) -> dict[str, Any]:
    if data is None:
        raise UserError(f"{name} needs --data: a .npz or .txt file, an image folder, or python:module:factory")
    import torch

    from growth_service.cli.probe_source import cross_entropy, load_data, load_model
    from growth_service.probing import Looks, probe

    if device == "cpu":
        torch.set_num_threads(1)  # two threads on a busy machine are 10-30 times slower
    elif not device.startswith("cuda") or not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch sees no such device here; use cpu")
    if weights is not None and not name.startswith("torchvision:"):
        raise UserError(f"--weights goes with torchvision: models, not with {name}: use --checkpoint")
    with redirect_stdout(sys.stderr):  # what somebody's code prints must not get into the document
        network = load_model(name, checkpoint=checkpoint, weights=weights).to(device)
        found = load_data(data, network, samples=samples, batch_size=batch_size, seed=seed)
    arguments: dict[str, Any] = {
        "batches": _on(device, found.batches),
        "train_batches": _on(device, found.train_batches),
        "pool": None if found.pool is None else [_move(p, device) for p in found.pool],
        "loss": found.loss or cross_entropy,
        "reduction": found.reduction,
        "sites": sites or found.sites,
        "tolerance": tolerance,
        "level": level,
        "seed": seed,
        "looks": Looks() if until_decided else None,
    }
    with _bar() as progress, redirect_stdout(sys.stderr):
        return probe(network, progress=progress, **arguments).to_dict()


@contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar on stderr with the time that remains; quiet where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("probing"), BarColumn(), TextColumn("{task.completed}/{task.total} samples"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("probe", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _on(device: str, batches: Any) -> Any:
    if batches is None or device == "cpu":
        return batches
    return [(_move(inputs, device), targets.to(device)) for inputs, targets in batches]


def _move(inputs: Any, device: str) -> Any:
    if isinstance(inputs, dict):
        return {k: v.to(device) for k, v in inputs.items()}
    return inputs.to(device)


def _draw(report: dict[str, Any], path: Path, *, title: str) -> None:
    from growth_service.tracking.figures import draw_sites, series_of_report

    try:
        draw_sites(series_of_report(report), title=f"Certificates of {title}").savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"the picture cannot be written to {path} ({error}): name another file") from error
