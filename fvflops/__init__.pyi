"""Public names, each with the module from which it is imported on first use."""

from fvflops.analysis import ActivationCountAnalysis as ActivationCountAnalysis
from fvflops.analysis import FlopCountAnalysis as FlopCountAnalysis
from fvflops.analysis import ModelAnalysis as ModelAnalysis
from fvflops.analysis import TrainingStepAnalysis as TrainingStepAnalysis
from fvflops.analysis import activation_count as activation_count
from fvflops.analysis import flop_count as flop_count
from fvflops.analysis import flop_count_str as flop_count_str
from fvflops.analysis import flop_count_table as flop_count_table
from fvflops.analysis import parameter_count as parameter_count
from fvflops.analysis import parameter_count_table as parameter_count_table
from fvflops.analysis import record as record
from fvflops.analysis import schedule as schedule
from fvflops.analysis import summarise as summarise
from fvflops.analysis.byte_counts import ByteCountAnalysis as ByteCountAnalysis
from fvflops.capture.run import record_call as record_call
from fvflops.features.communication.compute import read_communication as read_communication
from fvflops.features.communication.ranks import gather as gather
from fvflops.features.conventions.compare import compare as compare
from fvflops.features.deepspeed.flops_profiler import FlopsProfiler as FlopsProfiler
from fvflops.features.deepspeed.flops_profiler import get_model_profile as get_model_profile
from fvflops.features.diff.diff import diff as diff
from fvflops.features.diff.model import ModelDifference as ModelDifference
from fvflops.features.generation.generation import generation_cost as generation_cost
from fvflops.features.kernels.kernel_profile import KernelProfile as KernelProfile
from fvflops.features.kernels.kernel_profile import profile_kernels as profile_kernels
from fvflops.features.memory.compute import MemoryMoment as MemoryMoment
from fvflops.features.memory.compute import MemoryTimeline as MemoryTimeline
from fvflops.features.memory.memory import predict_memory as predict_memory
from fvflops.features.parameters.model import ParameterCount as ParameterCount
from fvflops.features.parameters.parameters import parameter_summary as parameter_summary
from fvflops.features.parameters.parameters import parameter_summary_table as parameter_summary_table
from fvflops.features.planning.plan import plan_rank as plan_rank
from fvflops.features.profiling.profile import ProfileAnalysis as ProfileAnalysis
from fvflops.features.roofline.compute import roofline as roofline
from fvflops.features.scaling.scaling import cost_of as cost_of
from fvflops.features.step_meter.meter import StepMeter as StepMeter
from fvflops.features.step_meter.model import MeterSummary as MeterSummary
from fvflops.features.step_meter.model import StepFigures as StepFigures
from fvflops.features.utilisation.compute import UtilisationError as UtilisationError
from fvflops.features.utilisation.compute import hfu as hfu
from fvflops.features.utilisation.compute import mfu as mfu
from fvflops.features.utilisation.devices import Device as Device
from fvflops.features.utilisation.devices import find_device as find_device
from fvflops.features.utilisation.model_flops import model_flops as model_flops
from fvflops.formulas import Call as Call
from fvflops.formulas import Cost as Cost
from fvflops.formulas import FormulaTable as FormulaTable
from fvflops.formulas import load_table as load_table
from fvflops.formulas import register_formula as register_formula
from fvflops.trace import Counts as Counts
from fvflops.trace import StopsAt as StopsAt
from fvflops.trace import Summary as Summary
from fvflops.trace import Trace as Trace

JitModelAnalysis = ModelAnalysis
__version__: str
