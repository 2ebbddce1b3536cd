"""The devices: their figures against arithmetic and each other, their names, and mistakes in a file of one's own."""

import re
from dataclasses import replace

import pytest
import torch
import yaml

from fvflops import Device, find_device, load_table, mfu
from fvflops.cli import main
from fvflops.devices.devices import DTYPES, load_devices, short_dtype
from fvflops.formulas import TableError, shipped_tables
from tests.support.checkout import DATA

DEVICES = [pytest.param(device, id=device.name) for device in load_devices()]

FIGURES = yaml.safe_load((DATA / "device_figures.yaml").read_text())

MINE = "devices:\n  Chip One:\n    aliases: [C1]\n    matrix: {bfloat16: 4e12}\n    source: a test\n"


@pytest.mark.parametrize(("name", "dtype", "units", "in_a_cycle", "megahertz"), FIGURES["arithmetic"])
def test_a_peak_is_units_times_cycles(name, dtype, units, in_a_cycle, megahertz):
    assert find_device(name).peak(dtype) == pytest.approx(units * in_a_cycle * megahertz * 1e6, rel=0.008)


@pytest.mark.parametrize(("name", "dtype", "sparse", "tera"), FIGURES["printed"])
def test_a_peak_is_as_printed(name, dtype, sparse, tera):
    assert find_device(name).peak(dtype, sparse=sparse) == pytest.approx(tera * 1e12, rel=0.002)


@pytest.mark.parametrize(("name", "bits", "gigabits"), FIGURES["memory"])
def test_a_bandwidth_is_bus_times_rate(name, bits, gigabits):
    assert find_device(name).bandwidth == pytest.approx(bits * gigabits / 8 * 1e9, rel=0.001)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_agrees_with_itself(device):
    assert device.source and device.unit and device.vendor
    # Apple states no bandwidth of the M1.
    assert device.name == "M1" if device.bandwidth is None else device.bandwidth >= 100e9
    assert device.memory or "made with" in device.note
    peaks = {dtype: device.peak(dtype) for dtype in device.dtypes()}
    # Each step to narrower numbers is at least as fast.
    for slow, fast in (("fp64", "fp32"), ("fp32", "tf32"), ("tf32", "fp16"), ("fp32", "bf16"), ("bf16", "fp8")):
        if slow in peaks and fast in peaks:
            assert peaks[slow] <= peaks[fast], (slow, fast)
    halves = {peaks[dtype] for dtype in ("fp16", "bf16") if dtype in peaks}
    assert len(halves) <= 1 or (device.name == "MI100" and peaks["fp16"] == 2 * peaks["bf16"])
    assert set(device.sparse) <= set(device.matrix)


@pytest.mark.parametrize("device", [device for device in DEVICES if device.values[0].sparse])
def test_sparse_is_twice_dense(device):
    for dtype, peak in device.sparse.items():
        ratio = 4 / 3 if dtype == "fp4" and device.name in ("B300", "GB300") else 2
        # The datasheet of the L40S prints 362.05 and 733, the A16's and the A30's round to two or three digits.
        rounded = device.name in ("L40S", "A16", "A30")
        assert peak / device.matrix[dtype] == pytest.approx(ratio, rel=0.013 if rounded else 0.003)


def test_only_vendors_with_two_of_four_sparsity_have_it():
    assert {device.vendor for device in load_devices() if device.sparse} == {"NVIDIA", "AMD"}
    assert not find_device("V100").sparse and not find_device("T4").sparse and not find_device("MI250X").sparse


def test_no_float32_product_runs_on_tensor_cores():
    for device in load_devices():
        if device.vendor == "NVIDIA":
            assert "fp32" not in device.matrix
            assert device.peak("fp32") == device.vector["fp32"]


@pytest.mark.parametrize(
    ("die", "module"),
    [
        ("MI250X GCD", "MI250X module"),
        ("MI250 GCD", "MI250 module"),
        ("Data Center GPU Max 1550 stack", "Data Center GPU Max 1550 module"),
    ],
)
def test_a_module_of_two_dies_is_twice_a_die(die, module):
    die, module = find_device(die), find_device(module)
    assert {dtype: 2 * peak for dtype, peak in die.matrix.items()} == module.matrix
    assert (2 * die.memory, 2 * die.bandwidth) == (module.memory, module.bandwidth)


def test_names_of_one_chip_have_its_peaks():
    assert find_device("A100 40GB").matrix == find_device("A100 PCIe").matrix == find_device("A100").matrix
    assert find_device("A800").matrix == find_device("A800 PCIe").matrix == find_device("A100").matrix
    assert find_device("GH200").matrix == find_device("H200").matrix
    assert find_device("H800").peak("bf16") == find_device("H200").peak("bf16")
    peaks = [find_device(name).peak("bf16") for name in ("H100", "H100 NVL", "H100 PCIe")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


@pytest.mark.parametrize(("name", "device"), FIGURES["driver_names"].items())
def test_a_driver_names_a_device(name, device):
    assert find_device(name).name == device


@pytest.mark.parametrize("device", DEVICES)
def test_every_name_finds_its_device_alone(device):
    for name in (device.name, *device.aliases):
        for written in (name, name.upper(), name.lower().replace(" ", "-"), f"{device.vendor} {name}"):
            assert find_device(written) == device


@pytest.mark.parametrize("name", FIGURES["others"])
def test_no_device_is_taken_for_another(name):
    with pytest.raises(ValueError, match=rf"^no device '{re.escape(name)}': "):
        find_device(name)


def test_an_unknown_name_is_told_in_a_line():
    with pytest.raises(ValueError, match=r"did you mean 'H100'\? Others can be given as a Device") as caught:
        find_device("H1000")
    assert "\n" not in str(caught.value)
    known = r"no device 'potato': 'fvflops list devices' lists all\..* 'fvflops peak --output FILE\.yaml' measures"
    with pytest.raises(ValueError, match=known):
        find_device("potato")
    with pytest.raises(ValueError, match="a slice of a device"):
        find_device("NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    with pytest.raises(TypeError, match=r"device must be a name such as 'H100', or a Device; got device\(type='cpu'\)"):
        find_device(torch.device("cpu"))


def test_devices_are_no_table():
    assert "devices" not in shipped_tables()
    with pytest.raises(TableError, match="fvflops ships no table named 'devices'"):
        load_table("devices")


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        *((short, short) for short in DTYPES),
        (torch.bfloat16, "bf16"),
        (torch.half, "fp16"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.complex64, "fp32"),
        ("torch.float64", "fp64"),
        ("BF16", "bf16"),
    ],
)
def test_a_dtype_has_a_short_name(dtype, short):
    assert short_dtype(dtype) == short


def test_a_dtype_without_peak_names_those_with_one():
    with pytest.raises(ValueError, match="no device has a peak for the dtype 'int64': peaks are for fp64, fp32, tf32"):
        short_dtype(torch.int64)
    with pytest.raises(ValueError, match="T4 has no peak for bf16: it has fp32, fp16, int8; pass dtype="):
        find_device("T4").peak(torch.bfloat16)
    with pytest.raises(ValueError, match=r"SXM has no peak for fp32 at 2:4 sparsity: .*fp8, int8; omit sparse"):
        find_device("H100").peak("fp32", sparse=True)


def test_a_device_of_ones_own():
    device = Device(
        "mine", matrix={torch.bfloat16: 4e14}, sparse={"bf16": 8e14}, vector={"float": 2e13}, bandwidth=1e12
    )
    assert (device.peak("bf16"), device.peak("bf16", sparse=True), device.peak("fp32")) == (
        4 * 10**14,
        8 * 10**14,
        2 * 10**13,
    )
    assert device.dtypes() == ("fp32", "bf16") and device.memory is None
    assert replace(device, memory=80e9).memory == 80 * 10**9


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({}, "mine has no peak"),
        ({"matrix": {"bf61": 1e12}}, "no device has a peak for the dtype 'bf61': did you mean 'bf16'"),
        ({"matrix": {"bf16": 0}}, "matrix of mine at bf16 must be a positive number; got 0"),
        ({"matrix": {"bf16": True}}, "matrix of mine at bf16 must be a positive number; got True"),
        ({"matrix": {"bf16": "4e12"}}, "matrix of mine at bf16 must be a positive number; got '4e12'"),
        ({"matrix": {"bf16": 1e12, "bfloat16": 2e12}}, "bf16, bfloat16 name one dtype twice"),
        ({"matrix": {"bf16": 2e12}, "sparse": {"bf16": 1e12}}, "bf16 has 1000000000000, but the dense peak 2"),
        ({"vector": {"fp32": 2e12}, "sparse": {"bf16": 1e12}}, "but no dense peak"),
        ({"matrix": {"bf16": 2e12}, "bandwidth": -1}, "bandwidth of mine must be a positive number; got -1"),
    ],
)
def test_figures_that_cannot_be_are_refused(figures, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Device("mine", **figures)


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    for path in (tmp_path / "mine.yaml", str(tmp_path / "mine.yaml")):
        device = find_device("chip-one", file=path)
        assert (device.name, device.peak("bf16"), device.bandwidth) == ("Chip One", 4 * 10**12, None)
    with pytest.raises(ValueError, match="no device 'H100'"):
        find_device("H100", file=str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("matrix", "matrx", 4, "unknown key 'matrx': did you mean 'matrix'?"),
        ("    source: a test\n", "", 2, "Chip One has no source: name the document"),
        ("matrix: {bfloat16: 4e12}", "note: none", 2, "Chip One has no peak"),
        ("bfloat16", "bloat16", 4, "no device has a peak for the dtype 'bloat16'"),
        ("4e12", "4 TFLOPS", 4, "matrix of Chip One at bfloat16 is '4 TFLOPS': write a number such as 989.4e12"),
        ("4e12", "-4e12", 4, "is '-4e12'"),
        ("4e12", "0", 4, "is '0'"),
        ("4e12", "4e999", 4, "is '4e999'"),
        ("4e12", "0.5", 4, "is '0.5'"),
        ("4e12", "[4e12, 8e12]", 4, "is a list, not a string"),
        ("4e12}", "4e12, bf16: 4e12}", 4, "bf16 is given twice"),
        ("[C1]", "C1", 3, "aliases of Chip One is the string 'C1', not a list such as [H100, H100 SXM5]"),
        ("[C1]", "[one-chip]", 2, "'one-chip' is given twice: it is a name of Chip One too"),
        ("[C1]", "[NVIDIA GPU]", 2, "'NVIDIA GPU' names no device"),
        ("aliases: [C1]", "sparse: {bf16: 2e12}", 2, "bf16 has 2000000000000, but the dense peak 4000000000000"),
        ("    source", "    bandwidth: fast\n    source", 5, "bandwidth of Chip One is 'fast'"),
        (MINE, "devices: {}\n", 1, "there are no devices"),
        (MINE, "device: {}\n", 1, "unknown key 'device': did you mean 'devices'?"),
        (MINE, "- H100\n", 1, "a file of devices is a list, not a mapping"),
        ("a test", "!!python/name:os.system x", 5, "the tag"),
    ],
)
def test_a_mistake_is_told_with_file_and_line(tmp_path, old, new, line, text):
    path = tmp_path / "mine.yaml"
    assert old in MINE
    path.write_text(MINE.replace(old, new))
    with pytest.raises(TableError, match=re.escape(text)) as caught:
        find_device("C1", file=str(path))
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


def test_two_devices_of_one_name_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE + MINE.removeprefix("devices:\n").replace("Chip One", "Two"))
    with pytest.raises(TableError, match=r"mine.yaml:6: 'C1' is given twice: it is a name of Chip One too"):
        load_devices(str(path))


def test_a_file_that_is_not_there_is_told():
    with pytest.raises(TableError, match=r"nothing.yaml:1: cannot be read: No such file"):
        load_devices("nothing.yaml")


def test_measured_peaks_are_printed_and_written_for_the_options_that_take_them(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    arguments = ["peak", "--device", "cpu", "--dtype", "fp32", "--seconds", "0.02"]
    assert main([*arguments, "--output", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (device,) = load_devices(str(file))
    assert device.dtypes() == ("fp32",) and device.bandwidth > 0 and device.peak("fp32") > 10**7
    assert f"roofline MODEL --device {file}" in shown and f"--peaks {file}" in shown
    assert main(["roofline", "zoo:lenet5", "--device", str(file)]) == 0
    assert mfu(1000, 1, device=str(file), dtype="fp32") == pytest.approx(1000 / device.peak("fp32"))
    assert main([*arguments, "--output", str(tmp_path / "mine.txt")]) == 2
    assert "choose a name with .yaml" in capsys.readouterr().err
