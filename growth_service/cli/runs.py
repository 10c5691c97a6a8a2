"""Which checkpoint a name on the command line means."""

from pathlib import Path

from growth_service.errors import UserError


def checkpoint_folder(model: str, *, uri: str | None, storage: Path) -> Path:
    """The newest checkpoint that RUN means: a folder, study/trial in the storage, or a run in MLflow.

    Raises:
        UserError: If there is none on this machine.
    """
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
            f"({run.storage or 'no folder noted'}): run this where the study's storage is"
        )
    return found
