"""The folder of a dataset: which run may write into it, and how its files are written.

    .lock     locked by the run under way; the kernel releases it when the process dies
    .owner    the token of that run

Ray's workers do not hold the lock, and live for seconds after their driver was killed. So only a process with the
right token may put a file in its place: it takes a shared lock on `.owner`, compares the token, renames its file and
releases the lock. A new run writes its token under an exclusive lock on `.owner`. So a file of an earlier run's worker
is in its place before the new run reads the folder, or it is refused.

All of this happens in one opened directory. A folder that is renamed or removed, and made anew under the same name,
receives no files of the run that had the old one. That run notices, since its locked file is no longer the folder's.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from foresample.schema import open_plain
from foresample.text import printable

_LOCK, _OWNER = ".lock", ".owner"
_LEFT_OVER = re.compile(
    r"\.(shard-\d{5,}\.safetensors|manifest\.json|contact\.png)\.[0-9a-f]{32}\.tmp", re.ASCII
)
_Permit = Callable[[int], AbstractContextManager[None]]
"""A context manager, given the directory's descriptor, that holds the directory while a file is put in its place."""


class FolderLost(OSError):
    """The folder is not the one this run began with, or another run has it now."""


@dataclass(frozen=True)
class Claim:
    """One run's right to write into a folder; it can be sent to other processes."""

    folder: Path
    token: str
    lock: int | None = None
    """Descriptor of the locked file, in the process that holds the lock."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "lock": None}  # another process has the token only

    def write(self, name: str, data: bytes) -> None:
        """Put a file into the folder, whole; refused if the folder is lost."""
        self.require()
        try:
            write_atomically(self.folder / name, data, self._held)
        except OSError:
            self.require()  # a lost folder is the better error
            raise

    def require(self) -> None:
        """Refuse to go on with a folder that is lost."""
        try:
            with _opened(self.folder) as folder, self._held(folder):
                pass
        except OSError:
            raise self._lost() from None

    def remove_left_overs(self) -> None:
        """Remove temporary files of runs that died, as `write_atomically` names them, unless the folder is lost."""
        with suppress(OSError), _opened(self.folder) as folder, self._held(folder), os.scandir(folder) as found:
            for entry in list(found):
                if _LEFT_OVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)

    @contextmanager
    def _held(self, folder: int) -> Iterator[None]:
        """No other run takes this directory over until the end of the block."""
        import fcntl

        with os.fdopen(open_plain(Path(_OWNER), follow=False, folder=folder), "rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_SH)
            ours = owner.read(100).decode(errors="replace") == self.token
            if ours and self.lock is not None:
                there = os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)
                ours = os.path.samestat(there, os.fstat(self.lock))
            if not ours:
                raise self._lost()
            yield

    def _lost(self) -> FolderLost:
        return FolderLost(
            f"{printable(self.folder)} was moved, removed or taken over by another run while this run was writing "
            "to it: put it back and run the same command again, or choose another folder"
        )


@contextmanager
def claim_folder(folder: Path) -> Iterator[Claim]:
    """Make the folder and have it to ourselves as long as this process lives."""
    if find_spec("fcntl") is None:
        raise OSError(
            "datasets need Linux or macOS, where a folder can be locked (fcntl): draw this one there, or the samples "
            "with foresample.sample"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot write to {printable(folder)} ({error.strerror}): choose another folder"
        ) from None
    us, token = f"process {os.getpid()} on {socket.gethostname()}", uuid4().hex
    other = "another run ({}) is writing to {}: wait for it, or choose another folder"
    orphan = "a worker of an earlier run is writing to {1}: run the same command again when it is done"
    with _locked(folder / _LOCK, us, r"process \d|$", other) as lock:
        with _locked(folder / _OWNER, token, r"[0-9a-f]{32}$|$", orphan):
            pass
        claim = Claim(folder, token, lock)
        claim.require()  # the folder may have been replaced since its lock was opened
        claim.remove_left_overs()
        try:
            yield claim
        finally:
            claim.remove_left_overs()


@contextmanager
def _locked(path: Path, text: str, ours: str, busy: str) -> Iterator[int]:
    """A descriptor of a file of ours, locked and overwritten with the text.

    A file that does not match `ours` is refused, and so is a locked one, with the sentence `busy`.
    """
    import fcntl  # where there is none, only datasets are missed

    try:
        file = open_plain(path, os.O_RDWR | os.O_CREAT, follow=False)
    except OSError as error:
        raise OSError(f"cannot write {printable(path)} ({error.strerror}): choose another folder") from None
    try:
        found = os.pread(file, 200, 0).decode(errors="replace").strip()
        if os.fstat(file).st_nlink > 1 or not re.match(ours, found):  # nothing is lost by asking
            raise OSError(f"{printable(path)} was not written by foresample: choose another folder")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(busy.format(printable(found), printable(path.parent))) from None
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode(), 0)
        except OSError as error:
            raise OSError(f"cannot write {printable(path)} ({error.strerror}): see to that") from None
        yield file
    finally:
        os.close(file)


def write_atomically(path: Path, data: bytes, permit: _Permit = lambda folder: nullcontext()) -> None:
    """The file is there whole, or as it was before, even if the machine stops meanwhile.

    A link in its place is replaced, not followed.
    """
    temporary = f".{path.name}.{uuid4().hex}.tmp"
    try:
        with _opened(path.parent) as folder:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                with permit(folder):
                    os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
    except FolderLost:
        raise
    except OSError as error:
        raise OSError(
            f"cannot write {printable(path)} ({error.strerror}): see to that and run the same command again; "
            "what was written before is kept"
        ) from None


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the directory."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield directory
    finally:
        os.close(directory)
