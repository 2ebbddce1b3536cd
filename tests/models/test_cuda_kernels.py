"""Kernels chosen for CUDA without a GPU, beside a recording on an H100."""

import csv
import gzip
import json
from collections import Counter

import pytest
import torch

from fvflops.capture.shapes.cuda_kernels import choose_attention_kernel
from tests.support.checkout import DATA
from tests.support.cuda_cases import list_cases
from tests.support.cuda_cases.runs import run_all_ways

RECORDED = json.loads(gzip.decompress((DATA / "cuda_ops.json.gz").read_bytes()))
HERE = torch.cuda.is_available()


@pytest.mark.parametrize(
    ("column", "capability", "prefers_cudnn"),
    [
        ("cudnn_first", (9, 0), True),
        ("cudnn_first", (10, 0), True),
        ("flash_first", (9, 0), False),
        ("flash_first", (8, 0), True),
    ],
)
def test_attention_kernel_is_the_one_that_an_h100_chose(column, capability, prefers_cudnn, monkeypatch):
    monkeypatch.setattr("fvflops.capture.shapes.cuda_kernels._TORCH_PREFERS_CUDNN", prefers_cudnn)
    wrong = Counter()
    with gzip.open(DATA / "attention_kernels_h100.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            dtype, grouped = getattr(torch, row["dtype"]), row["grouped"] == "1"
            heads = 2 if grouped else 4
            shapes = [(4, row["length"], row["head_dim"]), (heads, row["key_length"], row["head_dim"])]
            shapes.append((heads, row["key_length"], row["value_dim"]))
            q, k, v = (torch.empty(2, *map(int, shape), dtype=dtype, device="meta") for shape in shapes)
            mask = None
            if row["mask"] not in ("none", "causal"):
                mask = torch.empty(q.shape[2], k.shape[2], dtype=dtype, device="meta")
                mask.requires_grad_(row["mask"] == "float_grad")
            chosen = choose_attention_kernel(
                *(q, k, v, mask, float(row["dropout"]), row["mask"] == "causal"), grouped=grouped, capability=capability
            )
            wrong[chosen, row[column]] += chosen != row[column]
    assert sum(wrong.values()) == 0 and wrong.keys() >= {(kernel, kernel) for kernel in ("flash", "efficient", "math")}


def test_older_gpus_run_what_they_support():
    def choose(capability, dtype=torch.float16, dim=64, train=False, dropout=0.0):
        q = torch.empty(1, 2, 8, dim, dtype=dtype, device="meta", requires_grad=train)
        return choose_attention_kernel(q, q, q, None, dropout, False, grouped=False, capability=capability)

    assert choose((7, 5)) == choose((7, 5), torch.float32) == "efficient"
    assert choose((7, 5), torch.bfloat16) == "math"
    assert choose((8, 6)) == choose((8, 6), dim=256, train=True) == "flash"
    assert choose((8, 6), dim=208, train=True) == choose((12, 0), dim=256, train=True, dropout=0.1) == "efficient"
    assert choose((8, 0), dim=208, train=True) == "flash"


# What shape execution without a GPU raises: case → part of the error.
RAISES = {
    "others: fft half": "Unsupported dtype Half",  # torch's meta kernel
    "others: sparse mm": "reads a tensor's memory",
    "others: item": "data-dependent",
    "others: nonzero": "data-dependent",
}
# Zero-FLOP ops that differ: reason → cases.
OTHER_ZERO_FLOP_OPS = {
    "torch 2.13 reshapes otherwise than 2.11": (
        "attention: MultiheadAttention",
        "attention: TransformerEncoderLayer eval",
        "attention: TransformerEncoderLayer train",
        "attention: TransformerEncoder bf16 eval",
        "convolution: checkpoint",
        "others: sort",
        "others: topk",
        "others: median",
    ),
    "cuDNN's weights are flattened, its random state is kept": (
        *(f"recurrence: {name}" for name in ("LSTM", "GRU", "RNN", "GRU no bias")),
        *(f"recurrence: LSTM {kind}" for kind in ("bidirectional", "projected", "dropout", "half", "packed")),
        "others: autocast bf16 LSTM",
    ),
    "CUDA's group_norm copies": ("convolution: group_norm channels_last",),
    "an output saved by an op's own node is detached": ("convolution: rms_norm", "convolution: rms_norm bf16"),
    "checks of values on the CPU": ("others: one_hot", "others: ctc_loss native"),
    "the device of a tensor is read": ("attention: flex_attention eager", "attention: flex_attention compiled"),
    "copies between the CPU and the GPU, pinned memory": ("others: to cpu and back", "others: pin_memory"),
}
FREE = {case: reason for reason, cases in OTHER_ZERO_FLOP_OPS.items() for case in cases}


# Forward passes that no GPU has recorded, since default and exact decompose other ops: the next recording has them.
UNRECORDED = {
    f"others: {name}, forward"
    for name in (
        *("dropout2d", "alpha_dropout", "rrelu", "cross_entropy", "nll_loss2d", "ctc_loss native"),
        *("embedding_bag sum", "embedding_bag mean", "embedding_bag max"),
    )
}


@pytest.mark.skipif(HERE, reason="says what is counted where there is no CUDA device")
@pytest.mark.parametrize(("name", "make"), list(list_cases()), ids=[name for name, _ in list_cases()])
def test_ops_and_counts_without_a_gpu_are_those_recorded_on_an_h100(name, make):
    torch.manual_seed(0)
    case = make()
    for train in case.train:
        variant = f"{name}, {'training' if train else 'forward'}"
        if variant in UNRECORDED:
            assert variant not in RECORDED
            continue
        recorded = RECORDED[variant]
        with case.context():
            if name in RAISES:
                assert RAISES[name] in run_all_ways(case.model, case.args, {}, train=train)["without"]["error"]
                continue
            counted = run_all_ways(case.model, case.args, {}, train=train)["without"]
        assert "error" not in counted, counted
        assert {key: counted[key] for key in ("flops", "macs", "exact")} == {
            key: recorded[key] for key in ("flops", "macs", "exact")
        }
        if name not in FREE:
            assert counted["ops"] == recorded["ops"]
