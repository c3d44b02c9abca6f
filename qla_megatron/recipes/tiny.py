"""Recipes small enough for two CPU cores: the demo, its mixture of experts and the hybrid stack.

Same layer pattern, gates, norms and rotary share as Qwen3.5; bytes as tokens (0..255 and 256 for end of document).
"""

from dataclasses import replace

from qla_megatron.recipes.recipe import Checkpoint, Data, Model, Optimizer, Parallel, Precision, Recipe, Train

TINY = Model(
    hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, max_position=65_536,
    gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=32, gdn_value_dim=32, ffn_hidden_size=256,
    vocab_size=257, padded_vocab_size=320,
)  # fmt: skip


def tiny_pretrain_2k_2xcpu() -> Recipe:
    """The demo: a dense model learns Python source, tensor and sequence parallel over two processes."""
    return Recipe(
        model=TINY,
        parallel=Parallel(gpus=2, device="cpu", tensor=2, sequence=True),
        precision=Precision(dtype="fp32"),
        data=Data(sequence_length=2048, paths=("runs/demo/data/python",), split="95,5,0", workers=0),
        train=Train(steps=120, global_batch=2, evaluate_every=40, evaluate_sequences=16, log_every=10),
        optimizer=Optimizer(lr=3e-3, min_lr=3e-4, warmup_steps=20, distributed=False, overlap=False),
        checkpoint=Checkpoint(save_every=40),
    )


def tiny_moe_pretrain_2k_2xcpu() -> Recipe:
    """The demo's model with eight experts a layer, two of them a token, and a gated shared expert."""
    base = tiny_pretrain_2k_2xcpu()
    experts = replace(
        base.model, ffn_hidden_size=None, num_experts=8, experts_per_token=2, expert_hidden_size=64,
        shared_expert_hidden_size=64,
    )  # fmt: skip
    return replace(base, model=experts)


def tiny_hybrid_pretrain_2k_2xcpu() -> Recipe:
    """The demo's model built as Megatron's HybridModel."""
    base = tiny_pretrain_2k_2xcpu()
    return replace(base, model=replace(base.model, stack="hybrid"))
