"""Multiply-adds of a prompt and of decoded tokens against those that are counted in their recordings."""

import pytest

from fvflops import FlopCountAnalysis
from fvflops.comparison.decoder import Decoder, EncoderDecoder
from fvflops.formulas import resolve_table
from fvflops.serve.record_serving import record_serving
from tests.support.serving.language_models import WINDOW, build
from tests.support.serving.model_macs import count_macs

# What engines also run as products and attention; recurrences and convolutions are not among them.
_OPS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "scaled_dot_product_attention")
_RUN = {"execution": "shapes"}


def _counted(trace, ops=_OPS):
    counts = FlopCountAnalysis.from_trace(trace, warn=False).by_operator()
    return sum(count for name, count in counts.items() if name in ops)


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Gemma2ForCausalLM",
        "GptOssForCausalLM",
        "DeepseekV3ForCausalLM",
        "Llama4ForCausalLM",
        "Lfm2ForCausalLM",
        "RecurrentGemmaForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Gemma3ForConditionalGeneration",
    ],
)
def test_prefill_and_decoded_tokens(name):
    model = build(name)
    serving = record_serving(model)
    ops = tuple(op for op in _OPS if op != "bmm") if name.startswith("Granite") else _OPS
    for prompt in (WINDOW - 2, WINDOW + 30):
        prefill, *decoded = Decoder(model, 1, resolve_table("default"), _RUN).record(prompt, 3)
        assert _counted(prefill, ops) == count_macs(serving, prompt)
        expected = [count_macs(serving, 1, prompt + index) for index in range(3)]
        assert [_counted(step, ops) for step in decoded] == expected
    assert serving.balances_experts == (name == "DeepseekV3ForCausalLM")


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_encoder_and_decoder(name):
    model = build(name)
    serving = record_serving(model)
    for encoded, prompt in ((5, 1), (40, 12)):
        prefill, *decoded = EncoderDecoder(model, 1, resolve_table("default"), _RUN, encoded).record(prompt, 2)
        # All positions of the prompt have logits.
        head = (prompt - 1) * serving.hidden * serving.vocabulary
        assert _counted(prefill) == serving.encoder_macs(encoded) + count_macs(serving, prompt, 0, encoded) + head
        expected = [count_macs(serving, 1, prompt + index, encoded) for index in range(2)]
        assert [_counted(step) for step in decoded] == expected
