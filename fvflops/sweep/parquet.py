"""Read and write columns of Parquet files, by pyarrow of the extra `parquet`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from fvflops import paths
from fvflops.reports.escaping import plain_name
from fvflops.sources.imports import import_library


def import_pyarrow() -> Any:
    """Return the module pyarrow, with pyarrow.parquet; without it raise ValueError that names the extra."""
    import_library("pyarrow.parquet", extra="parquet")
    return import_library("pyarrow")


def read_columns(path: str) -> dict[str, list[Any]]:
    """Return column → values of a file; another one raises ValueError in one line."""
    arrow = import_pyarrow()
    data = paths.read_bytes(path)
    try:
        table = arrow.parquet.read_table(io.BytesIO(data))
        return {str(name): table.column(index).to_pylist() for index, name in enumerate(table.column_names)}
    # Of a damaged file pyarrow raises errors of many kinds, also of Unicode and memory.
    except (arrow.ArrowException, OSError, ValueError, LookupError, TypeError, MemoryError) as error:
        reason = plain_name(" ".join(str(error).split()))
        raise ValueError(f"{path} is not a Parquet file, or damaged: {reason}") from None


def write_columns(path: str, types: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> None:
    """Write records, whose values have the types of these names of pyarrow."""
    arrow = import_pyarrow()
    schema = arrow.schema([(name, arrow.type_for_alias(alias)) for name, alias in types.items()])
    file = io.BytesIO()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(records), schema=schema), file)
    paths.write_bytes(path, file.getvalue())
