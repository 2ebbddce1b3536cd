"""Write the page of what was measured, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tabulate import tabulate

from gpu_checks.runs import differences

_LONGEST = 150
_WAYS = {
    "shapes": "tensors on CUDA",
    "asked": 'tensors on the CPU, `device="cuda"`',
    "without": "the same, CUDA hidden",
}
_COUNTED = {
    "models": "the models of the tests (forward, forward and backward, forward in bfloat16)",
    "kernels": "attention, recurrence, normalisation, convolution, linear algebra and other ops, forward and backward",
    "steps": "training steps with an optimizer, by default, foreach, one by one and fused",
}


def write_page(results: Mapping[str, Any]) -> str:
    """Return the page; a section that was not measured, or failed, says so."""
    parts = ["# On a GPU", "", *_introduce(results)]
    for title, names, write in _PARTS:
        if not any(name in results for name in names):
            continue
        parts += ["", f"## {title}", ""]
        for name in names:
            for error in results.get(name, {}).get("errors", ()):
                parts += [f"{name}, part {error['share']}, failed: {error['error']}", ""]
        parts += write({name: results.get(name, {}).get("found", {}) for name in names}, results)
    return "\n".join(parts).rstrip() + "\n"


def _introduce(results: Mapping[str, Any]) -> list[str]:
    machine = results.get("environment", {}).get("found", {})
    if not machine:
        return ["What `tools/gpu.py` measured."]
    driver = str(machine["driver, clock, power"]).split(", ")
    return [
        f"What `tools/gpu.py --page docs/gpu.md` measured on {machine['day']} on one {machine['device']}"
        f" ({machine['multiprocessors']} multiprocessors, {machine['memory'] / 1e9:.0f} GB, driver {driver[0]}), with"
        f" torch {machine['torch in full']}, cuDNN {machine['cudnn']}, Triton {machine['triton']}, Python"
        f" {machine['python']}, torchvision {machine['torchvision']}, timm {machine['timm']} and transformers"
        f" {machine['transformers']}. `pytest -m gpu` runs the tests that need a device.",
    ]


def _table(headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    return [tabulate([list(row) for row in rows], list(headers), tablefmt="pipe", disable_numparse=True), ""]


def _write_counts(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    rows, apart = [], []
    for name, what in _COUNTED.items():
        for way, text in _WAYS.items():
            compared = dict(_compare(name, way, results))
            if not compared:
                continue
            kinds = [_kind(item) for item in compared.values()]
            rows.append([what, text, len(kinds), *(kinds.count(kind) for kind in ("equal", "ops", "numbers", "error"))])
            apart += [(name, way, case, item) for case, item in compared.items() if _kind(item) != "equal"]
    headers = ("what", "counted", "cases", "equal", "other free ops", "other figures", "not counted")
    lines = [
        "Each case is recorded on the device, and counted by shapes. Equal means: the same calls with the same",
        "arguments and results, op by op, and so the same FLOPs, MACs and `exact` FLOPs. What differs is listed below.",
        "",
        *_table(headers, rows),
    ]
    texts: dict[tuple[str, str], list[str]] = {}
    for _, way, case, item in apart:
        texts.setdefault((case, "; ".join(item)[:_LONGEST].replace("|", "/").replace("\n", " ")), []).append(way)
    return lines + _table(
        ("case", "counted", "difference"), [(case, ", ".join(ways), text) for (case, text), ways in texts.items()]
    )


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
    if found[0].startswith(("by shapes:", "real:")):
        return "error"
    return "numbers" if any(item.startswith(("flops", "macs", "exact", "unsup")) for item in found) else "ops"


def _write_counters(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    counted = found["counters"]
    if "not measured" in counted:
        return [counted["not measured"]]
    rows = [
        (name, f"{item['counted']:,}", f"{item['executed']:,}", f"{item['executed'] / item['counted']:.4f}")
        for name, item in counted.items()
    ]
    return [
        "FLOPs of products as the table `default` counts them, a multiply-add being two, and as Nsight Compute",
        "saw them executed: by tensor cores, and twice the fused multiply-adds of other units, softmax's among them.",
        "Causal attention is counted whole.",
        "",
        *_table(("what", "counted", "executed", "ratio"), rows),
    ]


def _write_memory(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    rows, most = [], 0.0
    for name, item in found["memory"].items():
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
        "`predict_memory` beside `torch.cuda.max_memory_allocated`, both over what was there before, in MB. The",
        "prediction takes no memory of the device. Convolutions and recurrent layers take workspaces that cuDNN knows",
        f"(`MemoryTimeline.unseen`), the others are within {most:.1%}.",
        "",
        *_table(("model", "forward", "first training step", "second"), rows),
    ]


def _write_profiles(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    profiles, rows, ops = found["profiles"], [], []
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
        elif "ops ms" in item:
            kernels = profiles.get(name.replace("ProfileAnalysis", "forward"), {}).get("device ms a step", 0.0)
            figures = (item["plain ms"], item["root ms"], item["ops ms"], kernels)
            ops.append((name.removesuffix(", ProfileAnalysis"), *(f"{figure:.2f}" for figure in figures)))
    return [
        "`profile_kernels`: the kernels of three runs, and how much of their time and of the FLOPs found an owner.",
        "",
        *_table(("run", "kernels' ms a run", "kernels", "of no op", "time of a module", "FLOPs on events"), rows),
        "`ProfileAnalysis`, forward, in ms: the model on its own by CUDA events, launches included; its root module",
        "and the sum of its ops as profiled, and torch.profiler's sum of the kernels.",
        "",
        *_table(("model", "plain", "root module", "sum of ops", "kernels"), ops),
    ]


def _write_peaks(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    peaks = found["peaks"]
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
        for name, item in found["utilisation"].items()
        if "seconds" in item
    ]
    return [
        "`fvflops roofline --measure` (matrices of ones) beside the datasheet in `configs/devices.yaml`"
        f" ({peaks.get('listed')}).",
        "",
        *_table(("figure", "measured", "datasheet"), rows),
        "A training step of GPT-2 (124 M parameters, 16 × 1,024 tokens, bfloat16 autocast, fused AdamW), by the",
        "attention kernel, which `mfu` counts as it ran:",
        "",
        *_table(("attention", "ms", "tokens/s", "MACs recorded", "MACs by shapes", "`mfu`"), steps),
    ]


def _write_state(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    state = found["state"]
    rows = []
    for name, item in state.items():
        if isinstance(item, dict) and "left" in item and "taken" in item:
            rows.append((name, ", ".join(item["left"]) or "nothing", f"{item['taken']:,}"))
    interrupted = state.get("interrupted", {})
    lines = _table(("analysis", "left", "bytes of the device taken"), rows)
    if interrupted:
        left = len(interrupted["left"])
        lines += [f"Of {interrupted['interrupted']} counts that Ctrl-C interrupted, {left} left anything.", ""]
    context = state.get("a CUDA context after counts on the CPU, and by device='cuda'")
    if context == ["False", "False"]:
        lines += ['Counts on the CPU, with `device="cuda"` too, make no CUDA context.']
    return lines


def _write_outside(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, item in found["outside"].items():
        for run, said in item.items() if "flops" not in item else {"record": item}.items():
            if isinstance(said, dict) and "unsupported" in said:
                rows.append((name, run, f"{said['flops']:,}", ", ".join(said["unsupported"]) or "nothing"))
    return _table(("what runs", "counted", "FLOPs", "reported as unsupported"), rows)


def _write_layouts(found: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    layouts = found["layouts"]
    rows = [(name, text[:_LONGEST]) for name, text in sorted(layouts.get("apart", {}).items())]
    return [
        f"Of {layouts['agreed'] + layouts['differ']:,} samples of torch's own (float32 and bfloat16;"
        f" contiguous, transposed and channels_last), {layouts['agreed']:,} have the same shapes, strides and dtypes",
        "by shapes as on the device.",
        "The first difference of each other op, by shapes and real (shape, strides, dtype, device):",
        "",
        *_table(("op", "difference"), rows),
    ]


_PARTS: tuple[tuple[str, tuple[str, ...], Callable[..., list[str]]], ...] = (
    ("Counts", ("models", "kernels", "steps"), _write_counts),
    ("Hardware counters", ("counters",), _write_counters),
    ("Strides", ("layouts",), _write_layouts),
    ("Memory", ("memory",), _write_memory),
    ("Profiles", ("profiles",), _write_profiles),
    ("Peaks and utilisation", ("peaks", "utilisation"), _write_peaks),
    ("What is left behind", ("state",), _write_state),
    ("Work outside the dispatcher", ("outside",), _write_outside),
)
