"""All file access: local paths, URIs, and `fvflops://NAME` for the files that fvflops ships."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, TextIO, cast
from uuid import uuid4

SCHEME = "fvflops://"
# The folder of the package.
PACKAGE = Path(__file__).resolve().parent


def open_text(path: str, mode: str = "r") -> TextIO:
    """Open a UTF-8 text file with mode "r", "w" or "a".

    `path` is a local path, `fvflops://NAME` (read only) or any URI for which a handler is registered with iopath's
    `g_pathmgr`. A missing file raises FileNotFoundError, as in `open`.

    >>> with open_text("fvflops://fvcore.yaml") as file:
    ...     file.readline()[:1]
    '#'
    """
    return cast(TextIO, _open(path, mode))


def make_folder(path: str) -> None:
    """Create a folder and parents if missing, by path or URI; an existing file of that name raises FileExistsError."""
    if path.startswith(SCHEME):
        raise PermissionError(f"{path} is shipped with fvflops and read-only: choose another path")
    if "://" in path:
        path_manager().mkdirs(path)
    else:
        os.makedirs(path, exist_ok=True)


def check_writable(path: str) -> None:
    """Raise OSError, in one line, if a file cannot be written.

    Leaves no empty file or new folder behind, and does not change an existing file. URIs are not checked.

    >>> check_writable("fvflops://mine.txt")
    Traceback (most recent call last):
    OSError: fvflops://mine.txt cannot be written: fvflops:// is read-only; choose another path
    """
    if path.startswith(SCHEME):
        raise OSError(f"{path} cannot be written: fvflops:// is read-only; choose another path")
    if "://" in path:
        return
    created: list[str] = []
    try:
        if _is_special(path):  # opening a pipe blocks until it has a reader
            if not os.access(path, os.W_OK):
                raise PermissionError("permission denied")
            return
        if not os.path.basename(path):
            raise FileNotFoundError("it names no file")
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            created = _list_missing(os.path.dirname(path))
            make_folder(os.path.dirname(path) or ".")
            # Another process may write this file now, which removing it would delete: another one is created.
            temporary = _temporary_beside(os.path.realpath(path))
            open(temporary, "x", encoding="utf-8").close()
            os.remove(temporary)
        else:
            open_text(path, "a").close()
    except (OSError, ValueError) as error:  # a name with a NUL or a lone surrogate raises ValueError
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        if isinstance(error, FileExistsError):
            reason = f"{error.filename} is not a folder"
        raise OSError(f"{path} cannot be written: {reason}; choose another path") from None
    finally:
        for folder in created:
            with suppress(OSError):  # it was not created, or another process has added a file
                os.rmdir(folder)


def write_text(path: str, text: str | Iterable[str]) -> None:
    """Write a text file atomically: on an error the old file is unchanged, and readers never see a partial file.

    Missing folders are created. The target of a symbolic link is replaced, unless it is read-only. A device, a pipe, a
    URI, and a file in a read-only folder are written in place. A lone surrogate, which UTF-8 cannot encode, is written
    as its escape.
    """
    with _replacing(path, "w") as file:
        file.writelines([text] if isinstance(text, str) else text)


def write_bytes(path: str, data: bytes) -> None:
    with _replacing(path, "wb") as file:
        file.write(data)


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    with _adding_file_name(path), _open(path, "rb") as file:
        yield file


def read_bytes(path: str) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def append_text(path: str, text: str) -> None:
    """Append text to a file; missing folders are created."""
    if "://" not in path:
        make_folder(os.path.dirname(path) or ".")
    with _adding_file_name(path), open_text(path, "a") as file:
        file.write(text)


@contextmanager
def _adding_file_name(path: str) -> Iterator[None]:
    """Add the file name to an OSError without one, such as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise


@contextmanager
def _replacing(path: str, mode: str) -> Iterator[Any]:
    """Open a temporary file in the same folder, and move it to `path` once it is complete."""
    if path.startswith(SCHEME) or "://" in path or _is_special(path):
        with _adding_file_name(path), _open(path, mode) as file:
            yield file
        return
    make_folder(os.path.dirname(path) or ".")
    target = os.path.realpath(path)
    if os.path.exists(target):
        _open(path, "a").close()  # replacing needs write permission for the folder only: check the file's too
    temporary = _temporary_beside(target)
    try:
        file = _open(temporary, mode.replace("w", "x"))
    except OSError:
        temporary, file = "", _open(path, mode)
    try:
        with _adding_file_name(path), file:
            yield file
        if temporary:
            if os.path.exists(target):
                old_status = os.stat(target)
                with suppress(OSError):  # only root may change the owner
                    os.chown(temporary, old_status.st_uid, old_status.st_gid)
                os.chmod(temporary, old_status.st_mode)
            os.replace(temporary, target)
    except BaseException:
        if temporary and os.path.lexists(temporary):
            os.remove(temporary)
        raise


def _temporary_beside(target: str) -> str:
    """Return a path in the folder of a file; the name is globally unique, since other machines may write there too."""
    return os.path.join(os.path.dirname(target), f".fvflops-{uuid4().hex}.tmp")


def _open(path: str, mode: str) -> Any:
    if path.startswith(SCHEME):
        if mode != "r":
            raise PermissionError(f"{path} is shipped with fvflops and read-only: choose another path")
        return open(_shipped(path), encoding="utf-8")
    encoding = None if "b" in mode else "utf-8"
    # Importing iopath takes 90 ms, more than recording a ResNet-50: it is imported only for URIs.
    if "://" in path:
        return path_manager().open(path, mode, encoding=encoding) if encoding else path_manager().open(path, mode)
    return open(path, mode, encoding=encoding, errors="backslashreplace" if encoding and mode != "r" else None)


def _is_special(path: str) -> bool:
    """Return whether a path is a device, a pipe, a socket, or an open file of a process."""
    is_other = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return is_other or path.startswith(("/dev/fd/", "/dev/std", "/proc/"))


def _list_missing(folder: str) -> list[str]:
    """Return the missing folders among a folder and its parents, innermost first."""
    missing = []
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def read_text(path: str, limit: int) -> str | None:
    """Return a file's text, None, unread, if longer than `limit`; a folder, a pipe or a device raises OSError."""
    if "://" not in path:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("it is a folder" if os.path.isdir(path) else "it is a pipe or a device: save it as a file")
        # Reading a gigabyte takes seconds; a character has at most four bytes.
        if os.path.isfile(path) and os.path.getsize(path) > 4 * limit:
            return None
    with open_text(path) as file:
        text = file.read(limit + 1)
    return None if len(text) > limit else text


def exists(path: str) -> bool:
    """Return whether a path is an existing file or folder, or a URI an existing file.

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
    return os.path.exists(path)  # unlike Path.exists, False for a name too long or with a NUL


def shipped_files() -> list[str]:
    """Return the URIs of the files that fvflops ships, sorted.

    >>> "fvflops://default.yaml" in shipped_files()
    True
    """
    return sorted({SCHEME + file.name for folder in _folders() for file in folder.glob("*.yaml")})


def join(base: str, relative: str) -> str:
    """Resolve a path written in the file `base`: one that is not an absolute path or URI is relative to its folder.

    >>> join("tables/mine.yaml", "ours.yaml"), join("s3://bucket/mine.yaml", "ours.yaml")
    ('tables/ours.yaml', 's3://bucket/ours.yaml')
    """
    if "://" in relative or Path(relative).is_absolute():
        return relative
    return f"{base.rpartition('/')[0]}/{relative}" if "://" in base else str(Path(base).parent / relative)


@cache
def path_manager() -> Any:
    """Return iopath's `g_pathmgr` with a handler for `fvflops://` registered."""
    from iopath.common.file_io import PathHandler, g_pathmgr

    class ShippedHandler(PathHandler):
        """Resolve `fvflops://NAME` to the files that fvflops ships."""

        def _get_supported_prefixes(self) -> list[str]:
            return [SCHEME]

        def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
            return str(_shipped(path))

        def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> Any:
            return open(_shipped(path), mode, buffering, encoding="utf-8" if "b" not in mode else None)

        def _exists(self, path: str, **kwargs: Any) -> bool:
            return exists(path)

        _isfile = _exists

    g_pathmgr.register_handler(ShippedHandler(), allow_override=True)
    return g_pathmgr


def _folders() -> tuple[Path, ...]:
    # An installed wheel has them inside the package, a checkout one folder up.
    return PACKAGE / "configs", PACKAGE.parent / "configs"


def _shipped(path: str) -> Path:
    name = path.removeprefix(SCHEME)
    for folder in _folders():
        if os.path.isfile(folder / name) and Path(name).name == name:
            return folder / name
    raise FileNotFoundError(f"fvflops ships no file {path}")
