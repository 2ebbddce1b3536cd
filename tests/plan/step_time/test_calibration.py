"""Files of efficiencies and networks: what they give, and mistakes with file and line."""

import re
from dataclasses import replace

import pytest

from fvflops import Efficiency, find_device, find_efficiency, find_network
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.devices.kernel_models.products import Product
from fvflops.formulas import TableError, shipped_tables
from fvflops.plan.step_time.calibration import KernelTimer, assume_network, load_efficiencies, load_networks
from fvflops.plan.step_time.kernel_times import Kernel

EFFICIENCIES = """description: mine
efficiencies:
  Chip:
    matmul: 0.8
    of: peaks
    launch: 2e-6
    source: measured here
"""
NETWORKS = """description: mine
networks:
  Ring:
    gpus_per_node: 4
    inside: {bandwidth: 100e9, latency: 1e-6}
    between: {bandwidth: 10e9, latency: 5e-6}
    source: measured here
"""


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_ones_own(tmp_path):
    efficiency = find_efficiency("Chip", file=write(tmp_path, EFFICIENCIES))
    assert efficiency == Efficiency(matmul=0.8, launch=2e-6, source="measured here")
    network = find_network("Ring", file=write(tmp_path, NETWORKS))
    assert (network.gpus_per_node, network.between.bandwidth, network.source) == (4, 10e9, "measured here")


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("matmul: 0.8", "matmul: fast", 4, "matmul of Chip is 'fast': write a number such as 2.5e-6"),
        ("matmul: 0.8", "matmull: 0.8", 4, "matmull"),
        ("matmul: 0.8", "matmul: 1.2", 3, "matmul is a fraction, above 0 and at most 1"),
        ("of: peaks", "of: peak", 5, "of of Chip must be peaks or kernels"),
        ("    source: measured here\n", "", 3, "Chip has no source: say where its figures are from"),
        ("efficiencies:", "efficiency:", 2, "efficiency"),
    ],
)
def test_a_mistake_in_efficiencies_has_file_and_line(tmp_path, old, new, line, text):
    check_mistake(lambda file: find_efficiency("Chip", file=file), tmp_path, EFFICIENCIES, old, new, line, text)


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("    gpus_per_node: 4\n", "", 3, "Ring has no gpus_per_node"),
        (", latency: 1e-6}", "}", 5, "inside of Ring has no latency"),
        ("10e9", "0", 6, "a link needs a bandwidth above 0"),
        ("gpus_per_node: 4", "gpus_per_node: 4.5", 4, "gpus_per_node of Ring is 4.5: write an integer of at least 1"),
        ("gpus_per_node: 4", "gpus_per_node: 1e999", 4, "gpus_per_node of Ring is '1e999': write a number"),
        ("10e9", "nan", 6, "bandwidth, between of Ring is 'nan'"),
        ("10e9", "fast", 6, "bandwidth, between of Ring is 'fast'"),
    ],
)
def test_a_mistake_in_networks_has_file_and_line(tmp_path, old, new, line, text):
    check_mistake(lambda file: find_network("Ring", file=file), tmp_path, NETWORKS, old, new, line, text)


def check_mistake(read, tmp_path, good, old, new, line, text):
    assert old in good
    path = write(tmp_path, good.replace(old, new))
    with pytest.raises(TableError, match=re.escape(text)) as caught:
        read(path)
    assert re.match(rf"{re.escape(path)}:(\d+): ", str(caught.value))[1] == str(line)


def test_shipped_files_name_their_sources_and_devices():
    assert all(efficiency.source for efficiency, _ in load_efficiencies().values())
    assert all(network.source for network in load_networks().values())


def test_their_files_are_no_formula_tables():
    assert not {"efficiencies", "engines", "networks"} & set(shipped_tables())


def test_what_is_not_there():
    assert find_efficiency("TPU v4").source.startswith("not measured for TPU v4: ")
    with pytest.raises(ValueError, match="no software 'MPT 202': did you mean 'MPT 2023'"):
        find_efficiency("H100", software="MPT 202")
    with pytest.raises(ValueError, match=r"no network 'HGX H100 320G': did you mean 'HGX H100 3200G'\?"):
        find_network("HGX H100 320G")


def test_each_family_has_a_network_that_exists():
    for device in ("A100 SXM 80GB", "H100 SXM", "H200"):
        network = assume_network(find_device(device))
        named = find_network(network.name)
        assert network == replace(named, source=f"assumed for {device}, since none is given: {named.source}")
    assert assume_network(find_device("TPU v5p")) is None
    gpus = [gpu for network in load_networks().values() for gpu in network.gpus]
    assert len(set(gpus)) == len(gpus)
    assert [find_device(gpu).name for gpu in gpus] == gpus


@pytest.mark.parametrize("device", ["H100", "B200", "GB200", "B300", "MI300X", "L4", "RTX 4090"])
def test_an_all_reduce_inside_a_node_takes_its_bytes_at_most_at_the_links_bandwidth(device):
    inside = assume_network(find_device(device)).inside
    passes = 1 if inside.fabric.adds else 2
    for ranks in (2, 4, 8):
        times = [inside.seconds("all_reduce", ranks, 2.0**power) for power in range(31)]
        assert times == sorted(times)
        assert times[-1] > passes * 2**30 * (ranks - 1) / ranks / inside.fabric.bandwidth


@pytest.mark.parametrize("kernels", [None, find_figures(find_device("A100"))], ids=["of peaks", "of kernels"])
def test_an_efficiency_lengthens_a_kernel(kernels):
    device = find_device("A100")
    product = Kernel("matmul", 8192**3, 6 * 8192**2, "bfloat16", Product(8192, 8192, 8192))
    move = Kernel("memory", 0, 10**9, "bfloat16")

    def seconds(work, **figures):
        return KernelTimer(device, Efficiency(kernels=kernels, **figures)).seconds(work)

    assert seconds(product, matmul=0.5) == pytest.approx(2 * seconds(product))
    assert seconds(move, bandwidth=0.5) == pytest.approx(2 * seconds(move))
    assert seconds(move, kernel=1.0) == pytest.approx(1 + seconds(move))
    with pytest.raises(ValueError, match="matmul is a fraction"):
        Efficiency(matmul=0.0)
