"""Read the entries of an archive of torch as torch does: other readers of zip files may see other entries."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Records:
    """Entries of an archive: their names without its folder, as torch's reader finds them."""

    names: tuple[str, ...]
    reader: Any

    def data(self, name: str) -> bytes:
        """Return the contents of an entry."""
        return bytes(self.reader.get_record(name))


def read_records(path: str) -> Records:
    """Return the entries of an archive; a damaged or ambiguous one raises ValueError that names it."""
    from fvflops.torch_internals import ArchiveReader

    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
        reader = ArchiveReader(path)
        names = tuple(reader.get_all_records())
    except (RuntimeError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ValueError(f"{path} is a damaged archive: {reason[:200]}") from error
    folders = {name.partition("/")[0] for name in listed}
    if len(set(listed)) != len(listed) or len(folders) != 1 or len(names) != len(listed):
        raise ValueError(f"{path} is an archive with several entries of one name, or outside of its folder: refused")
    return Records(names, reader)
