"""``growth export``: the grown network of a run as plain files."""

from pathlib import Path
from typing import Any

from growth_service.cli.console import emit_json, out
from growth_service.cli.runs import checkpoint_folder
from growth_service.errors import UserError


def export_command(
    run: str, *, output: Path, dense: bool, onnx: bool, uri: str | None, storage: Path, as_json: bool
) -> None:
    """Write weights and recipe, and ONNX where asked for."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: name a folder")
    if dense and not onnx:
        raise UserError("--dense goes with --onnx: weights.safetensors keeps what growth added apart, to grow on")
    folder = checkpoint_folder(run, uri=uri, storage=storage)
    from growth_service.growth import growth_log, merge
    from growth_service.models.sites import size_of
    from growth_service.training.checkpoint import load_checkpoint
    from growth_service.training.export import export_onnx, save_network

    checkpoint = load_checkpoint(folder)
    model = checkpoint.model
    steps = len(growth_log(model))
    depth, width, params = size_of(model)
    try:
        save_network(model, output)
        if onnx:
            if dense:
                merge(model)
            export_onnx(model, example_of(checkpoint.base["spec"]), output / "network.onnx")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error}): name another folder") from error
    found: dict[str, Any] = {
        "checkpoint": str(folder),
        "output": str(output),
        "files": sorted(p.name for p in output.iterdir()),
        "depth": depth,
        "width": width,
        "params": params,
        "grow_steps": steps,
    }
    if as_json:
        emit_json(found)
        return
    console = out()
    console.print(f"{run}: {depth} blocks, {width} units, {params} parameters, {steps} grow steps", style="bold")
    console.print(f"written to {output}: {', '.join(found['files'])}", soft_wrap=True)
    console.print(f'load it: growth_service.load_network("{output}")', soft_wrap=True)


def example_of(spec: dict[str, Any]) -> Any:
    """Two samples of what a network of a family reads."""
    import torch

    if spec["family"] == "gpt":
        return torch.zeros(2, spec["context"], dtype=torch.int64)
    return torch.zeros(2, *spec["input_shape"])
