"""Errors of estimated times, as compared with measured runs and kernels, and the sentence that says which apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

from fvflops import paths
from fvflops.devices.devices import Device, find_device
from fvflops.formulas.yaml_document import Node, read_document
from fvflops.units import format_quantity, format_share, format_thousands

ERRORS = paths.SCHEME + "measured_errors.yaml"
# Class of kernels in configs/kernel_figures.yaml → its name in a sentence.
KERNELS: Mapping[str, str] = {
    "product": "matrix products",
    "attention": "prefill attention",
    "encoder": "encoder attention",
    "decode": "decode attention",
    "trtllm decode": "decode attention of TensorRT-LLM",
    "latent": "latent attention (MLA)",
    "latent decode": "latent decode attention (MLA)",
    "mixture": "mixtures of experts",
    "memory": "memory-bound quantization",
    "collective": "collectives in a node",
    "peers": "all-reduce of inference engines",
    "recurrent": "gated linear attention",
}
ONE_NODE, NODES = "one node", "several nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunErrors:
    """Errors in % of the estimated step times of `runs` that a source measured with one framework on a GPU.

    `nodes` is `ONE_NODE` or `NODES`. `fitted` says whether the shipped figures of the software were fitted to them.
    `mean` is the mean absolute error, `held_out` the one with figures fitted to the other sources of the software,
    None without any.
    """

    source: str
    software: str
    device: str
    nodes: str
    runs: int
    fitted: bool
    mean: float
    bias: float
    percentile_95: float
    held_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelErrors:
    """Errors in % of the estimated times of measured kernels of shapes that no figure was fitted to.

    `mean` is the mean absolute error, `held_out_gpu` the one with figures fitted to other GPUs only.
    """

    kind: str
    dtype: str
    device: str
    kernels: int
    mean: float
    bias: float
    percentile_95: float
    held_out_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictErrors:
    """Measured runs that were predicted to fit into memory, or to be too large, and how many of each did so."""

    source: str
    fit: int
    fit_right: int
    too_large: int
    too_large_right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingErrors:
    """Errors in % of estimates of `runs` of an inference engine under closed loops of clients.

    `tpot` is the mean of the time per output token, `ttft` the median of the time to first token; the others are these
    with figures that were fitted without the run's model.
    """

    engine: str
    runs: int
    tpot: float
    ttft: float
    tpot_held_out: float
    ttft_held_out: float


class Errors(NamedTuple):
    """The rows of a file of errors."""

    runs: Sequence[RunErrors]
    kernels: Sequence[KernelErrors]
    memory: Sequence[VerdictErrors]
    serving: Sequence[ServingErrors]


class ErrorEstimate(NamedTuple):
    """The error to expect of an estimate: a sentence, the mean in % and the number of measurements that it rests on.

    Where nothing like it was measured, both are None.
    """

    text: str
    mean: float | None = None
    measured: int | None = None


def expect_step_error(software: str, device: Device, *, is_one_node: bool) -> ErrorEstimate:
    """Return the error of a step time, from the runs that are most like it; `software` is "" for a user's own figures.

    >>> print(expect_step_error("", find_device("H100"), is_one_node=True).text)
    Error unknown: these figures were not compared with measured runs.
    """
    if not software:
        return ErrorEstimate("Error unknown: these figures were not compared with measured runs.")
    rows = load_errors().runs
    unseen, unseen_runs = average((row.held_out, row.runs) for row in rows if row.held_out is not None)
    general = f"{_percent(unseen)} on average in {format_quantity(unseen_runs, 'run')} of sources left out of the fit"
    rows, generation = [row for row in rows if row.software == software], device.capability or "unknown"
    own = [row for row in rows if row.device == device.name]
    chosen = own or [row for row in rows if find_device(row.device).capability == generation]
    wanted = ONE_NODE if is_one_node else NODES
    chosen = [row for row in chosen if row.nodes == wanted] or chosen
    if not chosen:
        text = f"Error: not measured for {software} on {device.name}; {general}."
        return ErrorEstimate(text, unseen, unseen_runs)
    mean, runs = average((row.mean, row.runs) for row in chosen)
    where = f"{software} on {_join(row.device for row in chosen)}, {_join(row.nodes for row in chosen)}"
    alike = "" if own else f"not measured on {device.name}; of its generation "
    text = f"Error: {alike}{_percent(mean)} on average in {format_quantity(runs, 'run')} of {where}; {general}."
    return ErrorEstimate(text, mean, runs)


def expect_kernel_error(kind: str, dtype: str, device: Device) -> ErrorEstimate:
    """Return the error of the time of a kernel of a class of configs/kernel_figures.yaml, by its dtype's short name.

    >>> expect_kernel_error("product", "bf16", find_device("TPU v4")).text.partition(":")[0]
    'Error'
    """
    rows = [row for row in load_errors().kernels if row.kind == kind]
    if not rows:
        return ErrorEstimate("Error unknown: not compared with measured kernels.")
    dtypes = [row.dtype for row in rows]
    dtype = dtype if dtype in dtypes else dtypes[0]  # whose figures are used too
    rows = [row for row in rows if row.dtype == dtype]
    own = [row for row in rows if row.device == device.name]
    mean, count = average((row.mean if own else row.held_out_gpu, row.kernels) for row in own or rows)
    what = KERNELS[kind] if dtype == "all" else f"{KERNELS[kind]} in {dtype}"
    where = f"on {device.name}, of shapes not fitted to" if own else "on GPUs whose own figures are left out"
    text = f"Error: {_percent(mean)} on average in {format_thousands(count)} measured kernels: {what} {where}."
    return ErrorEstimate(text, mean, count)


def expect_serving_error(engine: str, device: Device) -> str:
    """Return the errors of the times of an engine's tokens, from its runs on all measured GPUs.

    >>> expect_serving_error("vllm", find_device("A100")).partition(":")[0]
    'Error'
    """
    row = next((row for row in load_errors().serving if row.engine == engine), None)
    if row is None:
        return "Error unknown: these figures were not compared with measured runs."
    measured = device.name in _SERVING_GPUS
    alike = "" if measured else f"not measured on {device.name}; on {_join(_SERVING_GPUS)} "
    return (
        f"Error: {alike}time per output token {_percent(row.tpot)} on average in {format_quantity(row.runs, 'run')} "
        f"({_percent(row.tpot_held_out)} for models left out of the fit), time to first token {_percent(row.ttft)} "
        f"({_percent(row.ttft_held_out)}) in the median."
    )


# GPUs of the measured runs of engines.
_SERVING_GPUS = ("H100 SXM", "H200", "B200")


def describe_verdicts() -> str:
    """Return how often a verdict that a step fits was right.

    >>> describe_verdicts().partition(":")[0]
    'Should fit'
    """
    rows = load_errors().memory
    fit, right = sum(row.fit for row in rows), sum(row.fit_right for row in rows)
    return f"Should fit: {right} of {format_quantity(fit, 'measured run')} did ({_join(row.source for row in rows)})."


def average(rows: Iterable[tuple[float, int]]) -> tuple[float, int]:
    """Return the mean of errors by their numbers of measurements, and the sum of these."""
    known = list(rows)
    count = sum(number for _, number in known)
    return round(sum(error * number for error, number in known) / max(count, 1), 1), count


def _percent(value: float) -> str:
    return format_share(value / 100)


def _join(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))


@lru_cache(maxsize=2)
def load_errors(file: str = ERRORS) -> Errors:
    """Return the rows of a file; a mistake in it raises TableError with the file and the line."""
    document = read_document(file).fields("a file of errors", ("description", *Errors._fields))
    types: tuple[type[Any], ...] = (RunErrors, KernelErrors, VerdictErrors, ServingErrors)
    return Errors(
        *(
            [_read(node, kind) for node in document[name].items(name)]
            for name, kind in zip(Errors._fields, types, strict=True)
        )
    )


def _read(node: Node, kind: type[Any]) -> Any:
    readers = {item.name: _READ[str(item.type)] for item in fields(kind)}
    found = node.fields("a row of errors", list(readers))
    try:
        return kind(**{name: readers[name](value.text(name)) for name, value in found.items()})
    except (TypeError, ValueError) as error:
        raise node.error(f"a row of errors: {error}") from None


_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "float | None": float,
    "bool": lambda text: text == "true",
}
