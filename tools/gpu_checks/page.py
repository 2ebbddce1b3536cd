"""Write the page of measurements, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import nan
from typing import Any

from tabulate import tabulate

from tests.support.cuda_cases.runs import differences

_LONGEST = 150
_WAYS = {
    "shapes": "tensors on CUDA",
    "asked": 'tensors on the CPU, `device="cuda"`',
    "without": 'tensors on the CPU, `device="cuda"`, CUDA hidden',
}
_SHORT = {"shapes": "CUDA", "asked": '`device="cuda"`', "without": "CUDA hidden"}
_COUNTED = {"models": "models: forward, training, bfloat16", "kernels": "ops: forward, training", "steps": "optimizers"}


def write_page(results: Mapping[str, Any]) -> str:
    """Return the page; a section that was not measured, or failed, says so."""
    parts = ["# Measured on a GPU", "", *_introduce(results)]
    for title, names, write in _PARTS:
        if not any(name in results for name in names):
            continue
        parts += ["", f"## {title}", ""]
        for name in names:
            for error in results.get(name, {}).get("errors", ()):
                parts += [f"{name}, part {error['share']}, failed: {error['error']}", ""]
        found = [results.get(name, {}).get("found", {}) for name in names]
        parts += write(results) if write is _write_counts else write(*found)
    return "\n".join(parts).rstrip() + "\n"


def _introduce(results: Mapping[str, Any]) -> list[str]:
    machine = results.get("environment", {}).get("found", {})
    if not machine:
        return ["Measured by `tools/gpu.py`."]
    driver = str(machine["driver, clock, power"]).split(", ")
    return [
        f"One {machine['device']}, driver {driver[0]}, torch {machine['torch in full']}, cuDNN {machine['cudnn']},"
        f" Triton {machine['triton']}, measured on {machine['day']} by `tools/gpu.py --page docs/reference/gpu.md`,"
        " which writes every case to `build/gpu.json`. Terms: [shape and real execution](../concepts/execution.md)."
    ]


def _table(headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    return [tabulate([list(row) for row in rows], list(headers), tablefmt="pipe", disable_numparse=True), ""]


def _write_counts(results: Mapping[str, Any]) -> list[str]:
    rows, apart = [], []
    for name, what in _COUNTED.items():
        for way, text in _WAYS.items():
            compared = dict(_compare(name, way, results))
            if not compared:
                continue
            kinds = [_kind(item) for item in compared.values()]
            rows.append([what, text, len(kinds), *(kinds.count(kind) for kind in ("equal", "ops", "numbers", "error"))])
            apart += [(way, case, item) for case, item in compared.items() if _kind(item) in ("numbers", "error")]
    headers = ("what", "shape execution on", "cases", "equal", "other zero-FLOP ops", "other counts", "failed")
    lines = [
        "Cases recorded on the device in real execution, and counted in shape execution. Equal: the same op calls with",
        "the same arguments and results. Other zero-FLOP ops: cases that differ in these alone.",
        "",
        *_table(headers, rows),
    ]
    texts: dict[tuple[str, str], list[str]] = {}
    for way, case, item in apart:
        texts.setdefault((case, "; ".join(item)[:_LONGEST].replace("|", "/").replace("\n", " ")), []).append(way)
    differing = [(case, ", ".join(_SHORT[way] for way in ways), text) for (case, text), ways in texts.items()]
    return lines + (_table(("other counts, or failed", "shape execution on", "difference"), differing) if apart else [])


def _compare(name: str, way: str, results: Mapping[str, Any]) -> Iterable[tuple[str, list[str]]]:
    hidden = results.get(f"{name} without CUDA", {}).get("found", {})
    for case, ways in results.get(name, {}).get("found", {}).items():
        ours = hidden.get(case, {}).get("without") if way == "without" else ways.get(way)
        theirs = ways.get("real", ways)
        if ours is None or "error" in theirs:
            continue  # there is nothing to compare with
        yield case, differences(ours, theirs)


def _kind(found: list[str]) -> str:
    if not found:
        return "equal"
    if found[0].startswith(("shape execution:", "real execution:")):
        return "error"
    return "numbers" if any(item.startswith(("flops", "macs", "exact", "unsup")) for item in found) else "ops"


def _write_counters(counters: Mapping[str, Any]) -> list[str]:
    if "not measured" in counters:
        return [counters["not measured"]]
    rows = [
        (name, f"{item['counted']:,}", f"{item['executed']:,}", f"{item['executed'] / item['counted']:.4f}")
        for name, item in counters.items()
    ]
    return [
        "FLOPs of matrix products, convolutions and attention. Counted: by the convention `default`, with a",
        "multiply-add as two. Executed: measured by Nsight Compute, FLOPs of tensor cores and twice the fused",
        "multiply-adds of other units, including softmax's. Causal attention is counted dense.",
        "",
        *_table(("what", "counted", "executed", "ratio"), rows),
    ]


def _write_memory(memory: Mapping[str, Any]) -> list[str]:
    rows, most = [], 0.0
    for name, item in memory.items():
        if "error" in item:
            rows.append([name, item["error"][:_LONGEST]])
            continue
        row = [name]
        for step in ("forward", "first step", "second step"):
            predicted, measured = item.get(step, (0, 0))
            apart = predicted / measured - 1 if measured else 0.0
            if step == "second step":
                most = max(most, abs(apart) if "LSTM" not in name else 0)
            row.append(f"{predicted / 1e6:,.1f} / {measured / 1e6:,.1f} ({apart:+.1%})")
        rows.append(row)
    return [
        "Peak memory: `predict_memory` / `torch.cuda.max_memory_allocated`, in MB above the memory allocated before;",
        "× N is the batch size.",
        "The prediction allocates no device memory. The size of cuDNN's workspaces for convolutions and recurrent",
        "layers is not predicted (`MemoryTimeline.unseen` lists such ops). Without the LSTM, the second steps differ",
        f"by at most {most:.1%}.",
        "",
        *_table(("model", "forward", "first training step", "second"), rows),
    ]


def _write_profiles(profiles: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, item in profiles.items():
        if "share of FLOPs on events" in item:
            rows.append(
                (
                    name,
                    f"{item['device ms a step']:.2f}",
                    item["kernels"],
                    item["kernels launched by no op"],
                    f"{item['device time with a module']:.1%}",
                    f"{item['share of FLOPs on events']:.1%}",
                )
            )
    return [
        "`profile_kernels`: the kernels of three runs, the ones that no op launched, the share of their time that is",
        "attributed to a module, and the share of the FLOPs on events.",
        "",
        *_table(
            ("run", "kernel ms per run", "kernels", "without an op", "time with a module", "FLOPs on events"), rows
        ),
    ]


def _write_peaks(peaks: Mapping[str, Any], utilisation: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"{kind} FLOP/s", f"{measured / 1e12:,.1f}T", f"{listed / 1e12:,.1f}T" if listed else "")
        for kind, (measured, listed) in peaks.get("matrix", {}).items()
    ]
    measured, listed = peaks.get("bandwidth", (0, 0))
    rows.append(("bytes/s", f"{measured / 1e12:,.2f}T", f"{(listed or 0) / 1e12:,.2f}T"))
    steps = [
        (
            name.lower().replace("_attention", ""),
            f"{item['seconds'] * 1e3:.1f}",
            f"{item['tokens per second']:,.0f}",
            f"{item['macs recorded']:,}",
            "equal" if item["macs recorded"] == item["macs by shapes"] else f"{item['macs by shapes']:,}",
            f"{item['mfu'].get('value', 0):.1%}",
        )
        for name, item in utilisation.items()
        if "seconds" in item
    ]
    return [
        "`fvflops roofline --measure` (matrices of ones) beside the datasheet in `configs/devices.yaml`"
        f" ({peaks.get('listed')}). FLOP/s are of tensor cores, which do not compute in fp32.",
        "",
        *_table(("figure", "measured", "datasheet"), rows),
        "A training step of GPT-2 (124M parameters, 16 × 1,024 tokens, bfloat16 autocast, fused AdamW), by attention",
        "kernel; `mfu` counts the kernel that ran:",
        "",
        *_table(("attention", "ms", "tokens/s", "MACs, real execution", "MACs, shape execution", "`mfu`"), steps),
    ]


def _write_loops(loops: Mapping[str, Any]) -> list[str]:
    metered = []
    for name, item in loops.items():
        if "ratio" in item:
            figures = {"mfu": nan, "hfu": nan, "memory_peak": nan} | item["figures"]
            metered.append(
                (
                    name.removeprefix("metered, "),
                    f"{item['plain seconds'] * 1e3:.2f}",
                    f"{item['metered seconds'] * 1e3:.2f}",
                    f"{item['ratio']:.4f}",
                    f"{figures['seconds'] * 1e3:.2f}",
                    f"{figures['mfu']:.1%}",
                    f"{figures['hfu']:.1%}",
                    f"{figures['tokens_per_second']:,.0f}",
                    f"{figures['memory_peak'] / 1e9:.2f}",
                    f"{item['memory predicted'] / 1e9:.2f}",
                )
            )
    annotated = [
        (name.removeprefix("annotated, "), f"{item['share']:.2%}", f"{item['flops']:,}", f"{item['recorded']:,}")
        for name, item in loops.items()
        if "share" in item
    ]
    headers = ("step", "ms", "ms with the meter", "ratio", "ms by events", "`mfu`", "`hfu`", "tokens/s")
    failed = [f"{name} failed: {item['error']}" for name, item in loops.items() if "error" in item]
    return [
        "A training step of GPT-2, as above, alone and in a `StepMeter`, in turn (medians; the ratio is of each",
        "round's two times). Memory is in GB: allocated at the most, and predicted without the process's other memory.",
        "",
        *_table((*headers, "peak memory", "predicted"), metered),
        "A trace of the step by torch.profiler, annotated: the share of the recorded FLOPs whose ops have an event.",
        "",
        *_table(("trace", "share", "FLOPs on events", "FLOPs recorded"), annotated),
        *failed,
    ]


def _write_state(state: Mapping[str, Any]) -> list[str]:
    analyses = {name: item for name, item in state.items() if isinstance(item, dict) and "taken" in item}
    left = [(name, ", ".join(item["left"]), f"{item['taken']:,}") for name, item in analyses.items() if item["left"]]
    most = max((item["taken"] for item in analyses.values()), default=0)
    lines = _table(("analysis", "state left behind", "device bytes allocated"), left) if left else []
    if analyses and not left:
        lines = [f"{len(analyses)} analyses, also ones that raise, leave no state behind and at most {most:,} bytes."]
    if interrupted := state.get("interrupted", {}):
        changed = len(interrupted["left"])
        lines += [f"{interrupted['interrupted']} counts were interrupted by Ctrl-C: {changed} left state behind."]
    context = state.get("a CUDA context after counts on the CPU, and by device='cuda'")
    if context == ["False", "False"]:
        lines += ['Counts on the CPU create no CUDA context, also with `device="cuda"`.']
    return lines


def _write_outside(outside: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, item in outside.items():
        for run, said in item.items() if "flops" not in item else {"record": item}.items():
            if isinstance(said, dict) and "unsupported" in said:
                rows.append((name, run, f"{said['flops']:,}", ", ".join(said["unsupported"]) or "nothing"))
    return _table(("work", "counted in", "FLOPs", "reported as unsupported"), rows)


def _write_layouts(layouts: Mapping[str, Any]) -> list[str]:
    return [
        f"Of {layouts['agreed'] + layouts['differ']:,} samples of torch's OpInfo database (float32 and bfloat16;"
        f" contiguous, transposed and channels_last), {layouts['agreed']:,} have the same shapes, strides and dtypes",
        f"in shape execution as on the device. The others are of {', '.join(sorted(layouts.get('apart', {})))}.",
    ]


_PARTS: tuple[tuple[str, tuple[str, ...], Callable[..., list[str]]], ...] = (
    ("Counts", ("models", "kernels", "steps"), _write_counts),
    ("Hardware counters", ("counters",), _write_counters),
    ("Strides", ("layouts",), _write_layouts),
    ("Memory", ("memory",), _write_memory),
    ("Profiles", ("profiles",), _write_profiles),
    ("Peaks and utilisation", ("peaks", "utilisation"), _write_peaks),
    ("Loops and their traces", ("loops",), _write_loops),
    ("State after a count", ("state",), _write_state),
    ("Work outside the dispatcher", ("outside",), _write_outside),
)
