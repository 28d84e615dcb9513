"""Tiny models of many architectures of transformers, and why samples of some cannot lie end to end."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import transformers

from tests.transformers.trainers import VOCABULARY

_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, num_hidden_layers=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_WINDOW = dict(sliding_window=8)  # shorter than a sample
_MIXED = dict(**_WINDOW, layer_types=["sliding_attention", "full_attention"])
_STATES = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8)
_LINEAR = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip

END_TO_END: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "SmolLM3": {}, "Granite": {}, "Olmo2": {}, "Phi": {}, "StableLm": {},
    "Cohere": {}, "GPT2": {}, "GPTNeoX": {}, "OPT": dict(word_embed_proj_dim=32, ffn_dim=64), "Gemma": {}, "Helium": {},
    "Mistral": _WINDOW, "Phi3": _WINDOW, "Starcoder2": _WINDOW, "Gemma2": dict(query_pre_attn_scalar=8, **_MIXED),
    "Gemma3Text": _MIXED, "Cohere2": _MIXED, "Olmo3": _MIXED, "Mixtral": _EXPERTS, "Qwen3Moe": _EXPERTS,
    "GptOss": {**_EXPERTS, **_MIXED}, "Bert": {}, "ModernBert": {},
}  # fmt: skip
"""Config by the name of an architecture whose samples lie end to end."""

PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "Falcon": ("0 of 2 layers attend by transformers' AttentionInterface", {}),
    "Bloom": ("0 of 2 layers attend", {}),
    "Mamba": ("0 of 2 layers attend", {}),
    "Qwen3Next": ("1 of 2 layers attend", {**_EXPERTS, **_LINEAR}),
    "Lfm2": ("1 of 2 layers attend", dict(layer_types=["conv", "full_attention"])),
    "FalconH1": (r"% off that of its samples", dict(mamba_d_ssm=64, **_STATES)),  # attends beside a state
    "Roberta": (r"% off that of its samples", {}),  # positions begin after that of padding
    "Llama4Text": (
        "the mask of Llama4TextAttention is more than causal order and a window",
        dict(attention_chunk_size=8, interleave_moe_layer_step=1, no_rope_layers=[1, 0], **_EXPERTS),
    ),
    "T5": (
        "it has an encoder and a decoder",
        dict(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0),
    ),
    "Bart": (
        "it has an encoder and a decoder",
        dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=64, decoder_ffn_dim=64),
    ),
}  # fmt: skip
"""Why samples are padded, and config, by the name of an architecture."""

_HEADS = ("ForMaskedLM", "ForConditionalGeneration"), ("ForCausalLM", "LMHeadModel")
_OTHERS = ("Bert", "ModernBert", "Roberta", "T5", "Bart")  # than decoders
_NAMED_OTHERWISE = {"Llama4Text": "Llama4", "Gemma3Text": "Gemma3"}


def make(name: str) -> Any:
    """Return a model without dropout, whose layers attend as a user finds them."""
    more = END_TO_END[name] if name in END_TO_END else PADDED[name][1]
    kind = getattr(transformers, f"{name}Config")
    known = {*kind().to_dict(), *kind.attribute_map}
    config = kind(**{key: value for key, value in {**_SIZES, **more}.items() if key in known or key in more})
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    heads = (f"{_NAMED_OTHERWISE.get(name, name)}{head}" for head in _HEADS[name not in _OTHERS])
    return next(getattr(transformers, head) for head in heads if hasattr(transformers, head))(config)


def has_moved(name: str, model: Any) -> bool:
    """Tell whether layers that attend by themselves in one version of transformers use its interface in this one."""
    reason, _ = PADDED.get(name, ("", {}))
    return reason.startswith("0 of 2") and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(
        sys.modules[type(model).__module__]
    )
