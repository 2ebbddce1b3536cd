"""Open files, local or by URI; `fvflops://NAME` is a file that fvflops ships. No other module opens files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast
from uuid import uuid4

SCHEME = "fvflops://"
# The folder that holds this file and all of the package.
PACKAGE = Path(__file__).resolve().parent


def open_text(path: str, mode: str = "r") -> TextIO:
    """Open a text file, UTF-8, for a mode among "r", "w" and "a".

    `path` is a local path, `fvflops://NAME` (read only) or any URI for which a handler is registered with iopath's
    `g_pathmgr`. A file that is not there raises FileNotFoundError, as `open` does.

    >>> with open_text("fvflops://fvcore.yaml") as file:
    ...     file.readline()[:1]
    '#'
    """
    return cast(TextIO, _open(path, mode))


def make_folder(path: str) -> None:
    """Make a folder, and those that it lies in, unless it is there; `path` is a local path or a URI.

    A file of that name raises FileExistsError.
    """
    if path.startswith(SCHEME):
        raise PermissionError(f"{path} is shipped with fvflops and cannot be written: choose a path of your own")
    if "://" in path:
        path_manager().mkdirs(path)
    else:
        os.makedirs(path, exist_ok=True)


def check_writable(path: str) -> None:
    """Raise OSError, in one line, where a file cannot be written, before there is anything to write.

    Nothing is left behind: neither an empty file nor a folder that was not there, and what stands in a file stays. A
    URI is not tried out.

    >>> check_writable("fvflops://mine.txt")
    Traceback (most recent call last):
    OSError: fvflops://mine.txt cannot be written: it would be shipped with fvflops; choose a path of your own
    """
    if path.startswith(SCHEME):
        raise OSError(f"{path} cannot be written: it would be shipped with fvflops; choose a path of your own")
    if "://" in path:
        return
    made: list[str] = []
    try:
        if _is_special(path):  # to open a pipe waits for who reads it
            if not os.access(path, os.W_OK):
                raise PermissionError("it may not be written")
            return
        made = _list_missing(os.path.dirname(path))
        target = os.path.realpath(path)
        was_there = os.path.exists(target)
        make_folder(os.path.dirname(path) or ".")
        open_text(path, "a").close()
        if not was_there:
            os.remove(target)
    except (OSError, ValueError) as error:  # a name with a NUL, or with half a character, raises ValueError
        said = (error.strerror if isinstance(error, OSError) else None) or error
        if isinstance(error, FileExistsError):
            said = f"{error.filename} is no folder"
        raise OSError(f"{path} cannot be written: {said}; choose another path") from None
    finally:
        for folder in made:
            with suppress(OSError):  # it was not made after all, or another process has put something there
                os.rmdir(folder)


def write_text(path: str, pieces: str | Iterable[str]) -> None:
    """Write a whole text file, made of pieces, so that what was there stays unless all of it could be written.

    Whoever reads it meanwhile sees what it was or what it is, nothing between. The folders that it lies in are made, a
    link stays, and what it leads to is replaced, unless that may not be written. A device, a pipe and a URI are written
    as they are, and so is a file in a folder to which nothing can be added. Half a character, which UTF-8 does not
    have, is written as its escape.
    """
    with _replacing(path, "w") as file:
        file.writelines([pieces] if isinstance(pieces, str) else pieces)


def write_bytes(path: str, data: bytes) -> None:
    """Write a file that holds no text, such as a picture, as `write_text` does."""
    with _replacing(path, "wb") as file:
        file.write(data)


def append_text(path: str, text: str) -> None:
    """Write a text behind what stands in a file; the folders that it lies in are made."""
    if "://" not in path:
        make_folder(os.path.dirname(path) or ".")
    with _naming(path), open_text(path, "a") as file:
        file.write(text)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in an error of the system that does not, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise


@contextmanager
def _replacing(path: str, mode: str) -> Iterator[Any]:
    """Open a file beside a path, and put it in its place when all is written."""
    if path.startswith(SCHEME) or "://" in path or _is_special(path):
        with _naming(path), _open(path, mode) as file:
            yield file
        return
    make_folder(os.path.dirname(path) or ".")
    target = os.path.realpath(path)
    if os.path.exists(target):
        _open(path, "a").close()  # to replace a file asks the folder's leave, not the file's own
    # Other machines may write to the folder too.
    beside = os.path.join(os.path.dirname(target), f".fvflops-{uuid4().hex}.tmp")
    try:
        file = _open(beside, mode.replace("w", "x"))
    except OSError:
        beside, file = "", _open(path, mode)
    try:
        with _naming(path), file:
            yield file
        if beside:
            if os.path.exists(target):
                known = os.stat(target)
                with suppress(OSError):  # only root gives files away
                    os.chown(beside, known.st_uid, known.st_gid)
                os.chmod(beside, known.st_mode)
            os.replace(beside, target)
    except BaseException:
        if beside and os.path.lexists(beside):
            os.remove(beside)
        raise


def _open(path: str, mode: str) -> Any:
    if path.startswith(SCHEME):
        if mode != "r":
            raise PermissionError(f"{path} is shipped with fvflops and cannot be written: choose a path of your own")
        return open(_shipped(path), encoding="utf-8")
    coding = None if "b" in mode else "utf-8"
    # Importing iopath takes 90 ms, more than recording a ResNet-50: it is imported only for other people's URIs.
    if "://" in path:
        return path_manager().open(path, mode, encoding=coding) if coding else path_manager().open(path, mode)
    return open(path, mode, encoding=coding, errors="backslashreplace" if coding and mode != "r" else None)


def _is_special(path: str) -> bool:
    """Return whether a path leads to a device, a pipe, a socket, or whatever else a process has open."""
    there = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return there or path.startswith(("/dev/fd/", "/dev/std", "/proc/"))


def _list_missing(folder: str) -> list[str]:
    """Return the folders that are not there, of one and those that it lies in, innermost first."""
    missing = []
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def read_text(path: str, limit: int) -> str | None:
    """Return a file's text, or None where it has more than `limit` characters; no more than that is read.

    A folder, a pipe and a device, of which none has an end for sure, raise OSError.
    """
    if "://" not in path:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("it is a folder" if os.path.isdir(path) else "it is a pipe or a device: save it as a file")
        # To read a gigabyte takes seconds; no character takes more than four bytes.
        if os.path.isfile(path) and os.path.getsize(path) > 4 * limit:
            return None
    with open_text(path) as file:
        text = file.read(limit + 1)
    return None if len(text) > limit else text


def exists(path: str) -> bool:
    """Return whether a path or URI leads to a file.

    >>> exists("fvflops://default.yaml"), exists("fvflops://defualt.yaml")
    (True, False)
    """
    if path.startswith(SCHEME):
        try:
            return os.path.isfile(_shipped(path))
        except FileNotFoundError:
            return False
    if "://" in path:
        return bool(path_manager().isfile(path))
    return os.path.isfile(path)  # unlike Path.is_file, False for a name too long or with a NUL


def shipped_files() -> list[str]:
    """Return the URIs of the files that fvflops ships, sorted.

    >>> "fvflops://default.yaml" in shipped_files()
    True
    """
    return sorted({SCHEME + file.name for folder in _folders() for file in folder.glob("*.yaml")})


def join(base: str, relative: str) -> str:
    """Return where a name written in the file `base` leads: an absolute path or URI stays, another is beside `base`.

    >>> join("tables/mine.yaml", "ours.yaml"), join("s3://bucket/mine.yaml", "ours.yaml")
    ('tables/ours.yaml', 's3://bucket/ours.yaml')
    """
    if "://" in relative or Path(relative).is_absolute():
        return relative
    if "://" in base:
        return base.rpartition("/")[0] + "/" + relative
    return str(Path(base).parent / relative)


@cache
def path_manager() -> Any:
    """Return iopath's `g_pathmgr`, which then knows `fvflops://` too; other handlers are registered with it."""
    from iopath.common.file_io import PathHandler, g_pathmgr

    class ShippedHandler(PathHandler):
        """Finds `fvflops://NAME` among the files that fvflops ships."""

        def _get_supported_prefixes(self) -> list[str]:
            return [SCHEME]

        def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
            return str(_shipped(path))

        def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> Any:
            return open(_shipped(path), mode, buffering, encoding="utf-8" if "b" not in mode else None)

        def _isfile(self, path: str, **kwargs: Any) -> bool:
            return exists(path)

        def _exists(self, path: str, **kwargs: Any) -> bool:
            return exists(path)

    g_pathmgr.register_handler(ShippedHandler(), allow_override=True)
    return g_pathmgr


def _folders() -> tuple[Path, ...]:
    # An installed wheel has the files beside the package's modules, a checkout one folder up.
    return PACKAGE / "configs", PACKAGE.parent / "configs"


def _shipped(path: str) -> Path:
    name = path.removeprefix(SCHEME)
    for folder in _folders():
        if os.path.isfile(folder / name) and Path(name).name == name:
            return folder / name
    raise FileNotFoundError(f"fvflops ships no file {path}")
