"""``growth``: one program, one verb a task."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from growth_service.errors import GrowthError

app = typer.Typer(
    name="growth",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
Grow residual networks under a compute budget: **deeper, wider, more data - or stop?**

A network starts small and is trained. A probe measures, at every place where a block could go, how much
loss a new block could remove, with a confidence interval. The best step is taken without changing what
the network computes, and growth stops where a certificate says that nothing is left to gain. A *study*
compares such growth schedules with training one size from scratch, at equal compute.

First steps: `growth run search_spaces/jobs/digits.yaml`, about two minutes on two cores; then
`growth compare` and `growth probe digits/joint`.
""",
)

JobPath = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file; digits.yaml is the commented reference.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change a key of the job; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Storage = Annotated[Path, typer.Option("--storage", help="Folder of studies, with MLflow's file in it.")]
TrackingUri = Annotated[
    str | None,
    typer.Option("--tracking-uri", help="MLflow server or sqlite:/// file, in place of the one in --storage."),
]
DEFAULT_STORAGE = Path("growth-runs")
_UsageError: Any = typer.BadParameter.__base__  # wrong flags; typer does not export it


@app.command()
def run(
    job: JobPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished study of this job.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run every stage, also those that were run before.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also print what the time went into.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study on this machine: trials side by side, records in MLflow, the frontier at the end.

    Example: `growth run search_spaces/jobs/digits.yaml --set budget.trial='40 GFLOP'`
    """
    from growth_service.cli.study import run_command

    uncached = ["cache.enabled=false"] if no_cache else []
    sys.exit(
        run_command(job, overrides=[*(overrides or []), *uncached], resume=resume, as_json=as_json, profile=profile)
    )


@app.command()
def check(job: JobPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Validate a job and print what it will cost: trials, stages, FLOPs, time, disk. Starts nothing.

    Example: `growth check search_spaces/jobs/digits.yaml`
    """
    from growth_service.cli.check import check_command

    check_command(job, overrides=overrides or [], as_json=as_json)


@app.command()
def compare(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="Name of the study; the latest if left out.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    tracking_uri: TrackingUri = None,
    experiment: Annotated[str | None, typer.Option("--experiment", help="MLflow experiment to look in.")] = None,
    as_json: AsJson = False,
) -> None:
    """Schedules of a study side by side: loss, compute, grow steps, verdicts, the frontier.

    Example: `growth compare digits`
    """
    from growth_service.cli.compare import compare_command

    compare_command(study, uri=tracking_uri, storage=storage, experiment=experiment, as_json=as_json)


@app.command()
def probe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A trial (study/trial), an MLflow run id, a checkpoint folder, python:package.module:factory, "
            "torchvision:NAME, or hf:FOLDER.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="For a model that is no run: a .npz (inputs, targets, train_inputs, train_targets, pool) or .txt "
            "file, a folder with val/ and train/, or python:package.module:factory.",
        ),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="State dictionary to load.")] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="torchvision weights, for example DEFAULT.")] = None,
    site: Annotated[
        list[str] | None, typer.Option("--site", help="Module whose output is the residual stream; repeatable.")
    ] = None,
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="Look at 256, 512, ... samples until there is a verdict.")
    ] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples a batch, of files.")] = 64,
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda.")] = "cpu",
    storage: Storage = DEFAULT_STORAGE,
    tracking_uri: TrackingUri = None,
    tolerance: Annotated[
        str | None, typer.Option("--tolerance", help="Smallest gain that counts, for example '0.05 nats'.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=32, help="Most probe samples, of runs and files.")
    ] = None,
    level: Annotated[
        float, typer.Option("--level", min=1e-6, max=0.49, help="Error level over all candidates.")
    ] = 0.05,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of candidate blocks and sign flips.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture of the certificates here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Is this network deep enough, and where not? A certificate at every site, and what to do next.

    Examples: `growth probe digits/joint --tolerance '0.05 nats' --plot sites.png`;
    `growth probe torchvision:resnet18 --data images/ --checkpoint resnet18.pt`
    """
    from growth_service.cli.probe import probe_command

    probe_command(
        model,
        data=data,
        checkpoint=checkpoint,
        weights=weights,
        sites=site or [],
        until_decided=until_decided,
        batch_size=batch_size,
        device=device,
        uri=tracking_uri,
        storage=storage,
        tolerance=tolerance,
        samples=samples,
        level=level,
        seed=seed,
        plot=plot,
        as_json=as_json,
    )


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A trial (study/trial), MLflow run id, or checkpoint.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to; made if it is not there.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Also network.onnx (extra 'onnx').")] = False,
    dense: Annotated[
        bool, typer.Option("--dense", help="In ONNX, what growth added folded into plain matrices (equal to rounding).")
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    tracking_uri: TrackingUri = None,
    as_json: AsJson = False,
) -> None:
    """The grown network of a run as plain files: weights.safetensors, and recipe.json that rebuilds it. No pickle.

    Example: `growth export digits/joint -o grown --onnx`
    """
    from growth_service.cli.export import export_command

    export_command(run, output=output, dense=dense, onnx=onnx, uri=tracking_uri, storage=storage, as_json=as_json)


def main() -> None:
    """Entry point: errors become one message and an exit code, never a traceback."""
    sys.exit(guarded(lambda: app(standalone_mode=False)))


def guarded(action: Callable[[], Any]) -> int:
    """Run an action; returns the exit code of the contract (0 done, 1 failed, 2 wrong input, 130 interrupted)."""
    try:
        code = action()  # typer returns the code of an exit, and 130 for an interruption
    except GrowthError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except _UsageError as error:
        error.show()
        return 2
    except SystemExit as exit_:
        code = exit_.code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        sys.stderr.write("interrupted: finished stages are kept; go on with the same command and --resume\n")
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    main()
