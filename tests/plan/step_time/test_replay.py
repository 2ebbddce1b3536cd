"""A rank's host, compute stream and communication streams: what overlaps, and what waits for what."""

from dataclasses import replace

from fvflops.devices.devices import Device
from fvflops.plan.communication import CollectiveCall
from fvflops.plan.rank_step import Action
from fvflops.plan.step_time.calibration import PEAK, KernelTimer, Link, Network
from fvflops.plan.step_time.kernel_times import Kernel
from fvflops.plan.step_time.pass_program import Collective, Launch, Program, Run, Wait
from fvflops.plan.step_time.schedule_simulation import Clocks, simulate, time_program
from fvflops.trace.process_group import ProcessGroupSpec

DEVICE = Device("unit", matrix={"bf16": 1.0}, bandwidth=1.0)
NETWORK = Network(name="unit", gpus_per_node=2, inside=Link(1.0, 0.0), between=Link(1.0, 0.0))
# A kernel of 10 s in the forward pass.
LAUNCH = Launch(Kernel("memory", 0, 10, "bfloat16"), "forward", "", "op")


def collective(number, seconds, *, axis="fsdp", gate=None):
    """Return an all-gather of two ranks, which takes half its payload."""
    call = CollectiveCall("all_gather", ProcessGroupSpec(axis, 2, axis, 0, 1), "bfloat16", 2 * seconds, None)
    return Collective(number, call, "forward", "", gate)


def replay(*items, network=NETWORK, **efficiency):
    timer = KernelTimer(DEVICE, replace(PEAK, **efficiency))
    clocks = Clocks(log=[])
    time_program(Program(items, (LAUNCH,)), timer, network).replay(clocks)
    return clocks


RUN = Run((0,))


def test_a_collective_beside_a_kernel_is_hidden_and_the_rest_exposed():
    assert replay(collective(0, 4), RUN, Wait(0), RUN).compute == 20
    clocks = replay(collective(0, 13), RUN, Wait(0), RUN)
    assert (clocks.compute, clocks.exposed, clocks.busy) == (23, {"fsdp=2": 3}, {"fsdp=2": 13})
    assert clocks.log == [("fsdp=2", 0, 13)]


def test_a_collective_sends_what_kernels_before_it_have_written():
    clocks = replay(RUN, collective(0, 4), Wait(0), RUN)
    assert (clocks.compute, clocks.exposed) == (24, {"fsdp=2": 4})


def test_collectives_of_one_group_queue_and_those_of_two_overlap():
    assert replay(collective(0, 4), collective(1, 4), Wait(1)).compute == 8
    assert replay(collective(0, 4), collective(1, 4, axis="tp"), Wait(0), Wait(1)).compute == 4


def test_a_prefetched_gather_starts_when_the_one_before_it_was_waited_for():
    # The kernel of the first module begins at 4; the second gather runs beside it, from 4 to 8.
    clocks = replay(collective(0, 4, gate=-1), Wait(0), RUN, collective(1, 4, gate=0), Wait(1), RUN)
    assert clocks.log == [("fsdp=2", 0, 4), ("fsdp=2", 4, 8)]
    assert (clocks.compute, clocks.exposed) == (24, {"fsdp=2": 4})


def test_a_stage_waits_for_its_own_gathers_which_began_with_the_stage_before():
    # Parameters of stage 0 are gathered from 0 to 4, of stage 1 from 4 to 10, beside stage 0's kernel.
    timer, group = KernelTimer(DEVICE, PEAK), collective(0, 4).call.group
    gathers = [(Action("all_gather", stage), (collective(0, seconds),)) for stage, seconds in enumerate((4, 6))]
    passes = [(Action("forward", stage, 0), (Wait(0, group), RUN)) for stage in range(2)]
    timed = [(action, time_program(Program(items, (LAUNCH,)), timer, NETWORK)) for action, items in (*gathers, *passes)]
    simulation = simulate([timed], lambda sender, receiver: 0.0, stages=2)
    assert [span[3:5] for span in simulation.spans[0][2:]] == [(0, 14), (14, 24)]
    assert simulation.clocks[0].exposed == {"fsdp=2": 4}


def test_a_collective_that_nothing_waits_for_prolongs_the_step():
    clocks = replay(RUN, collective(0, 4))
    assert (clocks.compute, clocks.end()) == (10, 14)


def test_short_kernels_wait_for_the_host():
    clocks = replay(RUN, RUN, launch=15.0)
    assert (clocks.compute, clocks.starved, clocks.host) == (15 + 15 + 10, 20, 30)
    assert replay(RUN, RUN, RUN, launch=1.0).compute == 31  # of which the first launch alone is seen
