"""The ten Qwen3.5 and Qwen3.6 text models as data.

Shapes are those of the published configurations; tests/recipes/test_models.py builds each one and compares its
parameter count with the published total. Shared by all: every fourth layer is full attention with 256-wide heads, a
quarter of each turned by rotary embedding with base 1e7; 16 GDN key heads, 128-wide; 248,320 tokens; one multi-token
prediction block.
"""

from dataclasses import replace

from qla_megatron.recipes.recipe import Model

# Qwen3.6 has no sizes of its own: 27B and 35B-A3B, with the shapes of Qwen3.5.
MODELS: dict[str, Model] = {
    "qwen3_5_0_8b": Model(
        hidden_size=1024, num_layers=24, num_heads=8, num_kv_heads=2, gdn_value_heads=16, ffn_hidden_size=3584,
        tie_embeddings=True,
    ),
    "qwen3_5_2b": Model(
        hidden_size=2048, num_layers=24, num_heads=8, num_kv_heads=2, gdn_value_heads=16, ffn_hidden_size=6144,
        tie_embeddings=True,
    ),
    "qwen3_5_4b": Model(
        hidden_size=2560, num_layers=32, num_heads=16, num_kv_heads=4, gdn_value_heads=32, ffn_hidden_size=9216,
        tie_embeddings=True,
    ),
    "qwen3_5_9b": Model(
        hidden_size=4096, num_layers=32, num_heads=16, num_kv_heads=4, gdn_value_heads=32, ffn_hidden_size=12288,
    ),
    "qwen3_5_27b": Model(
        hidden_size=5120, num_layers=64, num_heads=24, num_kv_heads=4, gdn_value_heads=48, ffn_hidden_size=17408,
    ),
    "qwen3_5_35b_a3b": Model(
        hidden_size=2048, num_layers=40, num_heads=16, num_kv_heads=2, gdn_value_heads=32,
        num_experts=256, experts_per_token=8, expert_hidden_size=512, shared_expert_hidden_size=512,
    ),
    "qwen3_5_122b_a10b": Model(
        hidden_size=3072, num_layers=48, num_heads=32, num_kv_heads=2, gdn_value_heads=64,
        num_experts=256, experts_per_token=8, expert_hidden_size=1024, shared_expert_hidden_size=1024,
    ),
    "qwen3_5_397b_a17b": Model(
        hidden_size=4096, num_layers=60, num_heads=32, num_kv_heads=2, gdn_value_heads=64,
        num_experts=512, experts_per_token=10, expert_hidden_size=1024, shared_expert_hidden_size=1024,
    ),
}  # fmt: skip
MODELS = {name: replace(model, prediction_layers=1) for name, model in MODELS.items()}
MODELS["qwen3_6_27b"] = MODELS["qwen3_5_27b"]
MODELS["qwen3_6_35b_a3b"] = MODELS["qwen3_5_35b_a3b"]
