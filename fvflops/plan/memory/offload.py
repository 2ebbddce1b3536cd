"""Memory of a training step whose optimizer, gradients or activations are kept on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.text import suggest
from fvflops.trace import Event, tensors_in
from fvflops.units import format_bytes

# Offload → its method.
OFFLOADS: Mapping[str, str] = {
    "optimizer": "the optimizer runs on the host, where its state and master weights are (ZeRO-Offload)",
    "gradients": "with the optimizer: each gradient is sent to the host when it is accumulated (ZeRO-Offload)",
    "activations": "saved activations are on the host until the backward pass reads them (cpu_checkpointing, "
    "save_on_cpu)",
}
_BACKWARD = ("backward", "recompute")


def check_offload(offload: Collection[str]) -> None:
    """Raise ValueError for an unknown name, and for gradients without the optimizer that reads them."""
    for name in offload:
        if name not in OFFLOADS:
            raise ValueError(f"nothing is offloaded as {name!r}{suggest(name, OFFLOADS)}: {', '.join(OFFLOADS)}")
    if "gradients" in offload and "optimizer" not in offload:
        raise ValueError("gradients are offloaded with the optimizer, which reads them: name it too")


def offloaded(timeline: MemoryTimeline, offload: Collection[str]) -> MemoryTimeline:
    """Return the timeline of the device, with offloaded tensors only while ops use them: transfers take no time."""
    check_offload(offload)
    if not offload:
        return timeline
    blocks = list(timeline.blocks)
    if "activations" in offload:
        uses = _list_uses(timeline)
        blocks = [part for block in blocks for part in _without_wait(block, timeline.trace.events or (), uses)]
    if "gradients" in offload:
        blocks = [_sent(block) for block in blocks]
    if "optimizer" in offload:
        events = timeline.trace.events or ()
        blocks = [block for block in blocks if block.begin < 0 or events[block.begin].phase != "optimizer"]
        blocks = [block for block in blocks if block.kind != "optimizer state"]
    return replace(timeline, blocks=tuple(blocks))


def describe_offload(timeline: MemoryTimeline, offload: Collection[str]) -> Iterator[str]:
    """Yield how much of a timeline, of a step without offload, is on the host instead, and the excluded costs."""
    check_offload(offload)
    if "optimizer" in offload:
        state = sum(block.nbytes for block in timeline.blocks if block.kind == "optimizer state" and block.end is None)
        yield f"On the host: {format_bytes(state)} of optimizer state"
    if "gradients" in offload:
        yield f"On the host: {format_bytes(host_gradients(timeline))} of gradients, in float32"
    if offload:
        yield "Not included: the time of transfers to the host and back, and of the optimizer's step there"


def host_gradients(timeline: MemoryTimeline) -> int:
    """Return the bytes of gradients on the host: in float32, as ZeRO-Offload has them."""
    sizes: dict[int | None, int] = {}
    for event in timeline.trace.events or ():
        if event.kind == "op" and event.phase == "backward":
            specs = tensors_in(timeline.trace.signatures[event.item].outputs)
            for storage, spec in zip(event.writes, specs, strict=False):  # a view of it may be smaller
                sizes[storage] = max(sizes.get(storage, 0), spec.numel)
    kept = (block for block in timeline.blocks if block.kind == "gradient" and block.end is None)
    return sum(4 * sizes[block.storage] if block.storage in sizes else block.nbytes for block in kept)


def _sent(block: Block) -> Block:
    """Return a block, of an accumulated gradient freed after the op that makes it."""
    is_accumulated = block.kind == "gradient" and block.end is None and block.begin >= 0
    return block._replace(end=block.begin + 1) if is_accumulated else block


def _list_uses(timeline: MemoryTimeline) -> dict[int | None, list[int]]:
    uses: dict[int | None, list[int]] = {}
    for index, event in enumerate(timeline.trace.events or ()):
        for storage in {*event.reads, *event.writes} if event.kind == "op" else ():
            uses.setdefault(storage, []).append(index)
    return uses


def _without_wait(block: Block, events: Sequence[Event], uses: Mapping[int | None, list[int]]) -> Iterator[Block]:
    """Yield a block, of an activation without the time from its last op in the forward pass to its first after that."""
    end = len(events) if block.end is None else block.end
    within = [index for index in uses.get(block.storage, ()) if block.begin <= index < end]
    first = next((index for index in within if events[index].phase in _BACKWARD), end)
    last = max((index for index in within if index < first), default=block.begin)
    if block.kind != "activation" or block.storage is None or block.begin < 0 or first - last <= 1:
        yield block
        return
    yield block._replace(end=last + 1)
    if first < end:
        yield block._replace(begin=first)
