"""`fvflops peak`: measure the peaks of this machine's device, and say how to use them."""

from __future__ import annotations

import argparse

from fvflops.cli.outputs import is_standard_output, write
from fvflops.cli.progress import activity
from fvflops.devices.device_benchmark import PRODUCTS, measure_device, write_device
from fvflops.devices.devices import Device
from fvflops.reports.document import Document, Items, Table, number_column, text_column
from fvflops.reports.formats import write_document
from fvflops.units import format_short

EXAMPLES = ("fvflops peak --seconds 0.05", "fvflops peak --device cpu --dtype fp32 --seconds 0.05 --output peaks.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to measure; default: cuda if there is one")
    parser.add_argument(
        "--dtype", action="append", choices=tuple(PRODUCTS), help="measure this dtype alone; may be given several times"
    )
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="time for each peak; default: 1")
    parser.add_argument("--output", metavar="FILE.yaml", help="file of devices for the peaks; default: print them")


def run(arguments: argparse.Namespace) -> int:
    """Measure the device; return the exit code."""
    is_file = not is_standard_output(arguments.output)
    if is_file and not arguments.output.endswith((".yaml", ".yml")):
        raise ValueError(f"--output {arguments.output}: the peaks are a file of devices: choose a name with .yaml")
    with activity("measuring the peaks of this device"):
        device = measure_device(arguments.device, dtypes=arguments.dtype, seconds=arguments.seconds)
    if arguments.output is not None:
        write(write_device(device), arguments.output)
        if not is_file:
            return 0
    write(write_document(peaks_report(device, arguments.output), "text"), None)
    return 0


def peaks_report(device: Device, path: str | None) -> Document:
    """Return the measured peaks of a device, and the uses of the file at `path`."""
    columns = text_column("what", "measured"), number_column("peak", form=format_short), text_column("unit")
    rows: list[tuple[str, int, str]] = [(dtype, device.peak(dtype), "FLOP/s") for dtype in device.dtypes()]
    if device.bandwidth is not None:
        rows.append(("memory", int(device.bandwidth), "bytes/s"))
    file = path or "FILE.yaml"
    uses = [
        f'fvflops.StepMeter(model, device="{file}"), and so in mfu and hfu',
        f'MeterCallback(device="{file}") of fvflops.integrations',
        f"fvflops roofline MODEL --device {file}",
        f"fvflops profile MODEL --peaks {file}",
    ]
    heading = f"{'' if path else 'To use them, write them with --output FILE.yaml. '}Use {file} in:"
    title = f"{device.name}: {device.unit}, {device.source}"
    return Document("peak", title, [Table("peaks", columns, rows, noun="peak"), Items(heading, uses)])
