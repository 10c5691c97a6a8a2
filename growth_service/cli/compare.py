"""``growth compare``: a study's trials from MLflow."""

from pathlib import Path

from dashboards.terminal import study_summary
from growth_service.cli.console import emit_json, err, out
from growth_service.core.frontier import SAME_COMPUTE_SHARE, frontier, outcomes, prefer
from growth_service.tracking.mlflow_reader import read_study


def compare_command(
    study: str | None, *, uri: str | None, storage: Path, experiment: str | None, as_json: bool
) -> None:
    """Read a study and print it as a table or as JSON."""
    from growth_service.cli.study import default_uri

    found = read_study(uri or default_uri(storage), experiment=experiment, study=study)
    points = outcomes(found.trials)
    unbeaten = frontier(points, same_share=SAME_COMPUTE_SHARE)
    if as_json:
        preference = prefer(points)
        emit_json(
            {
                "study": found.study,
                "status": found.status,
                "trials": [t.to_dict() for t in found.trials],
                "frontier": [o._asdict() for o in unbeaten],
                "prefer": preference._asdict() if preference else None,
                "left_out": found.left_out,
            }
        )
        return
    out().print(f"study {found.study} ({found.status.lower()}), {len(found.trials)} trials", style="bold")
    out().print(study_summary(found.trials, unbeaten, prefer(points)))
    for note in found.left_out:
        err().print(f"left out: {note}", style="yellow", soft_wrap=True)
