"""A rank's host and streams: what overlaps and what waits for what; simulated pipelines against theory."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest

from fvflops.devices.devices import Device
from fvflops.plan.communication import CollectiveCall
from fvflops.plan.pipeline_schedules import ScheduleError, order_actions, rank_of_stage
from fvflops.plan.rank_step import Action
from fvflops.plan.step_time.calibration import PEAK, KernelTimer, Link, Network
from fvflops.plan.step_time.kernel_times import Kernel
from fvflops.plan.step_time.pass_program import Collective, Launch, Program, Run, Wait
from fvflops.plan.step_time.schedule_simulation import Clocks, simulate, time_program
from fvflops.plan.step_time.step_estimate import StepEstimate
from fvflops.plan.step_time.step_program import StepProgram
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


# A byte takes a second.

FREE = Network(name="free", gpus_per_node=1, inside=Link(1.0, 0.0), between=Link(1.0, 0.0))
# 1 s a link: the time of a send.
SLOW = Network(name="slow", gpus_per_node=1, inside=Link(1.0, 1.0), between=Link(1.0, 1.0))
FORWARD, BACKWARD = 4, 8  # divisible by stages per rank


def program(seconds):
    launch = Launch(Kernel("memory", 0, seconds, "bfloat16"), "forward", "", "op")
    return Program((Run((0,)),), (launch,)) if seconds else Program((), ())


def run(schedule, ranks, microbatches, stages_per_rank=1, network=FREE):
    """Return the simulation, in which all stages of a rank together take FORWARD and BACKWARD for a microbatch."""
    seconds = {
        "forward": FORWARD // stages_per_rank,
        "backward": BACKWARD // stages_per_rank,
        "input_backward": BACKWARD // stages_per_rank // 2,
        "weight_backward": BACKWARD // stages_per_rank // 2,
    }
    kinds = {kind: index for index, kind in enumerate(seconds, start=1)}
    orders = order_actions(schedule, ranks, microbatches, stages_per_rank)
    stages = ranks * stages_per_rank
    step = StepProgram(
        tuple(tuple((action, kinds.get(action.kind, 0)) for action in order) for order in orders),
        (program(0), *map(program, seconds.values())),
        {stage: rank_of_stage(schedule, stage, ranks) for stage in range(stages)},
        dict.fromkeys(range(stages), 0),
    )
    return step.simulate(KernelTimer(DEVICE, PEAK), network)


def bubble_share(simulation):
    return StepEstimate.bubble_share.fget(SimpleNamespace(simulation=simulation))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 8), (8, 5)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_of_1f1b_and_gpipe(schedule, ranks, microbatches):
    simulation = run(schedule, ranks, microbatches)
    assert simulation.seconds == (microbatches + ranks - 1) * (FORWARD + BACKWARD)
    assert bubble_share(simulation) == pytest.approx(float(Fraction(ranks - 1, microbatches + ranks - 1)), abs=1e-12)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_the_bubble_of_interleaved_stages(ranks, microbatches, chunks):
    simulation = run("interleaved", ranks, microbatches, chunks)
    bubble = Fraction((ranks - 1) * (FORWARD + BACKWARD), chunks)
    assert simulation.seconds == microbatches * (FORWARD + BACKWARD) + bubble


def test_zero_bubble_schedules_wait_less_than_1f1b():
    plain = run("1f1b", 4, 8).seconds
    assert run("zbv", 4, 8, 2).seconds < run("interleaved", 4, 8, 2).seconds < plain
    work = 8 * (FORWARD + BACKWARD)
    assert run("zbv", 4, 8, 2).seconds >= work


def test_a_send_delays_the_receiver_and_occupies_the_sender():
    simulation = run("gpipe", 2, 1, network=SLOW)
    (forward, backward), (other_forward, other_backward) = (spans[:2] for spans in simulation.spans)
    assert other_forward.start == forward.end + 1
    assert backward.start == other_backward.end + 1 == 2 * (FORWARD + 1) + BACKWARD
    assert simulation.clocks[0].idle == backward.start - (forward.end + 1)


def test_ranks_that_wait_for_each_other_are_an_error():
    orders = ((Action("backward", 0, 0), Action("forward", 0, 0)), (Action("forward", 1, 0), Action("backward", 1, 0)))
    step = StepProgram(
        tuple(tuple((action, 0) for action in order) for order in orders), (program(0),), {0: 0, 1: 1}, {0: 0, 1: 0}
    )
    with pytest.raises(ScheduleError, match="rank 0 waits forever for the input of backward of stage 0, microbatch 0"):
        step.simulate(KernelTimer(DEVICE, PEAK), FREE)
    with pytest.raises(ValueError, match="hidden states over a network"):
        run("1f1b", 2, 1, network=None)


def test_ranks_that_send_shares_gather_them():
    step = StepProgram((), (), {0: 0, 1: 8, 2: 8}, {0: 801, 1: 8, 2: 0})
    link = ProcessGroupSpec("", 2, "pp", 0, 8)
    assert step.messages(0, 1) == step.messages(1, 0) == (("send", 801, link),)
    assert step.messages(1, 2) == ()  # on one rank
    group = ProcessGroupSpec("", 8, "tp", 0, 1)
    assert replace(step, scattered=group).messages(0, 1) == (("send", 101, link), ("all_gather", 801, group))
