"""An estimated step as exact data, for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fvflops.plan.step_time.step_estimate import StepEstimate
from fvflops.plan.step_time.step_tables import RankMemory
from fvflops.plan.step_time.training_cost import TrainingCost
from fvflops.trace.run_notes import reads_of


def encode(estimate: StepEstimate, memories: Sequence[RankMemory], cost: TrainingCost | None) -> dict[str, Any]:
    """Return all figures of an estimated step, times in seconds."""
    first = estimate.plans[0]
    fullest = max(range(len(memories)), key=lambda index: memories[index].reserved)
    network = estimate.network
    return {
        "mesh": dict(first.mesh),
        "gpus": estimate.gpus,
        "inputs": first.trace.info.inputs,
        "schedule": first.step.schedule,
        "device": estimate.device.name,
        "device_memory": estimate.device.memory,
        "efficiency": dataclasses.asdict(estimate.efficiency),
        "network": None if network is None else dataclasses.asdict(network),
        "seconds": estimate.seconds,
        "bound_seconds": estimate.bound,
        "samples": estimate.samples,
        "tokens": estimate.tokens,
        "tokens_per_second": estimate.tokens_per_second,
        "samples_per_second": estimate.samples_per_second,
        "model_flops_per_gpu": estimate.model_flops,
        "model_flops_per_second_per_gpu": estimate.model_flops_per_second,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble_share": estimate.bubble_share,
        "exposed_share": estimate.exposed_share,
        "host_bound_share": estimate.host_bound_share,
        "model_parameters": first.model_parameters,
        "slowest": estimate.slowest,
        "fullest": fullest,
        "slowest_rank": {
            "kernels": estimate.kernels,
            "kernels_by_phase": dict(estimate.by_phase),
            "kernels_by_module": dict(estimate.by_module),
            "exposed": dict(estimate.exposed),
            "communication": dict(estimate.communication),
            "launching": estimate.launching,
            "sending": estimate.sending,
            "bubble": estimate.bubble,
            "between": estimate.between,
        },
        "ranks": [
            {
                "rank": memory.plan.rank,
                "coordinates": dict(memory.plan.coordinates),
                "stages": list(memory.plan.step.stages),
                "parameters": memory.plan.parameters,
                "actions": sum(span.end - span.start for span in spans),
                "peak_memory": memory.peak,
                "reserved_memory": memory.reserved,
                "memory_by_kind": memory.by_kind,
            }
            for memory, spans in zip(memories, estimate.simulation.spans, strict=True)
        ],
        "training": None if cost is None else _encode_cost(cost),
        "estimated": list(first.derived),
        "left_out": list(first.left_out),
        "unknown_time": dict(estimate.unknown),
        "time_of_bytes_only": dict(estimate.bytes_only),
        "assumptions": list(estimate.assumptions),
        **reads_of(first.trace.info),
    }


def _encode_cost(cost: TrainingCost) -> dict[str, Any]:
    return {
        "tokens": cost.tokens,
        "steps": cost.steps,
        "seconds": cost.seconds,
        "days": cost.days,
        "gpu_hours": cost.gpu_hours,
        "price_per_gpu_hour": cost.price,
        "cost": cost.cost,
        "watts_per_gpu": cost.watts,
        "energy_kwh": cost.energy,
    }
