"""The devices: their figures against arithmetic and each other, their names, and mistakes in a file of one's own."""

import re
from dataclasses import replace

import pytest
import torch

from fvflops import Device, find_device, load_table, mfu
from fvflops.cli import main
from fvflops.devices.devices import DTYPES, load_devices, short_dtype
from fvflops.formulas import TableError, shipped_tables

DEVICES = [pytest.param(device, id=device.name) for device in load_devices()]

# Units × what one does in a cycle × the clock that its maker states for it in MHz, which is where a peak comes from.
# NVIDIA counts SMs, AMD compute units, Google MXUs of 128 × 128 multiply-adds, Intel Xe cores, or MMEs of 256 × 256.
ARITHMETIC = [
    ("V100 SXM2", "fp16", 80, 1024, 1530),
    ("V100 SXM2", "fp32", 80, 128, 1530),
    ("V100 SXM2", "fp64", 80, 64, 1530),
    ("T4", "fp16", 40, 1024, 1590),
    ("T4", "fp32", 40, 128, 1590),
    ("RTX 2080 Ti", "fp16", 68, 512, 1635),
    ("Titan RTX", "fp16", 72, 1024, 1770),
    ("Quadro RTX 6000", "fp16", 72, 1024, 1770),
    ("Quadro RTX 8000", "fp32", 72, 128, 1770),
    ("P100", "fp32", 56, 128, 1480),
    ("P100 PCIe", "fp16", 56, 256, 1303),
    ("GTX 1080 Ti", "fp32", 28, 256, 1582),
    ("A100", "bf16", 108, 2048, 1410),
    ("A100", "tf32", 108, 1024, 1410),
    ("A100", "fp32", 108, 128, 1410),
    ("A100", "fp64", 108, 128, 1410),
    ("A10", "bf16", 72, 1024, 1695),
    ("A10", "fp32", 72, 256, 1695),
    ("A40", "bf16", 84, 1024, 1740),
    ("A40", "fp32", 84, 256, 1740),
    ("A30", "bf16", 56, 2048, 1440),
    ("A10G", "bf16", 80, 512, 1710),
    ("A16", "bf16", 10, 1024, 1755),
    ("A2", "bf16", 10, 1024, 1770),
    ("RTX A6000", "bf16", 84, 1024, 1800),
    ("RTX A5000", "bf16", 64, 1024, 1695),
    ("RTX A5000", "fp32", 64, 256, 1695),
    ("RTX A4000", "bf16", 48, 1024, 1560),
    ("RTX A4000", "fp32", 48, 256, 1560),
    ("Jetson AGX Orin", "int8", 16, 4096, 1300),
    ("Jetson AGX Orin", "fp32", 16, 256, 1300),
    ("RTX 3060", "fp16", 28, 512, 1777),
    ("RTX 3070", "fp16", 46, 512, 1725),
    ("RTX 3080 10GB", "fp16", 68, 512, 1710),
    ("RTX 3080", "fp16", 70, 512, 1710),
    ("RTX 3080 Ti", "fp16", 80, 512, 1665),
    ("RTX 3090 Ti", "fp16", 84, 512, 1860),
    ("RTX 3090", "fp16", 82, 512, 1695),
    ("RTX 3090", "fp32", 82, 256, 1695),
    ("RTX 4060", "fp16", 24, 512, 2460),
    ("RTX 4060 Ti", "fp16", 34, 512, 2535),
    ("RTX 4070", "fp16", 46, 512, 2475),
    ("RTX 4070 SUPER", "fp16", 56, 512, 2475),
    ("RTX 4070 Ti", "fp16", 60, 512, 2610),
    ("RTX 4070 Ti SUPER", "fp16", 66, 512, 2610),
    ("RTX 4080", "fp16", 76, 512, 2505),
    ("RTX 4080 SUPER", "fp16", 80, 512, 2550),
    ("RTX 4090", "fp16", 128, 512, 2520),
    ("RTX 4090", "fp32", 128, 256, 2520),
    ("RTX 5060 Ti", "fp16", 36, 512, 2572),
    ("RTX 5070", "fp16", 48, 512, 2512),
    ("RTX 5070 Ti", "fp16", 70, 512, 2452),
    ("RTX 5080", "fp16", 84, 512, 2617),
    ("RTX PRO 6000", "bf16", 188, 1024, 2617),
    ("RTX PRO 6000", "fp32", 188, 256, 2617),
    ("RTX 5090", "fp16", 170, 512, 2407),
    ("RTX 5090", "fp32", 170, 256, 2407),
    ("L4", "bf16", 58, 1024, 2040),
    ("L4", "fp32", 58, 256, 2040),
    ("RTX 5000 Ada", "bf16", 100, 1024, 2550),
    ("RTX 5000 Ada", "fp32", 100, 256, 2550),
    ("RTX 6000 Ada", "bf16", 142, 1024, 2505),
    ("RTX 6000 Ada", "fp32", 142, 256, 2505),
    ("L20", "bf16", 92, 512, 2520),
    ("L40", "bf16", 142, 512, 2490),
    ("L40", "fp8", 142, 1024, 2490),
    ("L40S", "tf32", 142, 512, 2520),
    ("L40S", "fp32", 142, 256, 2520),
    ("H100 SXM", "bf16", 132, 4096, 1830),
    ("H100 SXM", "fp8", 132, 8192, 1830),
    ("H100 SXM", "fp32", 132, 256, 1980),
    ("H100 SXM", "fp64", 132, 256, 1980),
    ("H100 PCIe", "bf16", 114, 4096, 1620),
    ("H100 PCIe", "fp32", 114, 256, 1755),
    ("H800", "bf16", 132, 4096, 1830),
    ("H800 PCIe", "bf16", 114, 4096, 1620),
    ("MI50", "fp32", 60, 128, 1725),
    ("MI100", "fp16", 120, 1024, 1502),
    ("MI100", "bf16", 120, 512, 1502),
    ("MI100", "fp32", 120, 256, 1502),
    ("MI210", "bf16", 104, 1024, 1700),
    ("MI250 module", "bf16", 208, 1024, 1700),
    ("MI250 module", "fp64", 208, 256, 1700),
    ("MI300A", "bf16", 228, 2048, 2100),
    ("MI300A", "fp64", 228, 256, 2100),
    ("MI350X", "bf16", 256, 4096, 2200),
    ("MI350X", "fp4", 256, 16384, 2200),
    ("MI350X", "fp64", 256, 128, 2200),
    ("Radeon RX 7900 XTX", "bf16", 96, 512, 2500),
    ("Radeon PRO W7900", "bf16", 96, 512, 2495),
    ("Radeon RX 9070 XT", "bf16", 64, 1024, 2970),
    ("Radeon RX 9070 XT", "fp32", 64, 256, 2970),
    ("Gaudi 3", "bf16", 8, 2 * 256 * 256, 1600),
    ("Data Center GPU Max 1550 module", "bf16", 128, 4096, 1600),
    ("Data Center GPU Max 1550", "fp32", 64, 256, 1600),
    ("Data Center GPU Max 1100", "bf16", 56, 4096, 1550),
    ("MI250X module", "fp16", 220, 1024, 1700),
    ("MI250X module", "fp64", 220, 256, 1700),
    ("MI250X GCD", "fp16", 110, 1024, 1700),
    ("MI300X", "bf16", 304, 2048, 2100),
    ("MI300X", "fp32", 304, 256, 2100),
    ("MI355X", "bf16", 256, 4096, 2400),
    ("MI355X", "fp4", 256, 16384, 2400),
    ("MI355X", "fp64", 256, 128, 2400),
    ("TPU v2", "bf16", 2, 2 * 128 * 128, 700),
    ("TPU v3", "bf16", 4, 2 * 128 * 128, 940),
    ("TPU v4", "bf16", 8, 2 * 128 * 128, 1050),
    ("TPU v5e", "bf16", 4, 2 * 128 * 128, 1500),
    ("TPU v5p", "bf16", 8, 2 * 128 * 128, 1750),
]

# The one matrix rate on the product page of a GeForce, in 10^12 a second: AI TOPS are int8 or fp4 with sparsity, Tensor
# TFLOPS are fp16 with sparsity and float16 accumulators, which is as fast as dense int8.
PRINTED = [
    ("RTX 3080 Ti", "int8", False, 273),
    ("RTX 3090 Ti", "int8", False, 320),
    ("RTX 4060", "int8", True, 242),
    ("RTX 4060 Ti", "int8", True, 353),
    ("RTX 4070", "int8", True, 466),
    ("RTX 4070 SUPER", "int8", True, 568),
    ("RTX 4070 Ti", "int8", True, 641),
    ("RTX 4070 Ti SUPER", "int8", True, 706),
    ("RTX 4080", "int8", True, 780),
    ("RTX 4080 SUPER", "int8", True, 836),
    ("RTX 5060 Ti", "fp4", True, 759),
    ("RTX 5070", "fp4", True, 988),
    ("RTX 5070 Ti", "fp4", True, 1406),
    ("RTX 5080", "fp4", True, 1801),
]

# Bits of the memory's bus × the rate of one of them in Gbit/s, which is where a bandwidth comes from.
MEMORY = [
    ("GTX 1080 Ti", 352, 11),
    ("RTX 2080 Ti", 352, 14),
    ("Quadro RTX 8000", 384, 14),
    ("RTX 3060", 192, 15),
    ("RTX 3070", 256, 14),
    ("RTX 3080 10GB", 320, 19),
    ("RTX 3080 12GB", 384, 19),
    ("RTX 3090 Ti", 384, 21),
    ("A10G", 384, 12.5),
    ("A16", 128, 12.5),
    ("RTX A4000", 256, 14),
    ("RTX A5000", 384, 16),
    ("Jetson AGX Orin", 256, 6.4),
    ("RTX 4060", 128, 17),
    ("RTX 4060 Ti", 128, 18),
    ("RTX 4070", 192, 21),
    ("RTX 4070 Ti SUPER", 256, 21),
    ("RTX 4080", 256, 22.4),
    ("RTX 4080 SUPER", 256, 23),
    ("RTX 5000 Ada", 256, 18),
    ("RTX 6000 Ada", 384, 20),
    ("L40", 384, 18),
    ("RTX 5060 Ti", 128, 28),
    ("RTX 5070", 192, 28),
    ("RTX 5070 Ti", 256, 28),
    ("RTX 5080", 256, 30),
    ("RTX PRO 6000", 512, 28),
    ("MI100", 4096, 2.4),
    ("MI210", 4096, 3.2),
    ("Radeon RX 7900 XTX", 384, 20),
    ("Radeon PRO W7900", 384, 18),
    ("Radeon RX 9070 XT", 256, 20),
]

# As the drivers name them.
DRIVER_NAMES = {
    "Tesla V100-SXM2-16GB": "V100 SXM2 16GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2 32GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "Tesla T4": "T4",
    "A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A10": "A10",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "Tesla P100-SXM2-16GB": "P100 SXM2",
    "Tesla P100-PCIE-16GB": "P100 PCIe 16GB",
    "NVIDIA GeForce GTX 1080 Ti": "GTX 1080 Ti",
    "GeForce RTX 2080 Ti": "RTX 2080 Ti",
    "NVIDIA TITAN RTX": "Titan RTX",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "NVIDIA A10G": "A10G",
    "NVIDIA A30": "A30",
    "NVIDIA A800-SXM4-80GB": "A800 SXM 80GB",
    "NVIDIA A800 80GB PCIe": "A800 PCIe 80GB",
    "NVIDIA A800 40GB Active": "A800 PCIe 40GB",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA H800 PCIe": "H800 PCIe",
    "NVIDIA H20": "H20",
    "NVIDIA L40": "L40",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX 5000 Ada Generation": "RTX 5000 Ada",
    "NVIDIA GeForce RTX 3080": "RTX 3080 12GB",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 Ti",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti SUPER",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX 4080 SUPER",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "AMD Instinct MI100": "MI100",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250X / MI250": "MI250X GCD",
    "AMD Instinct MI300A": "MI300A",
    "AMD Radeon RX 7900 XTX": "Radeon RX 7900 XTX",
    "Intel(R) Data Center GPU Max 1550": "Data Center GPU Max 1550 stack",
    "Intel(R) Data Center GPU Max 1100": "Data Center GPU Max 1100",
    "Apple M1 Max": "M1 Max",
    "AMD Instinct MI250X": "MI250X GCD",
    "AMD Instinct MI300X OAM": "MI300X",
    "TPU v5 lite": "TPU v5e",
    "TPU7x": "TPU v7",
}
# Another device each, or none: none of them may be taken for the one that it looks like.
OTHERS = [
    "NVIDIA A100X",
    "NVIDIA A10M",
    "NVIDIA L40G",
    "NVIDIA H20-3e",
    "NVIDIA TITAN V",
    "NVIDIA GeForce GTX 1080",
    "NVIDIA GeForce RTX 3060 Ti",
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA GeForce RTX 4080 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
    "NVIDIA RTX A5000 Laptop GPU",
    "NVIDIA RTX 5000 Ada Generation Laptop GPU",
    "RTX 6000",
    "NVIDIA RTX PRO 5000 Blackwell",
    "Orin",
    "AMD Instinct MI60",
    "AMD Radeon RX 7900 XT",
    "Gaudi 3 PCIe",
    "Apple M2 Pro",
    "NVIDIA",
    "H",
    "",
]

MINE = "devices:\n  Chip One:\n    aliases: [C1]\n    matrix: {bfloat16: 4e12}\n    source: a test\n"


@pytest.mark.parametrize(("name", "dtype", "units", "in_a_cycle", "megahertz"), ARITHMETIC)
def test_a_peak_is_units_times_cycles(name, dtype, units, in_a_cycle, megahertz):
    assert find_device(name).peak(dtype) == pytest.approx(units * in_a_cycle * megahertz * 1e6, rel=0.008)


@pytest.mark.parametrize(("name", "dtype", "sparse", "tera"), PRINTED)
def test_a_peak_is_as_printed(name, dtype, sparse, tera):
    assert find_device(name).peak(dtype, sparse=sparse) == pytest.approx(tera * 1e12, rel=0.002)


@pytest.mark.parametrize(("name", "bits", "gigabits"), MEMORY)
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
        # The datasheet of the L40S prints 362.05 and 733, those of the A16 and the A30 round to two or three digits.
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


@pytest.mark.parametrize(("name", "device"), DRIVER_NAMES.items())
def test_a_driver_names_a_device(name, device):
    assert find_device(name).name == device


@pytest.mark.parametrize("device", DEVICES)
def test_every_name_finds_its_device_alone(device):
    for name in (device.name, *device.aliases):
        for written in (name, name.upper(), name.lower().replace(" ", "-"), f"{device.vendor} {name}"):
            assert find_device(written) == device


@pytest.mark.parametrize("name", OTHERS)
def test_no_device_is_taken_for_another(name):
    with pytest.raises(ValueError, match=rf"^no device '{re.escape(name)}': "):
        find_device(name)


def test_an_unknown_name_is_told_in_a_line():
    with pytest.raises(ValueError, match=r"did you mean 'H100'\? Others can be given as a Device") as caught:
        find_device("H1000")
    assert "\n" not in str(caught.value)
    known = (
        r"no device 'potato': 'fvflops list devices' lists those known\..* 'fvflops peak --output FILE\.yaml' measures"
    )
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
    with pytest.raises(ValueError, match="T4 has no peak for bf16: it has fp32, fp16, int8"):
        find_device("T4").peak(torch.bfloat16)
    with pytest.raises(ValueError, match="H100 SXM has no peak for fp32 at 2:4 sparsity: it has tf32, fp16, bf16, fp8"):
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
        ({"matrix": {"bf16": float("nan")}}, "matrix of mine at bf16 must be a positive number; got nan"),
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
        ("4e12", "nan", 4, "is 'nan'"),
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
