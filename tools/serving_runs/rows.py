"""Rows of measured serving runs, as AIConfigurator 0.12 (NVIDIA, Apache-2.0) ships them in silicon_sample.csv."""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fvflops.serve.serving_layout import ServingLayout
from serving_runs.launch_scripts import INFERENCEX, ServingRun, find_launch

# Names of the devices.
GPUS = {"h100_sxm": "H100 SXM", "h200_sxm": "H200", "b200_sxm": "B200"}
_WEIGHTS = {"nvfp4": "nvfp4", "fp8": "fp8", "fp8_block": "fp8", "": "bf16"}
_CLIENTS = re.compile(r"silicon_concurrency=(\d+)")
# Connections that aiohttp opens unless told otherwise.
_CONNECTIONS = 101
# How much slower than another engine's a model's runs may be, and the ratio of numbers of clients that are compared.
_TWICE, _NEAR = 2.0, 1.5
# How much longer a token may take with fewer sequences than with more, before a row of both is not believed.
_FALLING = 1.15


def read_runs(path: Path) -> list[ServingRun]:
    """Return the runs of a file with prefill and decode on the same GPUs.

    A row that cannot be read raises ValueError with the file and the line. Rows that contradict themselves are
    returned with the reason in `unused`.
    """
    found: list[ServingRun] = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            if row["mode"] != "agg":
                continue
            try:
                found.append(_read_run(rows.line_num, row))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}:{rows.line_num}: {error}") from error
    return _mark_slow_engines(_mark_contradictions([_mark_few_connections(run) for run in found]))


def _mark_slow_engines(runs: Sequence[ServingRun]) -> list[ServingRun]:
    """Return the runs, with all of an engine's version and model marked where another engine is twice as fast.

    Compared are runs of the same weights, GPU and layout with about as many clients, by the median.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        groups[run.engine, run.version, run.model, run.gpu].append(index)
    marked = list(runs)
    for indexes in groups.values():
        ratios = [runs[index].tpot / other for index in indexes for other in _others(runs[index], runs)]
        if ratios and statistics.median(ratios) > _TWICE:
            for index in indexes:
                reason = f"another engine is {statistics.median(ratios):.1f} times as fast in the same layout"
                marked[index] = replace(runs[index], unused=reason)
    return marked


def _others(run: ServingRun, runs: Sequence[ServingRun]) -> list[float]:
    """Return the seconds for a token of other engines in the layout of a run, of about as many clients."""

    def key(item: ServingRun) -> tuple[object, ...]:
        return item.model, item.gpu, item.layout

    return [
        other.tpot
        for other in runs
        if other.engine != run.engine
        and key(other) == key(run)
        and max(other.clients, run.clients) <= _NEAR * min(other.clients, run.clients)
    ]


def _mark_few_connections(run: ServingRun) -> ServingRun:
    """Return a run, marked where so few of many clients run that the benchmark had no more connections."""
    if run.clients > 2 * _CONNECTIONS and run.running <= _CONNECTIONS:
        return replace(run, unused=f"of {run.clients} clients only {run.running:.0f} ran: the client's connections")
    return run


def _mark_contradictions(runs: Sequence[ServingRun]) -> list[ServingRun]:
    """Return the runs, with those marked that contradict others of the same model, GPUs, layout and lengths.

    A token must not take clearly longer with fewer running sequences than with more. Among rows that contradict
    each other, the one with most contradictions is marked first, else the one that differs most from its neighbours.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        if not run.unused:
            groups[run.engine, run.model, run.gpu, run.layout, run.prompt, run.output].append(index)
    marked = list(runs)
    for indexes in groups.values():
        left = sorted(set(indexes), key=lambda index: runs[index].running)
        while conflicts := _conflicts([runs[index] for index in left]):
            worst = max(conflicts, key=lambda place: conflicts[place])
            index = left.pop(worst)
            marked[index] = replace(runs[index], unused="a token takes longer with fewer sequences than with more")
    return marked


def _conflicts(runs: Sequence[ServingRun]) -> dict[int, tuple[int, float]]:
    """Return place → with how many runs one conflicts, and by how much in all; runs are by running sequences."""
    found: dict[int, tuple[int, float]] = {}
    for first, fewer in enumerate(runs):
        for second in range(first + 1, len(runs)):
            ratio = fewer.tpot / runs[second].tpot
            if ratio > _FALLING:
                for place in (first, second):
                    number, total = found.get(place, (0, 0.0))
                    found[place] = number + 1, total + ratio
    return found


def _read_run(line: int, row: Mapping[str, str]) -> ServingRun:
    source = row["silicon_data_source"]
    match = _CLIENTS.search(source)
    publisher = "AIConfigurator" if "gap-analysis" in source else INFERENCEX
    weights = "mxfp4" if "gpt-oss" in row["model_path"] else _WEIGHTS[row["gemm_quant_mode"]]
    unused = ""
    if row["tp_size"] == row["attention_dp_size"] and float(row["moe_ep_size"] or 1) == float(row["tp_size"]) ** 2 > 1:
        # Of fp8 the same times are in rows with as many ranks of experts as GPUs.
        row = {**row, "attention_dp_size": "1", "moe_ep_size": row["tp_size"]}
        unused = "its columns do not tell the number of GPUs" if weights == "nvfp4" else ""
    if match is None:
        unused = "its number of clients is not given"
    tensor, data, expert = read_layout(row, is_product=publisher == INFERENCEX)
    run = ServingRun(
        line=line,
        publisher=publisher,
        engine=row["backend"],
        version=row["backend_version"],
        model=row["model_path"],
        gpu=GPUS[row["system"]],
        layout=ServingLayout(tensor=tensor, data=data, expert=expert, weights=weights),
        prompt=int(row["isl"]),
        output=int(row["osl"]),
        clients=int(match.group(1)) if match else round(float(row["batch_size"])) * data,
        ttft=float(row["silicon_ttft_ms"]) / 1e3,
        tpot=float(row["silicon_tpot_ms"]) / 1e3,
        unused=unused,
    )
    launch = find_launch(run)
    return replace(run, launch=launch, layout=replace(run.layout, cache=launch.cache))


def read_layout(row: Mapping[str, str], *, is_product: bool = True) -> tuple[int, int, int]:
    """Return the ranks of tensor, attention data and expert parallelism of a row.

    Where as many ranks divide the experts as each expert, a file of InferenceX's has the product of both as ranks of
    the attention: its times equal the rows with so few GPUs.

    >>> names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    >>> rows = [dict(zip(names, values.split())) for values in ("8 1 8 1", "64 1 8 8", "1 64 8 8", "2 1 1 2")]
    >>> [read_layout(row) for row in rows]
    [(8, 1, 1), (8, 1, 8), (1, 8, 8), (2, 1, 2)]
    """
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tensor, data, inner, expert = (max(1, round(float(row[name] or 1))) for name in names)
    if is_product and inner == expert > 1 and tensor * data == inner * expert:
        tensor, data = (expert, 1) if tensor > 1 else (1, expert)
    elif data == 1 and inner * expert > tensor:
        data = inner * expert // tensor
    if tensor * data % expert:
        raise ValueError(f"{expert} ranks of experts for {tensor} x {data} GPUs")
    return tensor, data, expert
