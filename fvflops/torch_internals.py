"""The private names of torch that fvflops uses, each resolved on first use, under a public name.

    from fvflops.torch_internals import current_autograd_node

Not part of `capture`: formulas, features and commands need such names too, and formulas may not import from capture.
torch is imported with the first name, and the module of a name (triton's wrapper, the fake process group) with that
name. `from ... import` binds the value, so that hot paths have no lookup.

If torch no longer has a name, its use raises MissingInternal, which names the lost feature; everything else works. A
function that should be wrapped is left alone. A name with a `fallback` is replaced by it, with a warning. Some
supported versions of torch lack an `optional` name: it is then its fallback, or None, without a warning.

`MINIMUM` is the oldest torch of each feature, and `too_old_message` the error on older ones.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:  # names used as annotations and base classes
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses import FakeTensor as FakeTensor
    from torch._subclasses import FakeTensorMode as FakeTensorMode
    from torch.utils import _pytree as pytree  # noqa: F401
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper_subclass  # noqa: F401

    function_apply: tuple[Any, str]  # mypy would take an unpacked Any for all arguments


class MissingInternal(ImportError):
    """This version of torch lacks a private name on which a feature depends."""


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name of torch: its module, the path in it ("" is the module itself), and the feature lost without it.

    `kind` is the form in which it is provided: `value`, resolved once; `target` to wrap, (owner, attribute); `reader`,
    a function that returns the current value; `loaded`, a function that returns the module if a program has imported
    it. `older` is the name in older releases.
    """

    module: str
    name: str = ""
    lost: str = ""
    kind: Literal["value", "target", "reader", "loaded"] = "value"
    optional: bool = False
    fallback: Any = None
    older: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    def find(self) -> Any:
        """Return the value; raise MissingInternal if this torch has none."""
        try:
            value = importlib.import_module(self.module)
            name = self.older if self.older and not hasattr(value, self.name) else self.name
            return attrgetter(name)(value) if name else value
        except (ImportError, AttributeError) as error:
            import torch

            text = f"torch {torch.__version__} has no {self.path}: no {self.lost}"
            raise MissingInternal(text) from error

    def get(self) -> Any:
        """Return the name in its `kind`'s form; if missing, an object that raises MissingInternal on use."""
        if self.kind == "loaded":
            return partial(sys.modules.get, self.module)
        owner, _, attribute = self.name.rpartition(".")
        try:
            value = self.find()
            if self.kind == "value":
                return value
            parent = Internal(self.module, owner, self.lost).find()
        except MissingInternal as error:
            if self.fallback is not None and not self.optional:
                warnings.warn(str(error), stacklevel=3)
            if self.fallback is not None or self.optional:
                return self.fallback
            missing = Missing(str(error))
            return (missing, attribute) if self.kind == "target" else missing
        return (parent, attribute) if self.kind == "target" else partial(getattr, parent, attribute)


class Missing:
    """A placeholder for a missing name: any use raises MissingInternal."""

    def __init__(self, message: str) -> None:
        self.message = message

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MissingInternal(self.message)

    __call__ = __enter__ = __iter__ = __getitem__ = __contains__ = __len__ = __bool__ = _refuse
    __instancecheck__ = __subclasscheck__ = __mro_entries__ = __getattr__ = _refuse

    def __exit__(self, *error: object) -> None:
        self._refuse()


_SHAPE_EXECUTION = "shape execution; execution='real' still works"
_SCRIPT = "counting of TorchScript's submodules"
_NESTED = "equal counts of the first and later uses of nested tensors"
_MODULES = "attribution to modules; counts by operator still work"
_BACKWARD_OWNERS = "attribution of backward ops to modules; counts by operator still work"
_NODES = "phases and modules of backward ops"
_FORWARD = "counts of a forward pass by FlopCountAnalysis; fvflops.record still works"
_RECOMPUTE = "recompute phase of activation checkpointing; its ops count as backward"
_FUNCTIONS = "attribution to autograd.Function; counts by operator still work"
_CONTROL = "counting inside cond, while_loop, scan and flex_attention"
_FOREACH = "foreach optimizer steps in shape execution"
_TRITON = "counting of Triton kernels that torch.compile's wrapper launches"
_SHARDINGS = "equal counts of the first and later calls of an op on DTensors"
_FSDP = "restoration of FSDP2's state after a run"
_REPLICATE = "restoration of replicate's state after a run"
_DDP = "shape execution of DistributedDataParallel"
_PROFILER = "kernel profile"
_PLAN = "plan of distributed ranks"
_PIPELINE = "plan of pipeline schedules with several stages per rank"
_FUNCTORCH = "counting under torch.func"
_FAKE = "counting of FakeTensors"
_META_BUILDING = "building of models on the meta device"
_TRACING = "graph tracing (make_fx, torch.func.linearize) in shape execution"
_RESTORED = "restoration of torch's state after a run"
_SETTINGS = "restoration of this setting after a run"
_MODES = "recording of op calls"
_SCHEMAS = "list of torch's ops and their schemas"
_COMPOSITE = "detection of composite ops"
_CUDA_SHAPES = "shape execution as on CUDA"
_LAYOUTS = "memory layout of convolutions in shape execution"
_ATTENTION_KERNELS = "choice of attention kernels in shape execution"
_OVERHEAD = "measurement of profiling overhead"

# Feature -> the oldest torch on which it is not refused; docs/reference/versions.md lists tested features.
MINIMUM: Mapping[str, str] = {
    **dict.fromkeys(("counting", "record", "TrainingStepAnalysis", "StepMeter", "memory of one device"), "2.6"),
    **dict.fromkeys(("profile", "exported programs"), "2.6"),
    **dict.fromkeys(("exported programs in files", "flex_attention"), "2.9"),
    "Mixtral of the zoo": "2.10",
    "plan and sharded memory": "2.12",
}


def too_old_message(feature: str) -> str | None:
    """Return why this torch is too old for a feature of MINIMUM; None if it is not."""
    import torch

    minimum = MINIMUM[feature]
    if is_torch(minimum):
        return None
    return f"torch {torch.__version__} is too old for {feature}: install torch {minimum} or newer"


def is_torch(minimum: str) -> bool:
    """Return whether torch is of this release or newer.

    >>> is_torch("2.6"), is_torch("3.0")
    (True, False)
    """
    import torch

    release, least = ([int(part) for part in version.split(".")[:2]] for version in (torch.__version__, minimum))
    return release >= least


INTERNALS: Mapping[str, Internal] = {
    # Calls of modules, functions and backward passes
    "global_forward_pre_hooks": Internal("torch.nn.modules.module", "_global_forward_pre_hooks", _SHAPE_EXECUTION),
    "global_forward_hooks": Internal("torch.nn.modules.module", "_global_forward_hooks", _SHAPE_EXECUTION),
    "global_backward_pre_hooks": Internal("torch.nn.modules.module", "_global_backward_pre_hooks", _SHAPE_EXECUTION),
    "global_backward_hooks": Internal("torch.nn.modules.module", "_global_backward_hooks", _SHAPE_EXECUTION),
    "is_any_autocast_enabled": Internal("torch._C", "_is_any_autocast_enabled", _SHAPE_EXECUTION),
    "tracing_state": Internal("torch._C", "_get_tracing_state", _SHAPE_EXECUTION),
    "module_call": Internal("torch.nn", "Module._call_impl", _MODULES, "target"),
    "engine_run": Internal("torch.autograd", "_engine_run_backward", "backward phases", "target"),
    "function_apply": Internal("torch.autograd.function", "_SingleLevelFunction.apply", _FUNCTIONS, "target"),
    "RecomputationHook": Internal("torch.utils.checkpoint", "_recomputation_hook", _RECOMPUTE),
    "CheckpointFrame": Internal("torch.utils.checkpoint", "_CheckpointFrame", _RECOMPUTE),
    "StopRecomputation": Internal("torch.utils.checkpoint", "_StopRecomputationError", _RECOMPUTE),
    "CheckpointBackward": Internal("torch.utils.checkpoint", "CheckpointFunction._backward_cls", _RECOMPUTE),
    "next_sequence_number": Internal("torch.autograd", "_get_sequence_nr", _BACKWARD_OWNERS, fallback=lambda: 0),
    "current_autograd_node": Internal("torch._C", "_current_autograd_node", _NODES, fallback=lambda: None),
    "grad_switch": Internal("torch._C", "_set_grad_enabled", "detection of models that use autograd", "target"),
    # Optimizers
    "foreach_types": Internal("torch.utils._foreach_utils", "_foreach_supported_types", _FOREACH, fallback=[]),
    "optimizer_foreach_types": Internal("torch.optim.optimizer", "_foreach_supported_types", _FOREACH, fallback=[]),
    "foreach_copy": Internal("torch", "_foreach_copy_", "optimizers with master weights"),
    # Ops and their dispatch
    "OpOverload": Internal("torch._ops", "OpOverload", _MODES),
    "OpOverloadPacket": Internal("torch._ops", "OpOverloadPacket", _MODES),
    "HigherOrderOperator": Internal("torch._ops", "HigherOrderOperator", _CONTROL),
    "DispatchKey": Internal("torch._C", "DispatchKey", _COMPOSITE),
    "has_kernel": Internal("torch._C", "_dispatch_has_kernel", _COMPOSITE),
    "has_kernel_for_key": Internal("torch._C", "_dispatch_has_kernel_for_dispatch_key", _COMPOSITE),
    "has_computed_kernel_for_key": Internal("torch._C", "_dispatch_has_computed_kernel_for_dispatch_key", _CUDA_SHAPES),
    "schemas_of_packet": Internal("torch._C", "_jit_get_schemas_for_operator", _SCHEMAS),
    "all_schemas": Internal("torch._C", "_jit_get_all_schemas", _SCHEMAS),
    "ArchiveReader": Internal("torch._C", "PyTorchFileReader", "checks of programs and TorchScript before they load"),
    "load_archive": Internal("torch.export.pt2_archive._package", "load_pt2", "programs of torch.export in files"),
    "all_op_names": Internal("torch._C", "_dispatch_get_all_op_names", _SCHEMAS),
    "inductor_prims": Internal("torch._inductor.inductor_prims", "", "schemas of the compiler's own prims"),
    "TorchDispatchMode": Internal("torch.utils._python_dispatch", "TorchDispatchMode", _MODES),
    "python_dispatch": Internal("torch.utils._python_dispatch", "", _MODES),
    "disable_dispatch_modes": Internal("torch.utils._python_dispatch", "_disable_current_modes", _MODES),
    "dispatch_mode_stack": Internal("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", _MODES),
    "is_wrapper_subclass": Internal("torch.utils._python_dispatch", "is_traceable_wrapper_subclass", _MODES),
    "is_wrapper_subclass_type": Internal("torch.utils._python_dispatch", "is_traceable_wrapper_subclass_type", _MODES),
    "push_dispatch_mode": Internal("torch.utils._python_dispatch", "_push_mode", _MODES),
    "pop_dispatch_mode": Internal("torch.utils._python_dispatch", "_pop_mode", _RESTORED),
    "dispatch_stack_length": Internal("torch._C", "_len_torch_dispatch_stack", _MODES),
    "pre_dispatch_stack_length": Internal(
        "torch._ops", "_len_torch_dispatch_stack_pre_dispatch", _RESTORED, fallback=lambda: 0
    ),
    "function_mode_stack": Internal("torch.overrides", "_get_current_function_mode_stack", _RESTORED, fallback=list),
    "function_stack_length": Internal("torch._C", "_len_torch_function_stack", _RESTORED),
    "pop_function_mode": Internal("torch._C", "_pop_torch_function_stack", _RESTORED),
    "push_function_mode": Internal("torch._C", "_push_on_torch_function_stack", _RESTORED),
    "get_function_state": Internal("torch._C", "_get_torch_function_state", _RESTORED, fallback=lambda: None),
    "set_function_state": Internal("torch._C", "_set_torch_function_state", _RESTORED),
    "disable_torch_function": Internal("torch._C", "DisableTorchFunction", _OVERHEAD),
    "DispatchModeKey": Internal("torch._C", "_TorchDispatchModeKey", _MODES),
    "get_dispatch_mode": Internal("torch._C", "_get_dispatch_mode", _FAKE, fallback=lambda _: None),
    "set_dispatch_mode": Internal("torch._C", "_set_dispatch_mode", _TRACING),
    "unset_dispatch_mode": Internal("torch._C", "_unset_dispatch_mode", _TRACING),
    "pytree": Internal("torch.utils._pytree", "", "arguments and results in nested containers"),
    # Higher-order ops, Triton, torch.compile
    "compile_and_call": Internal(
        "torch._higher_order_ops.utils", "_hop_compile_and_call", _CONTROL, "target", optional=True
    ),
    "triton_kernel_wrap": Internal("torch._higher_order_ops.triton_kernel_wrap", "", _TRITON),
    "compiler": Internal("torch._dynamo", "", _META_BUILDING),
    "loaded_compiler": Internal("torch._dynamo", "", "detection of compiled code", "loaded"),
    "optimizes_scripts": Internal("torch._C", "_get_graph_executor_optimize", _SCRIPT, fallback=lambda: True),
    "set_script_optimization": Internal("torch._C", "_set_graph_executor_optimize", _SCRIPT, fallback=bool),
    "nested_constant": Internal(
        "torch.nested._internal.nested_tensor", "_nt_view_dummy", _NESTED, "target", optional=True
    ),
    # torch.func
    "is_functorch_wrapped": Internal(
        "torch._C", "_functorch.is_functorch_wrapped_tensor", _FUNCTORCH, fallback=lambda _: False
    ),
    "is_batched": Internal("torch._C", "_functorch.is_batchedtensor", _FUNCTORCH),
    "unwrap_functorch": Internal("torch._C", "_functorch.get_unwrapped", _FUNCTORCH),
    "peek_interpreter": Internal("torch._C", "_functorch.peek_interpreter_stack", _FUNCTORCH),
    "predispatch": Internal("torch._functorch.predispatch", "", "loading of programs of torch.export"),
    "transform_depth": Internal("torch._C", "_functorch.get_dynamic_layer_stack_depth", _RESTORED, fallback=lambda: 0),
    "undo_vmap": Internal("torch._C", "_functorch._vmap_decrement_nesting", _RESTORED),
    "undo_grad": Internal("torch._C", "_functorch._grad_decrement_nesting", _RESTORED),
    "undo_jvp": Internal("torch._C", "_functorch._jvp_decrement_nesting", _RESTORED),
    "undo_functionalize": Internal("torch._C", "_functorch._func_decrement_nesting", _RESTORED),
    # Tensors without values
    "FakeTensor": Internal("torch._subclasses", "FakeTensor", _FAKE, fallback=type("FakeTensor", (), {})),
    "FakeTensorMode": Internal("torch._subclasses", "FakeTensorMode", _FAKE),
    "DeviceContext": Internal("torch.utils._device", "DeviceContext", _META_BUILDING),
    "device_constructors": Internal("torch.utils._device", "_device_constructors", _META_BUILDING, fallback=set),
    "make_wrapper_subclass": Internal("torch", "Tensor._make_wrapper_subclass", _SHAPE_EXECUTION),
    "no_torch_function": Internal("torch._C", "_disabled_torch_function_impl", _SHAPE_EXECUTION),
    "refuse_data_pointer": Internal("torch._C", "_set_throw_on_mutable_data_ptr", _SHAPE_EXECUTION),
    "set_conjugate": Internal("torch._C", "_set_conj", _SHAPE_EXECUTION),
    "set_negative": Internal("torch._C", "_set_neg", _SHAPE_EXECUTION),
    "disable_torch_dispatch": Internal("torch._C", "_DisableTorchDispatch", _SHAPE_EXECUTION),
    "below_autograd": Internal("torch._C", "_AutoDispatchBelowAutograd", _FORWARD),
    "select_convolution_backend": Internal("torch._C", "_select_conv_backend", _LAYOUTS),
    "convolution_memory_format": Internal("torch._C", "_conv_determine_backend_memory_format", _LAYOUTS),
    "is_mkldnn_enabled": Internal("torch._C", "_get_mkldnn_enabled", _LAYOUTS),
    "is_flash_enabled": Internal("torch._C", "_get_flash_sdp_enabled", _ATTENTION_KERNELS),
    "is_math_enabled": Internal("torch._C", "_get_math_sdp_enabled", _ATTENTION_KERNELS),
    "is_efficient_enabled": Internal("torch._C", "_get_mem_efficient_sdp_enabled", _ATTENTION_KERNELS),
    "is_cudnn_attention_enabled": Internal("torch._C", "_get_cudnn_sdp_enabled", _ATTENTION_KERNELS),
    "variable_functions": Internal("torch._VF", "", _CUDA_SHAPES),
    "amp_availability": Internal("torch.cuda.amp.common", "amp_definitely_not_available", _CUDA_SHAPES, "target"),
    "ops_of_dispatch_key": Internal("torch._C", "_dispatch_get_registrations_for_dispatch_key", _CUDA_SHAPES),
    "scoped_library": Internal("torch.library", "_scoped_library", _CUDA_SHAPES),
    "DispatchKeySet": Internal("torch._C", "DispatchKeySet", _CUDA_SHAPES),
    "ExcludeDispatchKeys": Internal("torch._C", "_ExcludeDispatchKeyGuard", _CUDA_SHAPES),
    "scaled_dot_product_attention": Internal("torch._C", "_nn.scaled_dot_product_attention", _CUDA_SHAPES),
    # State of this thread and of torch
    "forward_ad_level": Internal(
        "torch.autograd.forward_ad", "_current_level", _RESTORED, "reader", fallback=lambda: -1
    ),
    "top_saved_hooks": Internal(
        "torch._C", "_autograd._top_saved_tensors_default_hooks", _RESTORED, optional=True, fallback=lambda _: None
    ),
    "set_versions": Internal("torch._C", "_autograd._unsafe_set_version_counter", _RESTORED, fallback=lambda *_: None),
    "pop_saved_hooks": Internal("torch._C", "_autograd._pop_saved_tensors_default_hooks", _RESTORED),
    "InferenceMode": Internal("torch._C", "_InferenceMode", _RESTORED),
    "ForceDispatchKeys": Internal("torch._C", "_ForceDispatchKeyGuard", _RESTORED),
    "included_keys": Internal("torch._C", "_dispatch_tls_local_include_set", _MODES),
    "excluded_keys": Internal("torch._C", "_dispatch_tls_local_exclude_set", _MODES),
    "is_multithreading_enabled": Internal("torch._C", "_is_multithreading_enabled", _RESTORED, fallback=lambda: True),
    "set_multithreading": Internal("torch._C", "_set_multithreading_enabled", _RESTORED),
    "is_view_replay_enabled": Internal("torch._C", "_is_view_replay_enabled", _RESTORED, fallback=lambda: False),
    "set_view_replay": Internal("torch._C", "_set_view_replay_enabled", _RESTORED),
    "get_precision": Internal("torch._C", "_get_fp32_precision_getter", _SETTINGS, optional=True),
    "set_precision": Internal("torch._C", "_set_fp32_precision_setter", _SETTINGS, optional=True),
    "global_device_context": Internal("torch", "_GLOBAL_DEVICE_CONTEXT", _SETTINGS, "reader"),
    "print_options": Internal("torch._tensor_str", "PRINT_OPTS", _SETTINGS, "reader"),
    # Profiling
    "RecordFunction": Internal("torch._C._profiler", "_RecordFunctionFast", _PROFILER),
    "ExperimentalConfig": Internal("torch._C._profiler", "_ExperimentalConfig", _PROFILER),
    "is_profiler_enabled": Internal("torch.autograd", "_profiler_enabled", _PROFILER),
    "cuda_sleep": Internal("torch.cuda", "_sleep", "times of ops on CUDA"),
    # torch.distributed
    "resolve_process_group": Internal(
        "torch.distributed.distributed_c10d", "_resolve_process_group", "names of process groups"
    ),
    "default_process_group": Internal("torch.distributed.distributed_c10d", "_get_default_group", _PLAN),
    "FakeStore": Internal("torch.testing._internal.distributed.fake_pg", "FakeStore", _PLAN),
    # torch.distributed.tensor.debug clears both, but imports numpy.
    "propagate_sharding": Internal(
        "torch.distributed.tensor", "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding", _PLAN
    ),
    "uncached_propagation": Internal(
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator.propagate_op_sharding_non_cached",
        _PLAN,
        kind="target",
    ),
    "loaded_sharding_decompositions": Internal("torch.distributed.tensor._decompositions", "", _SHARDINGS, "loaded"),
    "find_redistribution": Internal("torch.distributed.tensor._redistribute", "_gen_transform_infos", _PLAN),
    "clear_native_shardings": Internal("torch._C", "_clear_DTensor_sharding_propagator_cache", _PLAN),
    "all_gather_with_gradient": Internal(
        "torch.distributed._functional_collectives",
        "all_gather_single_autograd",
        "plan of context parallelism",
        older="all_gather_tensor_autograd",
    ),
    "pipeline_schedules": Internal("torch.distributed.pipelining.schedules", "", _PIPELINE),
    "add_unsharding": Internal("torch.distributed.pipelining.schedules", "_add_unshard_reshard", _PIPELINE),
    "add_gradient_reductions": Internal("torch.distributed.pipelining.schedules", "_add_reduce_grad", _PIPELINE),
    "reduce_stage_gradients": Internal(
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase.perform_reduce_grad",
        "plan of FSDP2 with pipeline stages",
    ),
    "redistribution_logger": Internal("torch.distributed.tensor._redistribute", "logger", _PLAN, optional=True),
    "stage_backward_input": Internal("torch.distributed.pipelining._backward", "stage_backward_input", _PIPELINE),
    "stage_backward_weight": Internal("torch.distributed.pipelining._backward", "stage_backward_weight", _PIPELINE),
    "all_to_all_with_gradient": Internal(
        "torch.distributed._functional_collectives", "all_to_all_single_autograd", "plan of expert parallelism"
    ),
    "work_from_future": Internal("torch._C", "_distributed_c10d._create_work_from_future", _DDP),
    "ddp_forward": Internal("torch.nn.parallel", "DistributedDataParallel._pre_forward", _DDP, "target"),
    "ddp_agreement": Internal("torch.nn.parallel.distributed", "_verify_param_shape_across_processes", _DDP, "target"),
    "ddp_rebuild": Internal("torch._C._distributed_c10d", "Reducer._rebuild_buckets", _DDP, "target"),
    "loaded_replicate": Internal("torch.distributed._composable.replicate", "", _REPLICATE, "loaded"),
    "loaded_contract": Internal("torch.distributed._composable.contract", "", _REPLICATE, "loaded"),
    "loaded_fsdp": Internal("torch.distributed.fsdp._fully_shard._fsdp_state", "", _FSDP, "loaded"),
}

# Private attributes of torch's objects. They are used in place: many are on hot paths, and a wrapper function would be
# no clearer. An object without one raises AttributeError.
ATTRIBUTES: tuple[Internal, ...] = (
    Internal("torch.nn", "Module._parameters", _MODULES),
    Internal("torch.nn", "Module._buffers", _MODULES),
    Internal("torch.nn", "Module._modules", _MODULES),
    Internal("torch.nn", "Module._get_name", _MODULES),
    Internal("torch.nn", "Module._apply", _PLAN),
    Internal("torch.nn", "Module._compiled_call_impl", "counting of modules that compile() was called on"),
    Internal("torch.nn", "RNNBase._flat_weights", "shape execution of recurrent networks"),
    Internal("torch.nn", "RNNBase._flat_weight_refs", "shape execution of recurrent networks"),
    Internal("torch", "Tensor._version", "detection of changed contents"),
    Internal("torch", "Tensor._values", "counting of sparse tensors"),
    Internal("torch", "Tensor._is_view", _RESTORED),
    Internal("torch", "Tensor._base", _PIPELINE),
    Internal("torch", "Tensor._backward_hooks", _RESTORED),
    Internal("torch._C", "TensorBase._has_symbolic_sizes_strides", "fast import of shape execution"),
    Internal("torch.nn.parameter", "Parameter._is_param", _SHAPE_EXECUTION),
    Internal("torch", "UntypedStorage._cdata", "aliasing of storages"),
    Internal("torch._C", "_FunctionBase._sequence_nr", _NODES),
    Internal("torch._ops", "OpOverload._schema", _MODES),
    Internal("torch._ops", "OpOverload._op", _MODES),
    Internal("torch._ops", "OpOverload._overloadname", _MODES),
    Internal("torch._ops", "OpOverloadPacket._qualified_op_name", "handles named by an op of torch.ops"),
    Internal("torch._ops", "OpOverload._op_dk", "choice of kernels in shape execution"),
    Internal("torch.jit", "RecursiveScriptModule._c", _SCRIPT),
    Internal("torch._C", "ScriptFunction._debug_flush_compilation_cache", _SCRIPT),
    Internal("torch._C", "ScriptModule._type", _SCRIPT),
    Internal("torch._C", "ScriptModule._method_names", _SCRIPT),
    Internal("torch._C", "ScriptModule._get_method", _SCRIPT),
    Internal("torch", "ScriptObject._type", "packed weights of quantised modules"),
    Internal("torch", "ScriptObject._has_method", "packed weights of quantised modules"),
    Internal("torch", "ScriptObject._get_method", "packed weights of quantised modules"),
    Internal("torch.nn.parallel", "DistributedDataParallel._get_ddp_logging_data", _DDP),
    Internal("torch.nn.parallel", "DistributedDataParallel._has_rebuilt_buckets", _DDP),
    Internal("torch._C._distributed_c10d", "Reducer._reset_state", _DDP),
    Internal("torch._C._distributed_c10d", "Reducer._push_all_rebuilt_params", _DDP),
    Internal("torch._C._distributed_c10d", "ProcessGroup._set_group_desc", _PLAN),
    Internal("torch.distributed.device_mesh", "DeviceMesh._flatten", _PLAN),
    Internal("torch.distributed.tensor.parallel", "ParallelStyle._apply", _PLAN),
    Internal("torch.distributed._composable.replicate", "_ReplicateState._ddp", _REPLICATE),
    Internal("torch.distributed._composable.replicate", "_ReplicateState._param_list", _REPLICATE),
    Internal("torch.distributed.fsdp._fully_shard._fsdp_state", "_get_module_fsdp_state", _FSDP),
    Internal("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._state_ctx", _FSDP),
    Internal("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._comm_ctx", _FSDP),
    Internal("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._fsdp_param_groups", _FSDP, optional=True),
    Internal("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._fsdp_param_group", _FSDP, optional=True),
)


def __getattr__(name: str) -> Any:
    internal = INTERNALS.get(name)
    if internal is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = internal.get()
    return value


def message_of_missing(value: Any) -> str | None:
    """Return the message of a missing name's placeholder, None for any other value."""
    return value.message if type(value) is Missing else None
