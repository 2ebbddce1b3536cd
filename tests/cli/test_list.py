"""`fvflops list`, and reports on standard output."""

import csv
import io
import subprocess
import sys

import pytest

from fvflops.cli import main
from fvflops.cli.commands.list import LISTS
from fvflops.devices.devices import load_devices
from fvflops.formulas import shipped_tables
from fvflops.zoo import ZOO
from tests.support.reports.report_formats import output_of
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()


def test_names_are_one_a_line(capsys):
    assert output_of(capsys, "list", "zoo").splitlines() == list(ZOO)
    assert {"text", "csv", "svg", "trace"} <= set(output_of(capsys, "list", "formats").splitlines())


def test_conventions_and_devices_say_what_each_is(capsys):
    for kind, names in {"conventions": shipped_tables(), "devices": [device.name for device in load_devices()]}.items():
        rows = list(csv.DictReader(io.StringIO(output_of(capsys, "list", kind, "--format", "csv"))))
        assert [row["name"] for row in rows] == names and all(row["description"] for row in rows)
        text = " ".join(output_of(capsys, "list", kind).split())
        assert all(f"{row['name']} {row['description']}" in text for row in rows)
    assert "H100 SXM 84.9 GB, 3.35 TB/s, 989 TFLOP/s bf16" in text
    assert output_of(capsys, "list", "tables") == output_of(capsys, "list", "conventions")  # its name in version 1.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("timm", "resnet50"),
        ("torchvision", "resnet50"),
        ("transformers", "BertModel"),
        ("open_clip", "ViT-B-32"),
        ("diffusers", "FluxTransformer2DModel"),
    ],
)
def test_libraries_list_their_models(capsys, kind, name):
    pytest.importorskip(kind, reason=f"{kind} is not installed")
    names = output_of(capsys, "list", kind).splitlines()
    assert name in names and len(set(names)) == len(names) > 50


def test_a_pattern_selects_names_in_any_case(capsys):
    assert output_of(capsys, "list", "zoo", "llama3*").split() == ["llama3_8b", "llama3_70b", "llama3_405b"]
    assert output_of(capsys, "list", "zoo", "RESNET50").split() == ["resnet50"]
    assert output_of(capsys, "list", "zoo", "*[05]", "--sort", "name", "--top", "1").split() == ["lenet5"]


def test_names_are_data_too(capsys, tmp_path):
    rows = list(csv.DictReader(io.StringIO(output_of(capsys, "list", "zoo", "--format", "csv"))))
    assert [row["name"] for row in rows] == list(ZOO)
    assert '"vit_b_16"' in output_of(capsys, "list", "zoo", "vit*", "--format", "json")
    path = tmp_path / "names.txt"
    output_of(capsys, "list", "zoo", "--output", str(path))
    assert path.read_text().splitlines() == list(ZOO)


def test_without_a_kind_all_are_counted_and_a_missing_library_is_noted(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    rows = {row["kind"]: row for row in csv.DictReader(io.StringIO(output_of(capsys, "list", "--format", "csv")))}
    assert list(rows) == list(LISTS)
    assert rows["zoo"]["names"] == str(len(ZOO))
    advice = "open_clip is not installed: pip install 'fvflops[open_clip]'"
    assert (rows["open_clip"]["names"], rows["open_clip"]["note"]) == ("", advice)
    monkeypatch.setenv("COLUMNS", "60")
    assert advice in " ".join(output_of(capsys, "list").split())


WITHOUT_A_PACKAGE = """
import sys
sys.modules[sys.argv[1]] = None
from fvflops.cli import main
codes = [main(argv) for argv in (["count", "zoo:lenet5"], ["list"])]
sys.exit(codes != [2, 2] or main(["--help"]))
"""


@pytest.mark.parametrize(("module", "package"), [("torch", "torch"), ("yaml", "pyyaml")])
def test_a_required_package_that_is_missing_is_one_line(module, package):
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_PACKAGE, module], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 2 and all(f"run pip install {package}" in line for line in lines)


@pytest.mark.parametrize("argv", [["count", "zoo:lenet5"], ["memory", "zoo:lenet5"], ["list", "zoo"]])
def test_output_minus_is_standard_output(capsys, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert output_of(capsys, *argv, "--output", "-") == output_of(capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_pictures_and_peaks_can_be_piped(capsysbinary, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main(["count", "zoo:lenet5", "--format", "png", "--output", "-"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"\x89PNG")
    assert main(["peak", "--device", "cpu", "--dtype", "fp32", "--seconds", "0.01", "--output", "-"]) == 0
    path = tmp_path / "peaks.yaml"
    path.write_bytes(capsysbinary.readouterr().out)
    assert load_devices(str(path))[0].dtypes() == ("fp32",)


def test_a_missing_folder_is_an_error_before_the_model_is_loaded(capsys, tmp_path):
    path = tmp_path / "no" / "a.txt"
    for option in ("--output", "--trace", "--speedscope", "--flamegraph"):
        assert main(["count", "no_such.py:model", option, str(path)]) == 2
        error = f"{option} {path}: there is no folder {str(path.parent)!r}: create it, or choose another path"
        assert capsys.readouterr().err == f"fvflops: error: {error}\n"
    assert not path.parent.exists()
