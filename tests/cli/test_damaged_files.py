"""Damaged files: none is read as something else, and every error is one line that names the file.

Files that people edit, and other programs' files, have no checksum: a changed number in them is read.
"""

import json
import random
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fvflops import FlopCountAnalysis, find_efficiency, find_network, load_table, zoo
from fvflops.analysis.trace_file import load_trace, save_trace
from fvflops.measure.kernels.profiler_trace import read_document
from fvflops.sources.options import read_settings
from fvflops.sweep import ModelCount
from fvflops.sweep.counted_models import Journal
from fvflops.sweep.joined import read_joined
from fvflops.sweep.result_files import read_rows, write_rows
from tests.support.checkout import ROOT
from tests.support.fuzz.damage import damage

SEEDS = 12
LONG_SEEDS = 150  # for each of seven kinds that are compared with what was written
ROWS = [
    ModelCount(f"timm:m{at}", 1000 * at, 1 << at, 3, 0, None, 5, "aten::x ×2", "real", "float32[1]", seconds=at / 4)
    for at in range(20)
]


def equals(read, written):
    return read == written


def lacks_rows_at_most(read, written):
    """A journal may lack rows, whose models are counted again."""
    return all(written[name] == row for name, row in read.items())


def is_anything(read, written):
    return True


class Kind(NamedTuple):
    read: Callable[[str], Any]
    is_right: Callable[[Any, Any], bool]


KINDS = {
    **{f"rows.{name}": Kind(read_rows, equals) for name in ("csv", "jsonl", "parquet", "sqlite")},
    "rows.csv.journal": Kind(lambda path: Journal(path.removesuffix(".journal")).read(), lacks_rows_at_most),
    "trace.json": Kind(lambda path: load_trace(path).to_json(), equals),
    "trace.json.gz": Kind(lambda path: load_trace(path).to_json(), equals),
    "accuracy.csv": Kind(read_joined, is_anything),
    "accuracy.tsv": Kind(read_joined, is_anything),
    "accuracy.parquet": Kind(read_joined, is_anything),
    "chrome.json": Kind(read_document, is_anything),
    "config.json": Kind(lambda path: read_settings(path, "--config"), is_anything),
    "table.yaml": Kind(load_table, is_anything),
    "efficiency.yaml": Kind(lambda path: find_efficiency("Chip", file=path), is_anything),
    "network.yaml": Kind(lambda path: find_network("Ring", file=path), is_anything),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra `parquet`, is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow, of the extra `parquet`, is not installed")
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("csv", "jsonl", "parquet", "sqlite"):
        write_rows(str(folder / f"rows.{name}"), ROWS)
    with Journal(str(folder / "rows.csv")).open() as append:
        for row in ROWS:
            append(row)
    trace = FlopCountAnalysis(zoo.build("lenet5").eval(), torch.randn(1, 1, 28, 28)).trace()
    for name in ("trace.json", "trace.json.gz"):
        save_trace(trace, str(folder / name))
    columns = {"model": [row.model for row in ROWS], "top1": [70 + at / 10 for at in range(len(ROWS))]}
    parquet.write_table(arrow.table(columns), folder / "accuracy.parquet")
    for name, comma in (("accuracy.csv", ","), ("accuracy.tsv", "\t")):
        lines = (f"{model}{comma}{top1}\n" for model, top1 in zip(*columns.values(), strict=True))
        (folder / name).write_text(f"model{comma}top1\n{''.join(lines)}")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "bert", "num_hidden_layers": 12, "id2label": {"0": "a"}})
    )
    shutil.copy(ROOT / "tests/data/cuda_chrome_trace.json", folder / "chrome.json")
    shutil.copy(ROOT / "configs/fvcore.yaml", folder / "table.yaml")
    efficiency = "efficiencies:\n  Chip:\n    matmul: 0.8\n    of: peaks\n    launch: 2e-6\n    source: me\n"
    (folder / "efficiency.yaml").write_text(efficiency)
    links = "\n".join(f"    {name}: {{bandwidth: 10e9, latency: 1e-6}}" for name in ("inside", "between"))
    network = f"networks:\n  Ring:\n    gpus_per_node: 4\n{links}\n    source: me\n"
    (folder / "network.yaml").write_text(network)
    return folder


def check_damage(folder, name, seeds):
    """Return how many damaged files are refused."""
    kind, data = KINDS[name], (folder / name).read_bytes()
    written, refused = kind.read(str(folder / name)), 0
    for seed in seeds:
        path = folder / f"damaged_{seed}_{name}"  # tables are cached by path
        path.write_bytes(damage(data, random.Random(f"{name} {seed}")))
        try:
            read = kind.read(str(path))
        except (ValueError, OSError) as error:
            message = str(error)
            assert path.name in message and "\n" not in message and len(message) < 1000, (name, seed, message)
            refused += 1
        else:
            assert kind.is_right(read, written), (name, seed)
    return refused


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_by_name_or_read_as_they_were(folder, name):
    assert check_damage(folder, name, range(SEEDS)) >= SEEDS // 4


@pytest.mark.long
def test_a_thousand_damaged_files(folder):
    refused = {name: check_damage(folder, name, range(SEEDS, SEEDS + LONG_SEEDS)) for name in KINDS}
    print(refused)
    assert sum(kind.is_right is not is_anything for kind in KINDS.values()) * LONG_SEEDS > 1000
    assert all(count > LONG_SEEDS // 6 for count in refused.values())


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_file_that_is_cut_anywhere_is_refused(folder, name):
    data = (folder / name).read_bytes()
    path = folder / f"cut_{name}"
    lines = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for end in {*range(0, len(data), 13), *range(len(data) - 60, len(data)), *lines[:-1]}:
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match=f"cut_{name}"):
            read_rows(str(path))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_rows_of_release_1_0_have_no_checksum(folder, name):
    path = folder / f"old_{name}"
    lines = (folder / name).read_text().splitlines()
    if name == "rows.csv":
        old = [line.rpartition(",")[0] for line in lines]
    else:
        old = [
            json.dumps({key: value for key, value in json.loads(line).items() if key != "checksum"}) for line in lines
        ]
    path.write_text("\n".join(old) + "\n")
    assert list(read_rows(str(path)).values()) == sorted(ROWS, key=lambda row: row.model)
    path.write_text("\n".join(old))
    with pytest.raises(ValueError, match=f"old_{name} is truncated: its last line is incomplete"):
        read_rows(str(path))


def test_changed_rows_are_read_without_their_checksum(folder):
    path = folder / "changed.csv"
    text = (folder / "rows.csv").read_text()
    path.write_text(text.replace("timm:m3,3000,8,", "timm:m3,3000,9,"))
    with pytest.raises(ValueError, match="the row of timm:m3 is damaged, its checksum differs"):
        read_rows(str(path))
    path.write_text(
        "".join(line.rpartition(",")[0] + ",\n" for line in text.splitlines()).replace(",\n", ",checksum\n", 1)
    )
    assert read_rows(str(path))["timm:m3"].flops == 8
    path.write_text("\n".join(text.splitlines()[:-2]) + "\n")
    with pytest.raises(ValueError, match="lacks its last rows: restore it, or if you removed rows"):
        read_rows(str(path))


def test_files_of_lines_can_be_joined_and_sorted(folder):
    header, *lines = (folder / "rows.csv").read_text().splitlines(keepends=True)
    path = folder / "sorted.csv"
    path.write_text(header + "".join(reversed(lines)))
    assert len(read_rows(str(path))) == len(ROWS)
    path = folder / "joined.jsonl"
    write_rows(str(path), [ModelCount("zoo:other", seconds=2)])
    path.write_text((folder / "rows.jsonl").read_text() + path.read_text())
    assert len(read_rows(str(path))) == len(ROWS) + 1


def test_a_trace_that_another_program_wrote_again_is_the_same(folder):
    trace = load_trace(folder / "trace.json")
    path = folder / "indented.json"
    record = json.loads((folder / "trace.json").read_text())
    path.write_text(json.dumps(record, indent=2))
    assert load_trace(path).to_json() == trace.to_json()
    record["complete"] = False
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"indented.json: this trace is damaged: its checksum differs"):
        load_trace(path)
    del record["checksum"]
    path.write_text(json.dumps(record))
    assert not load_trace(path).complete


def test_text_that_is_not_utf_8_and_numbers_are_read_as_written(tmp_path):
    rows = [ModelCount("a\rb", seconds=3, error="\udc80 ,\"'\n"), ModelCount("c", flops=1 << 62)]
    for name in ("rows.csv", "rows.jsonl", "rows.parquet", "rows.sqlite"):
        write_rows(str(tmp_path / name), rows)
        assert [row.error for row in read_rows(str(tmp_path / name)).values()] == ["\\udc80 ,\"'\n", ""]
