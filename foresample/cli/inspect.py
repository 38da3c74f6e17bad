"""`foresample inspect`: verifies a dataset and shows its contents."""

from __future__ import annotations

import json
from io import BytesIO

import typer
from rich.markup import escape

from foresample.cli.console import echo, plain_table, show
from foresample.cli.options import Inspect
from foresample.cli.pictures import contact_sheet
from foresample.datasets import Dataset, inspect_dataset
from foresample.datasets.folder import write_atomically
from foresample.text import printable

_MOST = 10  # broken samples, and shards that do not count, to list


def run(options: Inspect) -> None:
    folder = options.folder
    dataset = inspect_dataset(folder)
    show_dataset(dataset, as_json=options.as_json)
    sheet = contact_sheet(dataset, options.pictures)
    if sheet is not None:
        picture = BytesIO()
        sheet.save(picture, "PNG")
        try:
            write_atomically(folder / "contact.png", picture.getvalue())
        except OSError as error:
            echo(f"no contact sheet: {error}", error=True)
        else:
            if not options.as_json:
                echo(f"wrote {folder / 'contact.png'}")
    if not dataset.complete:
        raise typer.Exit(1)


def show_dataset(dataset: Dataset, *, as_json: bool) -> None:
    """Print the manifest as a table, and the broken samples."""
    manifest, law, failures = dataset.manifest, dataset.law, dataset.failures
    if as_json:
        echo(json.dumps(manifest, indent=2))
        return
    settings, costs = manifest["settings"], manifest["costs"]
    table = plain_table("", "", left=2, show_header=False)
    shape = "×".join(map(str, settings["shape"]))
    table.add_row("samples", f"{costs['samples']} of {settings['count']}, {shape}, {settings['dtype']}")
    if not dataset.complete:
        others = "; the others may be a biased selection" if costs["samples"] > dataset.fair else ""
        fair = f"{dataset.fair} are known to be fair{others}"
        table.add_row("in order", f"the first {dataset.in_order}, of which {fair}")
    table.add_row(
        "shards", f"{len(manifest['shards'])}, each with up to {settings['shard']} samples and a checksum"
    )
    drawn = f"window {settings['window']}" if settings["window"] else "drawn sequentially"
    table.add_row("chain", f"{settings['steps']} steps, {drawn}, seed {settings['seed']}")
    if manifest.get("choice"):
        table.add_row("chosen", escape(manifest["choice"]))
    name, marks = settings.get("model") or settings.get("target") or "", manifest.get("fingerprint")
    kept = f"{len(marks)} numbers, the same in every shard" if marks else "none, by an earlier version"
    table.add_row("target", escape(f"{name}; fingerprint: {kept}".removeprefix("; ")))
    if costs["samples"]:
        fewer = f", {costs['speedup']:.2f}× fewer" if settings["window"] else ""
        table.add_row("calls a sample", f"{costs['calls_mean']:.2f}{fewer}")
        table.add_row("states evaluated a sample", f"{costs['evaluations_mean']:.1f}")
        if settings["window"]:
            table.add_row("drafts kept a round", f"{costs['accepted_mean']:.2f}")
    seconds = [run["seconds"] for run in manifest["runs"] if run["seconds"] is not None]
    table.add_row("runs", f"{len(manifest['runs'])}, {sum(seconds):.1f} s")
    if law is not None:
        verdict = "passed" if law.passed else "FAILED"
        table.add_row("distribution", f"{verdict}: {law.tests} tests, smallest p-value {law.smallest_p:.2g}")
    elif not dataset.complete:
        table.add_row("distribution", "not checked: samples are missing")
    show(table)
    for name, why in list(dataset.unsound.items())[:_MOST]:
        echo(f"{name} does not count, {printable(why)}: the same command draws it again", error=True)
    if len(dataset.unsound) > _MOST:
        echo(f"and {len(dataset.unsound) - _MOST} more shards", error=True)
    for failure in failures[:_MOST]:
        echo(f"sample {failure.index} (seed {failure.seed}) broke: {printable(failure.error)}", error=True)
    if len(failures) > _MOST:
        echo(f"and {len(failures) - _MOST} more: see {dataset.out / 'manifest.json'}", error=True)
