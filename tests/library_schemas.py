"""The schemas of libraries' operators, which are not installed: their argument names are what a table's rows speak of.

Taken from the sources of flash-attn 2.8.3, xFormers 0.0.35 and 0.0.28.post3 (the last with its own cutlass kernels),
and causal-conv1d 1.7.0. The ops have no kernels; a test that runs one gives it a kernel.
"""

import importlib
import importlib.util

import torch

# torch's own, which it registers when something imports them.
_LATE = (
    "torch.nn.attention.varlen",
    "torch.distributed._symmetric_memory",
    "torch.ao.quantization.fx._decomposed",
    "torch._inductor.lowering",
)

_FLASH_FORWARD = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool return_softmax"
)
_FLASH_BACKWARD = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None"
)
_STARTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_OUTER = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse"
_GRADIENTS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"

SCHEMAS = {
    "flash_attn": (
        f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, {_FLASH_FORWARD}) -> (Tensor, Tensor, Tensor, Tensor)",
        f"_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, {_STARTS}, float dropout_p, float softmax_scale, "
        "bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, "
        "Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
        "Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)",
        f"_flash_attn_backward({_OUTER}, {_GRADIENTS}, {_FLASH_BACKWARD}) -> Tensor",
        f"_flash_attn_varlen_backward({_OUTER}, {_GRADIENTS}, {_STARTS}, {_FLASH_BACKWARD}, bool zero_tensors=False) "
        "-> Tensor",
    ),
    "flash_attn_3": (
        "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
        "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
        "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
        "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
        "int window_size_right=-1, int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, "
        "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
        "-> (Tensor(out!), Tensor, Tensor, Tensor)",
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
        "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
        "float softcap=0., bool deterministic=False, int sm_margin=0) "
        "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
        "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
        "-> (Tensor(out!), Tensor)",
    ),
    "xformer": (
        "memory_efficient_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? b=None, float? p=0.0, "
        "float? scale=None) -> Tensor",
    ),
    "xformers": (
        "efficient_attention_forward_cutlass(Tensor query, Tensor key, Tensor value, Tensor? bias, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_seqlen_q, int? max_seqlen_k, float dropout_p, "
        "int custom_mask_type, bool compute_log_sumexp=False, *, float? scale=None, Tensor? seqlen_k=None, "
        "int? window_size=None) -> (Tensor output, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, "
        "SymInt max_seqlen_batch_q, SymInt max_seqlen_batch_k)",
        "efficient_attention_backward_cutlass(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor? bias, "
        "Tensor out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "Tensor logsumexp, float dropout_p, Tensor philox_seed, Tensor philox_offset, int custom_mask_type, "
        "bool bias_requires_grad, *, float? scale=None, int? num_splits_key=None, int? window_size=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        "efficient_attention_forward_ck(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, float dropout_p, bool compute_logsumexp, "
        "int custom_mask_type, float? scale, Tensor? seqlen_k, int? window_size, Tensor? block_tables, "
        "int? page_size) -> (Tensor, Tensor?, int, int)",
        "efficient_attention_backward_ck(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? seqlen_k, "
        "Tensor logsumexp, Tensor output, float dropout_p, int rng_seed, int rng_offset, int custom_mask_type, "
        "float? scale, int? window_size) -> (Tensor, Tensor, Tensor, Tensor)",
        "efficient_attention_forward_decoder_ck(Tensor query, Tensor key, Tensor value, Tensor? seq_positions, "
        "float scale) -> Tensor",
        "efficient_attention_forward_decoder_splitk_ck(Tensor query, Tensor key, Tensor value, "
        "Tensor? seq_positions, float scale, int split_k) -> Tensor",
        "dual_gemm_silu_identity_mul(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2) "
        "-> (Tensor, Tensor, Tensor)",
        "swiglu_packedw(Tensor x, Tensor w1w2, Tensor? b1b2, Tensor w3, Tensor? b3) -> Tensor",
        "gemm_fused_operand_sum(Tensor a, Tensor b, Tensor out_mm, Tensor out_sum) -> (Tensor, Tensor)",
        "silu_bw_fused(Tensor x1, Tensor x2, Tensor dx4) -> (Tensor, Tensor)",
        "_sparse24_gemm(Tensor a, Tensor b, Tensor meta_reordered) -> Tensor",
        "_cusplt_mm(SymInt[] shape, Tensor packed, Tensor B, Tensor? bias, bool transpose_result) -> Tensor",
    ),
    "xformers_flash": (
        "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, "
        "SymInt window_left, SymInt window_right, bool return_softmax, Tensor? block_tables) "
        "-> (Tensor, Tensor, Tensor)",
        "flash_bwd(bool grads_share_storage, Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, "
        "float softmax_scale, bool is_causal, SymInt window_left, SymInt window_right, Tensor rng_state) "
        "-> (Tensor, Tensor, Tensor)",
    ),
    "xformers_flash3": (
        "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, "
        "float softmax_scale, bool is_causal, Tensor? descale_q=None, Tensor? descale_k=None, "
        "Tensor? descale_v=None, Tensor? block_table=None, bool use_kvsplit=False, SymInt window_left=-1, "
        "SymInt window_right=-1) -> (Tensor, Tensor)",
        "flash_bwd(bool grads_share_storage, Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor softmax_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float softmax_scale, bool is_causal, SymInt window_left, SymInt window_right) -> (Tensor, Tensor, Tensor)",
    ),
    "xformers_python": (
        "tiled_matmul_fwd(Tensor[] flat_a, Tensor[] flat_b, SymInt[] ms, SymInt[] ns, SymInt[] ks) -> Tensor[]",
        "sequence_parallel_leading_matmul_fwd(Tensor scattered_input, Tensor[] weights, bool fuse, "
        "str process_group_name) -> Tensor[]",
        "sequence_parallel_leading_matmul_bwd(Tensor scattered_input, Tensor[] weights, "
        "Tensor[] grad_gathered_outputs, bool fuse, str process_group_name) -> (Tensor, Tensor[])",
        "sequence_parallel_trailing_matmul_fwd(Tensor gathered_input, Tensor weight, bool fuse, "
        "str process_group_name) -> Tensor",
        "sequence_parallel_trailing_matmul_bwd(Tensor gathered_input, Tensor weight, Tensor grad_scattered_output, "
        "bool fuse, str process_group_name) -> (Tensor, Tensor)",
    ),
    "DaoAILab": (
        "_causal_conv1d_fwd_cpp(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, "
        "Tensor(a!) out, Tensor(b!)? final_states_out, bool silu_activation) -> ()",
        "_causal_conv1d_bwd_cpp(Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor? seq_idx, "
        "Tensor? initial_states, Tensor(a!)? dfinal_states, Tensor(b!) dx, Tensor(c!) dweight, Tensor(d!)? dbias, "
        "Tensor(e!) dinitial_states, bool silu_activation) -> ()",
        "_causal_conv1d_update_cpp(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor(b!) out, "
        "bool silu_activation, Tensor? cache_seqlens, Tensor? conv_state_indices) -> ()",
    ),
}

_libraries: list[torch.library.Library] = []


def define_library_schemas() -> None:
    """Define what no installed library has registered, once, and let torch register what it has itself."""
    if _libraries:
        return
    for name in _LATE:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    for namespace, schemas in SCHEMAS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            if not hasattr(getattr(torch.ops, namespace), schema.partition("(")[0]):
                library.define(schema)
        # A library that is collected takes its schemas with it.
        _libraries.append(library)
