"""The schemas of libraries' operators, which are not installed: their argument names are what a table's rows speak of.

Taken from the sources of flash-attn 2.8.3, xFormers 0.0.35 and 0.0.28.post3 (the last with its own cutlass kernels),
causal-conv1d 1.7.0, bitsandbytes 0.50.2, torchao 0.18.0, spikingjelly 2.0.0, optimum-quanto 0.2.7, transformers 5.23
and DeepGEMM. The ops have no kernels; a test that runs one gives it a kernel. A library that is installed defines its
own first: it could not after this.
"""

import contextlib
import importlib
import importlib.util

import torch

from fvflops.sources.weights.packed_weight import define_ops

# torch's own, which it registers when something imports them.
_LATE = (
    "torch.nn.attention.varlen",
    "torch.distributed._symmetric_memory",
    "torch.ao.quantization.fx._decomposed",
    "torch._inductor.lowering",
)

# Libraries that may be installed.
_INSTALLED = ("bitsandbytes", "torchao", "transformers")
_MODULES = {"torchao": "torchao.ops", "transformers": "transformers.integrations.moe"}

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

_FP8_GEMM = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor d"
_RECIPE = "int[]? recipe=None, str compiled_dims='nk', bool disable_ue8m0_cast=False"
SCHEMAS = {
    "quanto": (
        "qbytes_mm(Tensor A, Tensor B, Tensor scales) -> Tensor",
        "gemm_f16i4_awq(Tensor input, Tensor other, Tensor other_scale, Tensor other_shift, int rows, int out_cols, "
        "int in_cols, int bits, int group_size) -> Tensor",
        "gemm_f16f8_marlin(Tensor a, Tensor b_q_weight, Tensor b_scales, Tensor workspace, int num_bits, int size_m, "
        "int size_n, int size_k) -> Tensor",
        "gemm_f16i4_marlin(Tensor input, Tensor other, Tensor other_scale, Tensor other_shift, Tensor workspace) -> "
        "Tensor",
        "unpack(Tensor self, int bits) -> Tensor",
        "pack_fp8_marlin(Tensor b_q_weight, Tensor perm, int size_k, int size_n, int num_bits) -> Tensor",
    ),
    "deep_gemm": (
        *(f"fp8_gemm_{order}({_FP8_GEMM}, Tensor? c=None, {_RECIPE}) -> ()" for order in ("nt", "nn", "tn", "tt")),
        f"m_grouped_fp8_gemm_nt_contiguous({_FP8_GEMM}, Tensor m_indices, {_RECIPE}) -> ()",
        f"m_grouped_fp8_gemm_nt_masked({_FP8_GEMM}, Tensor masked_m, int expected_m, {_RECIPE}) -> ()",
    ),
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
    "transformers": (
        "grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor",
        "grouped_mm_fallback_backward(Tensor input, Tensor weight, Tensor offs, Tensor grad) -> (Tensor, Tensor)",
    ),
    "bitsandbytes": (
        "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
        "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
        "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
        "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
        "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, "
        "ScalarType? dtype=None) -> Tensor",
        "int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, "
        "Tensor? bias=None) -> (Tensor, Tensor?)",
        "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None) "
        "-> Tensor",
        "int8_vectorwise_quant(Tensor A, float threshold=0.) -> (Tensor, Tensor, Tensor?)",
        "int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor",
        "int8_double_quant(Tensor A, float threshold=0.) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
        "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) "
        "-> Tensor",
        "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
        "quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
        "quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
        "optimizer_update_32bit(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
        "Tensor(a3!)? state2, Tensor(a4!)? unorm_vec, float max_unorm, float param_norm, float beta1, float beta2, "
        "float beta3, float alpha, float eps, float weight_decay, int step, float lr, float gnorm_scale, "
        "bool skip_zeros=False) -> ()",
        "optimizer_update_8bit_blockwise(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
        "Tensor(a3!)? state2, float beta1, float beta2, float beta3, float alpha, float eps, int step, float lr, "
        "Tensor(a4!) qmap1, Tensor(a5!)? qmap2, Tensor(a6!) absmax1, Tensor(a7!)? absmax2, float weight_decay, "
        "float gnorm_scale, bool skip_zeros=False) -> ()",
    ),
    "torchao": (
        "da8w4_linear_cpu(Tensor input, Tensor input_scales, Tensor input_qzeros, Tensor weight, "
        "Tensor weight_scales, Tensor weight_qzeros, Tensor compensation, Tensor? bias, ScalarType output_dtype) "
        "-> Tensor",
        "float8_linear_cpu(Tensor input, Tensor input_scales, Tensor weight, Tensor weight_scales, Tensor? bias, "
        "ScalarType output_dtype) -> Tensor",
        "rowwise_scaled_linear_sparse_cutlass_f8f8(Tensor input, Tensor input_scale, Tensor weight, "
        "Tensor weight_meta, Tensor weight_scale, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
        "swizzle_mm(Tensor mat1, Tensor mat2, bool mat1_is_swizzled, bool mat2_is_swizzled) -> Tensor",
        "swizzle_scaled_mm(Tensor mat1, Tensor mat2, bool mat1_is_swizzled, bool mat2_is_swizzled, Tensor scale_a, "
        "Tensor scale_b, Tensor? bias=None, Tensor? scale_result=None, ScalarType? out_dtype=None) -> Tensor",
        "mx_fp8_bf16(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale) -> Tensor",
        "qscaled_dot_product(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
        "bool is_causal=False, float? scale=None, float q_scale=1.0, int q_zp=0, float k_scale=1.0, int k_zp=0, "
        "float v_scale=1.0, int v_zp=0, float a_scale=1.0, int a_zp=0, float o_scale=1.0, int o_zp=0) -> Tensor",
        "_scaled_embedding_bag(Tensor qweight, Tensor indices, Tensor offsets, Tensor weight_scale, float o_scale, "
        "int mode, bool include_last_offset, ScalarType output_dtype) -> Tensor",
        "quantize_affine_float8_non_decomposed(Tensor tensor, Tensor scale, ScalarType float8_dtype=float) -> Tensor",
        "dequantize_affine_float8_non_decomposed(Tensor tensor, Tensor scale, ScalarType output_dtype=float) -> Tensor",
    ),
    "sj_ilif": (
        "forward(Tensor x, Tensor v, float tau, float count, float lower, float upper, float threshold, "
        "bool detach_reset, bool store_v_seq) -> (Tensor, Tensor, Tensor)",
        "backward(Tensor gs, Tensor gv, Tensor h, float tau, float count, float lower, float upper, float threshold, "
        "bool detach_reset, bool store_v_seq) -> (Tensor, Tensor)",
    ),
    "sj_stbif": (
        "forward(Tensor x, Tensor q, Tensor acc_q, Tensor q_threshold, Tensor pos_max, Tensor neg_min) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "sj_activation_aware_if": (
        "forward(Tensor x, Tensor v, Tensor threshold, Tensor offset, int channels, int inner, float? reset, "
        "bool store_v_seq) -> (Tensor, Tensor)",
    ),
    "sj_spike_linear": (
        "packed(Tensor spike_packed, Tensor weight, Tensor? bias) -> Tensor",
        "sparse(Tensor spike, Tensor weight, Tensor? bias) -> Tensor",
        "pack_rows(Tensor spike) -> Tensor",
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

_CHARGE = "float threshold, float? reset, bool detach_reset, float alpha, bool store_v_seq=True, int surrogate_id=0"
_POTENTIAL = "float tau, float rest, float critical, float a0"
_SPIKING = {
    "if": ("Tensor x, Tensor v, ", "Tensor gs, Tensor gv, Tensor h, ", 3),
    "lif": (
        "Tensor x, Tensor v, float tau, bool decay_input, ",
        "Tensor gs, Tensor gv, Tensor h, float tau, bool decay_input, ",
        3,
    ),
    "plif": (
        "Tensor x, Tensor v, Tensor w, bool decay_input, ",
        "Tensor gs, Tensor gv, Tensor x, Tensor v, Tensor w, Tensor h, bool decay_input, ",
        3,
    ),
    "qif": (
        f"Tensor x, Tensor v, {_POTENTIAL}, ",
        f"Tensor gs, Tensor gv, Tensor h, Tensor previous, {_POTENTIAL}, ",
        4,
    ),
    "eif": (
        "Tensor x, Tensor v, float tau, float rest, float theta, float delta, ",
        "Tensor gs, Tensor gv, Tensor h, Tensor previous, float tau, float rest, float theta, float delta, ",
        4,
    ),
    "izhikevich": (
        f"Tensor x, Tensor v, Tensor w, {_POTENTIAL}, float a, float b, float tau_w, ",
        f"Tensor gs, Tensor gv, Tensor gw, Tensor h, Tensor previous, {_POTENTIAL}, float a, float b, float tau_w, ",
        5,
    ),
}
for _name, (_forward, _backward, _results) in _SPIKING.items():
    SCHEMAS[f"sj_{_name}"] = (
        f"forward({_forward}{_CHARGE}) -> ({', '.join(['Tensor'] * _results)})",
        f"backward({_backward}{_CHARGE}) -> (Tensor, Tensor)",
    )
for _name, _charge in (("if", ""), ("lif", "float tau, bool decay_input, ")):
    SCHEMAS[f"sj_{_name}_linear"] = (
        f"forward(Tensor x_seq, Tensor v_init, Tensor weight_t, Tensor? bias, {_charge}float v_threshold, "
        "float v_reset, bool soft_reset, bool detach_reset, int surrogate_id, float alpha, int surrogate_handle, "
        "int threads) -> (Tensor, Tensor)",
        "backward(Tensor x_seq, Tensor v_init, Tensor weight_t, Tensor? bias, Tensor grad_y, Tensor grad_v_out, "
        f"{_charge}float v_threshold, float? v_reset, bool detach_reset, int surrogate_id, float alpha, "
        "int surrogate_handle) -> (Tensor, Tensor, Tensor, Tensor?)",
    )

_libraries: list[torch.library.Library] = []


def define_library_schemas() -> None:
    """Define what no installed library has registered, once, and let torch register what it has itself."""
    if _libraries:
        return
    for name in _LATE:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    for name in _INSTALLED:
        if importlib.util.find_spec(name) is not None:
            with contextlib.suppress(ImportError, OSError):  # made for another torch, or another machine
                importlib.import_module(_MODULES.get(name, name))
    define_ops()
    for namespace, schemas in SCHEMAS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            if not hasattr(getattr(torch.ops, namespace), schema.partition("(")[0]):
                library.define(schema)
        # A library that is collected takes its schemas with it.
        _libraries.append(library)
