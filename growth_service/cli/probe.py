"""``growth probe``: certificates of a trained network of a study."""

from pathlib import Path
from typing import Any

from rich.text import Text

from dashboards.terminal import certificate_table
from growth_service.cli.console import emit_json, out
from growth_service.core.units import parse_quantity
from growth_service.errors import UserError

PICTURES = (".png", ".pdf", ".svg")


def probe_command(
    model: str,
    *,
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
    nats = None if tolerance is None else parse_quantity(tolerance, dimension="nats")
    checkpoint = _checkpoint_folder(model, uri=uri, storage=storage)
    from growth_service.training.probe_checkpoint import probe_checkpoint

    report = probe_checkpoint(checkpoint, tolerance=nats, samples=samples, level=level, seed=seed)
    if plot is not None:
        _draw(report, plot, title=model)
    if as_json:
        emit_json(report | {"checkpoint": str(checkpoint)})
        return
    console = out()
    console.print(f"{model}: {checkpoint}", style="bold", soft_wrap=True)
    console.print(certificate_table(report))
    console.print(Text.assemble(("Next: ", "bold"), report["advice"]), soft_wrap=True)
    if plot is not None:
        console.print(f"picture: {plot}", soft_wrap=True)


def _checkpoint_folder(model: str, *, uri: str | None, storage: Path) -> Path:
    """The newest checkpoint that MODEL means: a folder, study/trial in the storage, or a run in MLflow."""
    from growth_service.training.layout import stage_folders

    direct = Path(model)
    if (direct / "manifest.json").is_file():
        return direct
    study, _, trial = model.partition("/")
    for folder in (direct, storage.expanduser() / study / "trials" / trial if trial else None):
        if folder is not None and (folder / "stages").is_dir():
            found = next(stage_folders(folder / "stages"), None)
            if found is not None:
                return found
    from growth_service.cli.study import default_uri
    from growth_service.tracking.mlflow_reader import find_run

    run = find_run(uri or default_uri(storage), model)
    found = next(stage_folders(Path(run.storage) / "stages"), None) if run.storage else None
    if found is None:
        raise UserError(
            f"run {model!r} is in MLflow, but its checkpoints are not on this machine "
            f"({run.storage or 'no folder noted'}): run the probe where the study's storage is"
        )
    return found


def _draw(report: dict[str, Any], path: Path, *, title: str) -> None:
    from growth_service.tracking.figures import draw_sites, series_of_report

    try:
        draw_sites(series_of_report(report), title=f"Certificates of {title}").savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"the picture cannot be written to {path} ({error}): name another file") from error
