"""The paths: the only place where files are opened; `fvflops://NAME` is a file that fvflops ships."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

SCHEME = "fvflops://"


def open_text(path: str, mode: str = "r") -> TextIO:
    """Open a text file, UTF-8, for a mode among "r", "w" and "a".

    `path` is a local path, `fvflops://NAME` (read only) or any URI for which a handler is registered with iopath's
    `g_pathmgr`. A file that is not there raises FileNotFoundError, as `open` does.

    >>> with open_text("fvflops://fvcore.yaml") as file:
    ...     file.readline()[:1]
    '#'
    """
    if path.startswith(SCHEME):
        if mode != "r":
            raise PermissionError(f"{path} is shipped with fvflops and cannot be written: choose a path of your own")
        return open(_shipped(path), encoding="utf-8")
    # Importing iopath takes 90 ms, more than recording a ResNet-50: it is imported only for other people's URIs.
    if "://" in path:
        stream: TextIO = path_manager().open(path, mode, encoding="utf-8")
        return stream
    return cast(TextIO, open(path, mode, encoding="utf-8"))


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
    """Raise OSError, in one line, where a text file cannot be written, before there is anything to write.

    The folders that it lies in are made; what stands in a file that is there stays. A URI is not tried out.

    >>> check_writable("fvflops://mine.txt")
    Traceback (most recent call last):
    OSError: fvflops://mine.txt cannot be written: it would be shipped with fvflops; choose a path of your own
    """
    if path.startswith(SCHEME):
        raise OSError(f"{path} cannot be written: it would be shipped with fvflops; choose a path of your own")
    if "://" in path:
        return
    was_there = os.path.lexists(path)
    try:
        make_folder(os.path.dirname(path) or ".")
        open_text(path, "a").close()
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}; choose another path") from None
    if not was_there:
        os.remove(path)


def check_replaceable(path: str) -> None:
    """Raise OSError, in one line, where `replace_text` cannot write, before there is anything to write."""
    check_writable(path)
    if "://" not in path:
        check_writable(_beside(path))


def replace_text(path: str, text: str) -> None:
    """Write a whole text file, so that whoever reads it meanwhile sees what it was or what it is, nothing between.

    A link stays, and what it leads to is replaced. A URI is written as its handler does.
    """
    if "://" in path:
        with open_text(path, "w") as file:
            file.write(text)
        return
    target, beside = os.path.realpath(path), _beside(path)
    try:
        with open_text(beside, "w") as file:
            file.write(text)
        if os.path.exists(target):
            os.chmod(beside, os.stat(target).st_mode)
        os.replace(beside, target)
    except BaseException:
        if os.path.lexists(beside):
            os.remove(beside)
        raise


def _beside(path: str) -> str:
    return f"{os.path.realpath(path)}.{os.getpid()}.tmp"


def read_text(path: str, limit: int) -> str | None:
    """Return a file's text, or None where it has more than `limit` characters; no more than that is read."""
    with open_text(path) as file:
        text = file.read(limit + 1)
    return None if len(text) > limit else text


def write_bytes(path: str, data: bytes) -> None:
    """Write a file that holds no text, such as a picture; `path` is a local path or a URI."""
    if path.startswith(SCHEME):
        raise PermissionError(f"{path} is shipped with fvflops and cannot be written: choose a path of your own")
    with path_manager().open(path, "wb") if "://" in path else open(path, "wb") as file:
        file.write(data)


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
    here = Path(__file__).resolve().parent
    return here / "configs", here.parent / "configs"


def _shipped(path: str) -> Path:
    name = path.removeprefix(SCHEME)
    for folder in _folders():
        if os.path.isfile(folder / name) and Path(name).name == name:
            return folder / name
    raise FileNotFoundError(f"fvflops ships no file {path}")
