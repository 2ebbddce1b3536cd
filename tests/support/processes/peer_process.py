"""Run peers that patch torch in a process of their own: write what they say of models as JSON."""

import json
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import einops
import torch
from torch import nn

from tests.support.models.peer_cases import build
from tests.support.peer_counts import count_by
from tests.support.processes.start import FORKS

# What a peer says of one model: its numbers by name, or the error that it raises.
Numbers = dict[str, int] | str


def run_peers(names: Mapping[str, Sequence[str]], folder: Path) -> dict[str, dict[str, Numbers]]:
    """Return what each peer says of the models of `peer_cases.build` by name, asked in a process of their own.

    Meanwhile this process counts them by the tables of the same names.
    """
    path = folder / "numbers.json"
    process = FORKS.Process(target=write_numbers, args=(names, path))
    process.start()
    for peer in names:
        for name in names[peer]:
            count_by(peer, name)
    process.join()
    assert process.exitcode == 0
    return json.loads(path.read_text())


def ask_deepspeed(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, int]:
    from deepspeed.profiling.flops_profiler import get_model_profile

    flops, macs, parameters = get_model_profile(model, args=[*inputs], print_profile=False, as_string=False, warm_up=0)
    return {"flops": flops, "macs": macs, "parameters": parameters}


def ask_calflops(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, int]:
    from calflops import calculate_flops

    flops, macs, parameters = calculate_flops(model, args=[*inputs], print_results=False, output_as_string=False)
    return {"flops": flops, "macs": macs, "parameters": parameters}


def ask_torch_flops(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, int]:
    from torch_flops import TorchFLOPsByFX

    # Its other way of asking for memory needs a GPU.
    counter = TorchFLOPsByFX(model, mem_func_name="memory_allocated")
    counter.propagate(*inputs)
    return {"flops": counter.print_total_flops(show=False)}


PEERS = {"deepspeed": ask_deepspeed, "calflops": ask_calflops, "torch_flops": ask_torch_flops}


@contextmanager
def _unpatched():
    """Put back what a peer has put in the place of torch's functions, so that it does not patch its own patches."""
    spaces = (torch, nn.functional, torch.Tensor, einops)
    before = [dict(vars(space)) for space in spaces]
    try:
        yield
    finally:
        for space, names in zip(spaces, before, strict=True):
            for name, value in names.items():
                if vars(space).get(name) is not value:
                    setattr(space, name, value)
        for name in vars(torch.Tensor).keys() - before[2].keys():
            delattr(torch.Tensor, name)


def _ask(peer: str, name: str) -> Numbers:
    model, inputs = build(name)
    with _unpatched(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            return PEERS[peer](model, inputs)
        except Exception as error:  # the caller says which errors it expects
            return f"{type(error).__name__}: {error}"


def write_numbers(names: Mapping[str, Sequence[str]], path: Path) -> None:
    torch.set_num_threads(1)
    path.write_text(json.dumps({peer: {name: _ask(peer, name) for name in names[peer]} for peer in names}))
