"""Parameters of a module, and how many of them are active for a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.reports.escaping import printable_short
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.text import record_repr, short_repr
from fvflops.units import format_bytes, format_size
from fvflops.views.summary_rows import depth_of


class StoredParameters(NamedTuple):
    """Parameters of one dtype: their elements, and their bytes in memory.

    >>> StoredParameters(elements=64, nbytes=32).bits
    4.0
    """

    elements: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits in memory for each element, with padding, and with scales where a tensor subclass contains them."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class ParameterCount:
    """The elements of one parameter, or of all parameters of a module; a tied parameter counts once.

    `total` are all, `trainable` those that require a gradient, `buffers` the elements of buffers, which `total` lacks.
    The others need a run, and are None without one: `active` are the elements used for an average token, `looked_up`
    those among them in embedding tables, which multiply nothing (the whole table is active), and `unused` those of
    parameters that no op read.

    Packed weights of a quantised layer count as the elements that the layer multiplies by, its bias as a parameter, and
    its scales, zero points and codebooks as buffers. `by_dtype` has dtype → its elements, bytes and bits: codes of 4
    bits are int4, whatever dtype they are stored in.

    >>> ParameterCount(total=10, trainable=4).frozen
    6
    """

    total: int = 0
    trainable: int = 0
    active: int | None = None
    looked_up: int | None = None
    unused: int | None = None
    buffers: int = 0
    by_dtype: Mapping[str, StoredParameters] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def frozen(self) -> int:
        """The elements that require no gradient."""
        return self.total - self.trainable

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the parameters, without buffers."""
        return sum(stored.nbytes for stored in self.by_dtype.values())


class ParameterSummary(dict[str, ParameterCount]):
    """Module or parameter name → its count; `print` writes a table."""

    def __repr__(self) -> str:
        return short_repr(self, "", f"{self[''].total:,} parameters" if "" in self else "", f"{len(self):,} names")

    def __str__(self) -> str:
        return render(self) if "" in self else repr(self)


_HEADINGS = ("total", "trainable", "frozen", "active", "unused", "buffers")


def render(counts: Mapping[str, ParameterCount], *, depth: int = 3, digits: int = 3) -> str:
    """Return a row for each module or parameter with any elements, `depth` levels of names below the root.

    Fields that need a run have no column without one. Sentences below say how many active elements are in embedding
    tables, and how many bits the elements of each dtype take, if there are several.

    >>> print(render({"": ParameterCount(6, 2, active=6, unused=0, looked_up=4), "fc": ParameterCount(6, 2, 6, 4, 0)}))
    | name   |   total |   trainable |   frozen |   active |   unused |   buffers |
    |:-------|--------:|------------:|---------:|---------:|---------:|----------:|
    | model  |       6 |           2 |        4 |        6 |        0 |         0 |
    |  fc    |       6 |           2 |        4 |        6 |        0 |         0 |
    <BLANKLINE>
    4 of the active are in embedding tables.
    """
    root = counts[""]
    headings = [heading for heading in _HEADINGS if getattr(root, heading) is not None]
    rows = [
        [_indent(name), *(format_size(getattr(count, heading), digits=digits) for heading in headings)]
        for name, count in counts.items()
        if depth_of(name) <= depth and (not name or count.total or count.buffers)
    ]
    notes = []
    if root.looked_up:
        notes.append(f"{format_size(root.looked_up, digits=digits)} of the active are in embedding tables.")
    if len(root.by_dtype) > 1:
        dtypes = [
            f"{format_size(stored.elements, digits=digits)} {dtype} ({stored.bits:.3g} bits)"
            for dtype, stored in root.by_dtype.items()
        ]
        notes.append(f"{format_bytes(root.nbytes)} of parameters: {', '.join(dtypes)}.")
    return "\n\n".join([pipe_table(["name", *headings], rows), *notes])


def _indent(name: str) -> str:
    return " " * depth_of(name) + printable_short(name.rpartition(".")[2]) if name else "model"
