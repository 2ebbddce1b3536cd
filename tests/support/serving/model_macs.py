"""Multiply-adds of tokens as a model itself runs them, by the work that was read of it for an engine."""

from fvflops.serve.serving_model import attention_macs


def count_macs(model, tokens, cached=0, encoded=0):
    """Return the multiply-adds of `tokens` tokens of a sequence after `cached` ones, with cross attention to `encoded`.

    They are of projections, experts, attention and the last token's logits, without recurrences, convolutions and
    encoders. Attention counts all pairs of a token and a key, also pairs that a causal mask leaves out, and of a
    sliding window the keys in the cache, of which at most window - 1 precede the tokens.
    """
    keys = tokens + cached
    rows = {item: 1 if item.per_sequence else keys if item.of_cached else tokens for item in model.projections}
    total = sum(count * rows[item] * item.elements for item, count in model.projections.items())
    for mixture, count in model.experts.items():
        run = mixture.experts if mixture.runs_all else mixture.topk
        total += count * tokens * run * mixture.elements // mixture.experts
    for layer, count in model.attention.items():
        window = layer.cache.window
        seen = tokens + min(cached, window - 1) if window else keys
        total += attention_macs({layer: count}, tokens, seen)
    return total + attention_macs(model.cross_attention, tokens, encoded)
