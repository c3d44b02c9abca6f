"""Layouts that cannot work are refused with the reason and a way out, each rule on its own."""

import pytest

from qla_megatron.recipes import catalogue, checks, overrides

DENSE = "qwen3_5_9b_pretrain_4k_8xh200"  # 16 query, 4 KV, 16 key, 32 value heads, 32 layers, DP8
MOE = "qwen3_5_35b_a3b_pretrain_4k_16xh100"  # PP2 EP8
TINY = "tiny_pretrain_2k_2xcpu"

REFUSED = [  # recipe, changes, words of the reason
    pytest.param(DENSE, "parallel.gpus=12 parallel.tensor=8", "parallel.gpus=12 is not a multiple", id="gpus"),
    pytest.param(DENSE, "parallel.gpus=12", "does not fill machines", id="nodes"),
    pytest.param(DENSE, "parallel.sequence=true", "parallel.tensor=1", id="sequence-parallel-alone"),
    pytest.param(TINY, "precision.dtype=bf16", "precision.dtype=fp32", id="bf16-on-cpu"),
    pytest.param(DENSE, "model.gdn_value_heads=24", "is not a multiple of model.gdn_key_heads=16", id="value-heads"),
    pytest.param(
        DENSE,
        "parallel.tensor=8 parallel.context=4 parallel.gpus=32",
        "more than the 16 key heads",
        id="beyond-key-heads",
    ),
    pytest.param(
        DENSE, "parallel.tensor=6 parallel.gpus=6", "gdn_key_heads=16 cannot be split evenly", id="key-heads-over-tp"
    ),
    pytest.param(
        "qwen3_5_27b_pretrain_4k_16xh200", "parallel.tensor=16", "num_heads=24 cannot be split", id="query-heads"
    ),
    pytest.param(DENSE, "model.num_kv_heads=5", "num_heads=16 is not a multiple of model.num_kv_heads=5", id="gqa"),
    pytest.param(
        DENSE, "model.num_heads=48 model.num_kv_heads=6 parallel.tensor=4", "one must divide the other", id="kv-over-tp"
    ),
    pytest.param(
        DENSE, "parallel.context=4 parallel.tensor=2 train.global_batch=64", "exchanges heads", id="kv-over-context"
    ),
    pytest.param(TINY, "model.ffn_hidden_size=257", "ffn_hidden_size=257 cannot be split", id="ffn"),
    pytest.param(TINY, "model.padded_vocab_size=319", "padded_vocab_size=319 cannot be split", id="vocabulary-odd"),
    pytest.param(TINY, "model.padded_vocab_size=256", "less than model.vocab_size=257", id="vocabulary-small"),
    pytest.param(TINY, "model.rotary_fraction=0.3", "not an even number", id="rotary"),
    pytest.param(TINY, "model.ffn_hidden_size=null", "ffn_hidden_size is missing", id="no-ffn"),
    pytest.param(DENSE, "parallel.expert=2", "the model has no experts", id="expert-parallel-dense"),
    pytest.param(MOE, "model.expert_hidden_size=null", "expert_hidden_size is missing", id="expert-width"),
    pytest.param(MOE, "model.ffn_hidden_size=64", "for dense models", id="dense-width-in-moe"),
    pytest.param(MOE, "model.experts_per_token=300", "more than model.num_experts=256", id="top-k"),
    pytest.param(MOE, "model.num_experts=60", "cannot be split evenly over parallel.expert=8", id="experts-over-ep"),
    pytest.param(MOE, "parallel.expert=16", "expert groups", id="expert-groups"),
    pytest.param(MOE, "parallel.tensor=2", "parallel.sequence=true", id="moe-without-sequence-parallel"),
    pytest.param(MOE, "parallel.pipeline=1 parallel.first_stage_layers=4", "need parallel.pipeline > 1", id="stages"),
    pytest.param(DENSE, "model.num_layers=30 parallel.pipeline=4", "30 layer(s) cannot be split evenly", id="layers"),
    pytest.param(
        MOE, "parallel.first_stage_layers=20 parallel.last_stage_layers=10", "30, not model.num_layers=40", id="uneven"
    ),
    pytest.param(
        "qwen3_5_122b_a10b_pretrain_8k_256xh100",
        "parallel.first_stage_layers=6",
        "needs even stages",
        id="waves-uneven",
    ),
    pytest.param(MOE, "parallel.layers_per_virtual_stage=3", "does not divide the 20 layers", id="virtual-stages"),
    pytest.param(
        MOE, "parallel.layers_per_virtual_stage=10 train.global_batch=24", "multiple of parallel.pipeline=2", id="waves"
    ),
    pytest.param(
        MOE,
        "parallel.layers_per_virtual_stage=10 train.evaluate_sequences=8",
        "not a multiple of 8 x 2",
        id="waves-eval",
    ),
    pytest.param(
        MOE, "model.stack=hybrid parallel.layers_per_virtual_stage=10", "even pipeline stages only", id="hybrid-stages"
    ),
    pytest.param(
        TINY, "model.num_layers=6 model.prediction_layers=1", "made like the model's last layer", id="prediction"
    ),
    pytest.param(TINY, "model.stack=hybrid model.gdn=megatron", "model.stack=gpt only", id="hybrid-megatron"),
    pytest.param(TINY, "data.sequence_length=1000", "The next ones are 960 and 1024", id="sequence-length"),
    pytest.param(
        DENSE,
        "parallel.context=4 data.alignment=192",
        "not a multiple of 192",
        id="alignment-lcm",
    ),
    pytest.param(TINY, "data.sequence_length=131072", "more than model.max_position=65536", id="positions"),
    pytest.param(TINY, "data.alignment=32", "not a multiple of 64, the chunk", id="chunk"),
    pytest.param(DENSE, "train.global_batch=20", "train.global_batch=20 is not a multiple", id="global-batch"),
    pytest.param(DENSE, "train.evaluate_sequences=4", "train.evaluate_sequences=4 is not a multiple", id="evaluation"),
    pytest.param(DENSE, "train.steps=2000", "leaves nothing of the 2000 steps", id="warm-up"),
    pytest.param(DENSE, "optimizer.min_lr=1", "above optimizer.lr", id="learning-rates"),
    pytest.param(DENSE, "train.stop_after=100001", "not a step from 1 to", id="stop-after"),
    pytest.param(DENSE, "optimizer.distributed=false", "optimizer.overlap=true gathers", id="overlap"),
    pytest.param(TINY, "model.num_experts=0", "model.num_experts=0 must be at least 1", id="no-experts"),
    pytest.param(TINY, "optimizer.lr=nan", "optimizer.lr=nan must be at least 0", id="nan"),
    pytest.param(TINY, "optimizer.beta1=1", "must be less than 1", id="beta"),
    pytest.param(TINY, "train.evaluate_sequences=-2", "evaluate_sequences=-2 must be at least 0", id="negative"),
    pytest.param(TINY, "model.gdn_decay_init=[0,16]", "two rising numbers above 0", id="decay-init"),
    pytest.param(TINY, "data.split=99", "must be three numbers", id="split"),
    pytest.param(TINY, "data.split=a,b,c", "must be three numbers", id="split-words"),
    pytest.param(TINY, "data.split=100,0,0", "leaves no documents for evaluation", id="split-without-evaluation"),
    pytest.param(TINY, "data.paths=[0.3,a,b]", "a weight before each prefix", id="blend"),
    pytest.param(TINY, "checkpoint.load_step=4", "is a step of checkpoint.load", id="load-step"),
    pytest.param(DENSE, "parallel.tensor=0", "parallel.tensor=0 must be at least 1", id="zero"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_layout_that_cannot_work_is_refused(name: str, changes: str, reason: str) -> None:
    recipe = overrides.apply(catalogue.find(name), changes.split())
    with pytest.raises(checks.RecipeError) as refusal:
        checks.check(recipe)
    assert reason in str(refusal.value)


def test_all_faults_are_told_at_once() -> None:
    recipe = overrides.apply(
        catalogue.find(DENSE), ["parallel.gpus=4", "parallel.tensor=8", "optimizer.min_lr=1", "parallel.expert=2"]
    )
    with pytest.raises(checks.RecipeError) as refusal:
        checks.check(recipe)
    assert len(str(refusal.value).splitlines()) == 3  # gpus, experts, learning rates


@pytest.mark.parametrize(("tensor", "context", "sequence"), [(1, 1, False), (2, 1, True), (4, 2, True), (2, 3, False)])
def test_alignment_is_that_of_the_packed_data_set(tensor: int, context: int, sequence: bool) -> None:
    from qla_megatron.data.packed import packing_alignment

    layout = [f"parallel.tensor={tensor}", f"parallel.context={context}", f"parallel.sequence={sequence}"]
    recipe = overrides.apply(catalogue.find(TINY), layout)
    assert checks.alignment(recipe) == packing_alignment(context, tensor, sequence_parallel=sequence)
