"""Chrome traces as torch.profiler writes them on GPUs, laid out from a list of work: ops, collectives and host gaps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COMPUTE = 7  # stream of kernels; collectives have streams of their own
_PROCESS, _MAIN, _AUTOGRAD = 4242, 4242, 4300
_ORIGIN = 1_365_627_862_757.0  # µs
_LATENCY = 3e-6  # from the call of the launch to the start of the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op of the host and the kernels that it launches, as (name, seconds); `launch` is the time of the host."""

    op: str
    kernels: tuple[tuple[str, float], ...] = ()
    dims: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    phase: str = "forward"
    module: str = ""
    launch: float = 6e-6
    category: str = "kernel"
    nbytes: int = 0
    sync: str = ""  # runtime call at its end that waits for the GPU
    inner: str = ""  # op inside that launches
    around: tuple[str, ...] = ()  # user annotations or Python frames around it

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.kernels)

    def slower(self, factor: float) -> Op:
        return replace(self, kernels=tuple((name, seconds * factor) for name, seconds in self.kernels))

    def with_kernels(self, *kernels: tuple[str, float], **changes: Any) -> Op:
        return replace(self, kernels=kernels, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective on its group's stream; it starts after kernels launched before, or after the wait for `gate`."""

    number: int
    collective: str
    seconds: float
    elements: int
    dtype: str = "BFloat16"
    group: str = "fsdp"
    size: int = 8
    phase: str = "forward"
    module: str = ""
    gate: int | None = None
    after: int | None = None
    launch: float = 20e-6


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream waits for a collective."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Work of the host without launches: an annotation, a Python frame or an op by its category."""

    name: str
    seconds: float
    category: str = "user_annotation"
    inner: str = ""  # runtime call inside, over all of it
    phase: str = "forward"


@dataclass(frozen=True, slots=True)
class Sync:
    """A call of the runtime in which the host waits for the GPU."""

    call: str = "cudaDeviceSynchronize"


Work = Op | Collective | Wait | Gap | Sync
# Collective → how its NCCL kernels and torch's arguments name it.
_NCCL = {
    "all_gather": ("AllGather_RING_LL", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter_Sum_bf16_RING_LL", "_reduce_scatter_base"),
    "all_reduce": ("AllReduce_Sum_bf16_RING_LL", "allreduce"),
    "all_to_all": ("SendRecv", "all_to_allv"),
    "broadcast": ("Broadcast_RING_LL", "broadcast"),
    "send": ("SendRecv", "send"),
    "recv": ("SendRecv", "recv"),
}


@dataclass(slots=True)
class _Layout:
    """Clocks of the host and the streams, and the events so far; times in seconds."""

    rank: int
    modules: Mapping[str, str]
    sequences: dict[str, int] = field(default_factory=dict)  # module → number of a forward op, for its backward pass
    host: float = 0.0
    streams: dict[int, float] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    waited: dict[int, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    identifier: int = 1

    def add(self, category: str, name: str, start: float, end: float, thread: Any, **args: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": self.rank if category in _OF_GPU else _PROCESS,
                "tid": thread,
                "ts": round(_ORIGIN + 1e6 * start, 3),
                "dur": round(1e6 * (end - start), 3),
                "args": args,
            }
        )

    def next(self) -> int:
        self.identifier += 1
        return self.identifier

    def run(self, work: Work) -> None:
        if isinstance(work, Op):
            self._op(work)
        elif isinstance(work, Collective):
            self._collective(work)
        elif isinstance(work, Wait):
            self.streams[COMPUTE] = max(self.streams.get(COMPUTE, 0.0), self.ends[work.number])
            self.waited[work.number] = self.streams[COMPUTE]
        elif isinstance(work, Sync):
            self.wait(work.call, _MAIN)
        else:
            start, self.host = self.host, self.host + work.seconds
            thread = _AUTOGRAD if work.phase == "backward" else _MAIN
            args = {"Python id": self.next()} if work.category == "python_function" else {"External id": self.next()}
            self.add(work.category, work.name, start, self.host, thread, **args)
            if work.inner:
                self.add("cuda_runtime", work.inner, start + 1e-6, self.host - 1e-6, thread, correlation=self.next())

    def wait(self, call: str, thread: int) -> None:
        start = self.host + 1e-6
        self.host = max(start + 2e-6, *self.streams.values()) + 2e-6
        self.add("cuda_runtime", call, start, self.host, thread, cbid=165, correlation=self.next())
        self.host += 1e-6

    def _op(self, work: Op) -> None:
        start, number = self.host, self.next()
        thread = _AUTOGRAD if work.phase in ("backward", "recompute") else _MAIN
        each = work.launch / max(len(work.kernels), 1)
        for name, seconds in work.kernels:
            self._kernel(work, name, seconds, number, thread, self.host + 0.3 * each, 0.6 * each)
            self.host += each
        if not work.kernels:
            self.host += work.launch
        if work.sync:
            self.wait(work.sync, thread)
        end = self.host
        args = {"Input Dims": list(map(list, work.dims)), "Input type": list(work.types)}
        args = args if work.dims else {}
        module = self.modules.get(work.module)
        if work.phase == "forward" and module is not None:
            self.add("python_function", f"nn.Module: {module}", start, end, thread)
            self.sequences[module] = args["Sequence number"] = number
        self.add("cpu_op", work.op, start + 2e-7, end - 2e-7, thread, **{"External id": number, **args})
        if work.inner:
            self.add("cpu_op", work.inner, start + 3e-7, end - 3e-7, thread, **{"External id": self.next()})
        for name in work.around:
            category = "python_function" if "(" in name or name.startswith("<") else "user_annotation"
            self.add(category, name, start, end, thread)
        if work.phase == "backward" and not work.around:
            name = f"autograd::engine::evaluate_function: {work.op.rpartition('::')[2].strip('_').title()}Backward0"
            self.add(
                "cpu_op",
                name,
                start,
                end,
                thread,
                **{"External id": self.next(), "Sequence number": self.sequences.get(module or "", number)},
            )
        elif work.phase == "recompute":
            name = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
            self.add("cpu_op", name, start, end, thread, **{"External id": self.next()})
            self.add("python_function", f"nn.Module: {module or work.module + '_0'}", start + 1e-7, end - 1e-7, thread)
        elif work.phase == "optimizer" and not work.around:
            self.add("user_annotation", "Optimizer.step#AdamW.step", start, end, thread)

    def _kernel(self, work, name, seconds, number, thread, called, calling):
        correlation = self.next()
        is_copy = work.category == "gpu_memcpy"
        call = "cudaMemcpyAsync" if is_copy else "cudaMemsetAsync" if "set" in work.category else "cudaLaunchKernel"
        self.add(
            "cuda_runtime", call, called, called + calling, thread, **{"External id": number, **_corr(correlation)}
        )
        begin = max(self.streams.get(COMPUTE, 0.0), called + _LATENCY)
        self.streams[COMPUTE] = begin + seconds
        args = {"External id": number, "device": self.rank, "context": 1, "stream": COMPUTE, **_corr(correlation)}
        if work.nbytes:
            args |= {"bytes": work.nbytes}
        self.add(work.category, name, begin, begin + seconds, COMPUTE, **args)

    def _collective(self, work: Collective) -> None:
        stream = self.groups.setdefault(work.group, 20 + 4 * len(self.groups))
        start, number, correlation = self.host, self.next(), self.next()
        called = start + 0.5 * work.launch
        self.host += work.launch
        kernel, name = _NCCL[work.collective]
        if work.after is not None:
            ready = self.ends[work.after]
        else:
            ready = self.streams.get(COMPUTE, 0.0) if work.gate is None else self.waited.get(work.gate, 0.0)
        begin = max(ready, called + _LATENCY, self.streams.get(stream, 0.0))
        self.streams[stream] = self.ends[work.number] = begin + work.seconds
        given = {"External id": number, "Collective name": name, "dtype": work.dtype, "Group size": work.size}
        share = work.elements // work.size
        inside = share if work.collective == "all_gather" else work.elements
        outside = share if work.collective == "reduce_scatter" else work.elements
        given |= {"In msg nelems": inside, "Out msg nelems": outside}
        given |= {"Process Group Name": work.group, "Process Group Description": work.group}
        thread = _AUTOGRAD if work.phase == "backward" else _MAIN
        op = {"External id": self.next(), "Input Dims": [[inside]], "Input type": ["c10::BFloat16"]}
        self.add("cpu_op", f"c10d::{name}_", start + 1e-7, self.host - 1e-7, thread, **op)
        self.add("cpu_op", "record_param_comms", start + 2e-7, self.host - 2e-7, thread, **given)
        self.add("cuda_runtime", "cudaLaunchKernelExC", called, called + 4e-6, thread, **_corr(correlation))
        given |= {"device": self.rank, "context": 1, "stream": stream, **_corr(correlation)}
        full = f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)"
        self.add("kernel", full, begin, begin + work.seconds, stream, **given)


_OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
GPUS = {
    "H100": {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936, "computeMajor": 9, "numSms": 132},
    "A100": {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85095874560, "computeMajor": 8, "numSms": 108},
}


def _corr(number: int) -> dict[str, int]:
    return {"correlation": number}


def lay_out(work, *, steps=2, rank=0, world=1, gpu="H100", modules=None):
    """Return a trace of some equal steps; after each the host reads the loss, so that it waits for the GPU.

    `modules` are the names that stacks give to modules.
    """
    layout = _Layout(rank, modules or {}, streams={COMPUTE: 0.0})
    for step in range(1, steps + 1):
        start = layout.host
        for item in work:
            layout.run(item)
        loss = Op(op="aten::item", inner="aten::_local_scalar_dense", category="gpu_memcpy", nbytes=4)
        copied = ("Memcpy DtoH (Device -> Pageable)", 1.5e-6)
        layout.run(loss.with_kernels(copied, sync="cudaStreamSynchronize"))
        layout.add("user_annotation", f"ProfilerStep#{step}", start - 1e-6, layout.host, _MAIN, **{"External id": 1})
        layout.host += 5e-6
    return {
        "schemaVersion": 1,
        "deviceProperties": [GPUS[gpu]],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world} if world > 1 else {},
        "record_shapes": 1,
        "with_stack": 0,
        "traceEvents": layout.events,
    }


def write(trace: dict[str, Any], path: Path) -> str:
    path.write_text(json.dumps(trace))
    return str(path)
