"""enable(), disable(): Megatron's own specs name our layer, and nothing else changes."""

import logging

import pytest
from megatron.core.models.gpt import experimental_attention_variant_module_specs as gpt_specs
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.transformer.spec_utils import ModuleSpec

import qla_megatron
from qla_megatron import switch
from qla_megatron.layers import GatedDeltaNet
from qla_megatron.layers.spec import LocalBackend


class Config:
    """What Megatron's function reads of a configuration."""

    normalization = "RMSNorm"
    experimental_attention_variant = "gated_delta_net"


def gpt_module() -> type:
    """The module that Megatron's own GPT spec names for the variant."""
    spec = gpt_specs.get_experimental_attention_variant_module_spec(Config(), backend=LocalBackend())
    assert spec.metainfo == {"fuse_input_layernorm": True}
    return spec.module


def hybrid_module() -> type:
    """The module that Megatron's own hybrid stack builds for the symbol G."""
    return hybrid_layer_specs.hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention.module


@pytest.fixture(autouse=True)
def _switched_off_afterwards():
    yield
    switch.disable()


def test_enable_and_disable(caplog: pytest.LogCaptureFixture) -> None:
    assert gpt_module() is hybrid_module() is MegatronGatedDeltaNet
    submodules = hybrid_layer_specs.hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention.submodules
    with caplog.at_level(logging.INFO, logger="qla_megatron.switch"):
        for _ in range(2):  # a second call does nothing
            qla_megatron.enable()
            assert switch.is_enabled()
            assert gpt_module() is hybrid_module() is GatedDeltaNet
    assert [record.getMessage() for record in caplog.records] == [
        "megatron.core.ssm.gated_delta_net.gdn.GatedDeltaNet replaced by "
        "qla_megatron.layers.gated_delta_net.GatedDeltaNet in Megatron's GPT and hybrid layer specs"
    ]
    assert hybrid_layer_specs.hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention.submodules is submodules
    for _ in range(2):
        qla_megatron.disable()
        assert not switch.is_enabled()
        assert gpt_module() is hybrid_module() is MegatronGatedDeltaNet


def test_modelopts_hybrid_spec_too() -> None:
    from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec

    qla_megatron.enable()
    stack = get_hybrid_stack_modelopt_spec(local_core_attention=True)
    assert stack.submodules.gdn_layer.submodules.self_attention.module is GatedDeltaNet


def test_name_that_converters_look_up() -> None:
    assert GatedDeltaNet.__name__ == MegatronGatedDeltaNet.__name__ == "GatedDeltaNet"
    assert issubclass(GatedDeltaNet, MegatronGatedDeltaNet)


def test_swap_gdn_is_public() -> None:
    swapped = qla_megatron.swap_gdn(ModuleSpec(module=MegatronGatedDeltaNet, params={"conv_bias": True}))
    assert swapped == ModuleSpec(module=GatedDeltaNet, params={"conv_bias": True})


def test_a_version_without_known_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_places", list)
    with pytest.raises(RuntimeError, match="found no GatedDeltaNet of Megatron to replace"):
        qla_megatron.enable()
    assert not switch.is_enabled()
