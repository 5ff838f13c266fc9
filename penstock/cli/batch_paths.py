"""Which files `penstock run-batch` may write: none that is lost by it, and none that cannot be put in its place."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.batch.journal import journal_path, writing_path
from penstock.cli.errors import CommandError
from penstock.exits import EX_CANNOT_WRITE, EX_USAGE

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""How an address begins that `vllm run-batch` would fetch from or upload to."""


def no_url(text: str) -> Path:
    """Return the path that an option names. Raises CommandError for a URL, of which a path keeps one of its slashes."""
    if URL.match(text):
        message = f"{text}: is a URL; run-batch reads and writes files: fetch the input first, upload the output after"
        raise CommandError(message, EX_USAGE)
    return Path(text)


def target_of(output: Path) -> Path:
    """Return the file that gets the answers: `output`, or where it leads, for a link is to stay one.

    Raises CommandError if there can be no such file or none of the files beside it, which are put in its place.
    """
    _refuse_what_is_no_file(output)
    for path in _passed(output):
        # A file that the shell has opened lies behind these names: it would be replaced, and what it holds be gone.
        if path.startswith(("/dev/", "/proc/")) and not path.startswith("/dev/shm/"):
            raise CommandError(f"cannot write {output}: it is no regular file", EX_CANNOT_WRITE)
    target = output.resolve() if output.is_symlink() else output
    directory = target.absolute().parent
    if not directory.is_dir():
        raise CommandError(f"{output}: there is no directory {directory}", EX_CANNOT_WRITE)
    _refuse_what_is_no_file(journal_path(target))
    _refuse_what_is_no_file(writing_path(target))
    return target


def refuse_lost_files(source: Path, target: Path, summary: Path | None) -> None:
    """Raise CommandError if a file that the run writes is the input, or the summary another one or no file.

    By whatever name or link: the input is there to be compared, what is written may not be yet.
    """
    written: dict[str, Path] = {
        "the output file": target,
        "the journal of the output file": journal_path(target),
        "the output file while it is written": writing_path(target),
    }
    if summary is not None:
        for what, path in written.items():
            if os.path.realpath(summary) == os.path.realpath(path):
                raise CommandError(f"the summary file {summary} is {what} as well; one would be lost", EX_USAGE)
        try:
            unfit = summary.is_dir() or not summary.absolute().parent.is_dir()
        except OSError as error:  # of a name that is too long, of a directory that one may not enter
            raise CommandError(f"cannot write {summary}: {error.strerror}", EX_CANNOT_WRITE) from None
        if unfit:
            raise CommandError(f"cannot write {summary}: no file can be there", EX_CANNOT_WRITE)
        written["the summary file"] = summary
    for what, path in written.items():
        with suppress(OSError):
            if path.samefile(source):
                message = f"the input file {source} is {what} as well ({path}) and would be lost"
                raise CommandError(message, EX_USAGE)


def _passed(output: Path) -> Iterator[str]:
    """Yield the name of an output file and of each that it leads to, link by link; there is no circle of them.

    Each as it is said and as it is without links in its directory: a link may lead to /dev/fd.
    """
    path = os.path.abspath(output)
    while True:
        directory, name = os.path.split(path)
        directory = os.path.realpath(directory)
        yield path
        yield os.path.join(directory, name)
        if not os.path.islink(path):
            return
        path = os.path.normpath(os.path.join(directory, os.readlink(path)))


def _refuse_what_is_no_file(path: Path) -> None:
    """Raise CommandError if there is something at `path`, links followed, that is no regular file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", EX_CANNOT_WRITE) from None
    if not stat.S_ISREG(found.st_mode):
        raise CommandError(f"cannot write {path}: it is no regular file", EX_CANNOT_WRITE)
