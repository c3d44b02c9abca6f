"""FLOPs of the models: against parameter counts, and by hand."""

from dataclasses import astuple, replace

import pytest

from qla_megatron.recipes.flops import attended_tokens, flops_at, flops_per_token
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.tiny import TINY

# Published parameters that a token passes, without the embedding table; sizes whose output layer is not the embedding.
ACTIVE_WITHOUT_EMBEDDING = {
    "qwen3_5_9b": 7_936_684_544,
    "qwen3_5_27b": 25_624_600_064,
    "qwen3_5_35b_a3b": 2_946_429_568,
    "qwen3_5_122b_a10b": 9_008_449_536,
    "qwen3_5_397b_a17b": 16_331_922_176,
}


@pytest.mark.parametrize("name", ACTIVE_WITHOUT_EMBEDDING)
def test_linear_part_is_six_times_the_active_parameters(name: str) -> None:
    model = replace(MODELS[name], prediction_layers=0)
    flops = flops_at(model, 0.0)
    gdn_layers = model.num_layers - model.num_layers // model.attention_interval
    vectors = 2 * model.num_layers * model.hidden_size + model.hidden_size  # norms of layers, the final norm
    vectors += gdn_layers * (2 * model.gdn_value_heads + model.gdn_value_dim)  # A_log, dt_bias, output norm
    vectors += (model.num_layers - gdn_layers) * 2 * model.head_dim  # norms of query and key
    matrices = ACTIVE_WITHOUT_EMBEDDING[name] - vectors
    assert flops.projections + flops.mlp + flops.vocabulary == 6 * matrices


def test_rule_and_attention_by_hand() -> None:
    # three GDN layers of 4 heads of [32, 32]; one attention layer of 4 heads, 32 wide; backward twice forward
    flops = flops_per_token(TINY, [3, 1])
    assert flops.rule == 3 * 3 * 7 * 4 * 32 * 32
    assert attended_tokens([3, 1]) == (1 + 2 + 3 + 1) / 4
    assert flops.attention == 3 * 4 * (4 * 32) * 7 / 4
    assert flops.total == sum(astuple(flops)) == 3 * flops_per_token(TINY, [3, 1], backward=False).total


def test_attention_of_a_pack_is_a_sum_of_squares() -> None:
    model = MODELS["qwen3_5_0_8b"]
    whole, packed = flops_per_token(model, [262_144]), flops_per_token(model, [4096] * 64)
    assert whole.attention / packed.attention == pytest.approx(64, rel=1e-3)
    assert replace(whole, attention=0) == replace(packed, attention=0)


def test_prediction_layer_is_a_layer_a_head_and_a_join() -> None:
    model = MODELS["qwen3_5_35b_a3b"]
    more, without = (flops_at(replace(model, prediction_layers=n), 5.0) for n in (1, 0))
    assert more.vocabulary == 2 * without.vocabulary
    assert more.mlp * model.num_layers == without.mlp * (model.num_layers + 1)
    assert more.attention * 10 == without.attention * 11
    assert more.rule == without.rule


def test_bad_lengths_are_refused() -> None:
    for lengths in ([], [0, 0], [5, -1]):
        with pytest.raises(ValueError, match="document_lengths must be"):
            attended_tokens(lengths)
