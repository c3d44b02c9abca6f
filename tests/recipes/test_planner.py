"""The planner: published parameters, memory against what autograd saves, time and layouts by their laws.

Every recipe's plan has to fit its hardware. What a real run needs is compared on a GPU machine.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qla_megatron.recipes import catalogue, checks, flops, memory, overrides, parameters, planner, step_time
from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.recipe import Recipe
from qla_megatron.testing.distributed import run_ranks

TOLERANCE = 0.01  # of bytes saved by a layer: offsets, places of tokens and roots that no table lists
NINE = "qwen3_5_9b_pretrain_4k_8xh200"
MOE = "qwen3_5_35b_a3b_pretrain_4k_16xh100"
BIG = "qwen3_5_397b_a17b_pretrain_4k_256xh200"
HOPPER = [name for name in catalogue.RECIPES if not name.startswith("tiny")]


def changed(name: str, *assignments: str) -> Recipe:
    """The recipe with assignments, which has to be one that can work."""
    recipe = overrides.apply(catalogue.find(name), list(assignments))
    checks.check(recipe)
    return recipe


# --- parameters ---

PUBLISHED = {  # text model, one prediction block, parameters that a token passes
    "qwen3_5_0_8b": (752_393_024, 20_452_864, 752_393_024),
    "qwen3_5_2b": (1_881_825_088, 60_828_160, 1_881_825_088),
    "qwen3_5_4b": (4_205_751_296, 120_599_552, 4_205_751_296),
    "qwen3_5_9b": (8_953_803_264, 243_290_624, 8_953_803_264),
    "qwen3_5_27b": (26_895_998_464, 424_699_392, 26_895_998_464),
    "qwen3_5_35b_a3b": (34_660_610_688, 844_640_768, 3_454_988_928),
    "qwen3_5_122b_a10b": (122_111_526_912, 2_523_679_232, 9_771_288_576),
    "qwen3_5_397b_a17b": (396_346_350_336, 6_595_568_128, 17_349_040_896),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    model = MODELS[name]
    counted = parameters.text_model(model).total, parameters.prediction(model).total, parameters.active(model)
    assert counted == PUBLISHED[name]


@pytest.mark.parametrize("name", HOPPER)
def test_stages_hold_every_layer_once(name: str) -> None:
    recipe = catalogue.find(name)
    m, last = recipe.model, recipe.parallel.pipeline - 1
    stages = parameters.stage_layers(recipe)
    assert sorted(i for stage in stages for chunk in stage for i in chunk) == list(range(m.num_layers))
    here = sum((parameters.of_stage(recipe, stage) for stage in range(last + 1)), parameters.Parameters())
    whole = parameters.text_model(m) + m.prediction_layers * parameters.prediction(m)
    copies = 1 if last and (m.tie_embeddings or m.prediction_layers) else 0
    assert here == whole + copies * parameters.embedding(m)


def test_processes_hold_what_megatron_builds() -> None:
    layouts = {}  # recipes that split a model alike are built once
    for name in HOPPER:
        p = catalogue.find(name).parallel
        waves = p.layers_per_virtual_stage is not None
        layouts[catalogue.find(name).model, p.tensor, p.pipeline, p.expert, waves] = name
    probe = str(Path(__file__).with_name("stage_parameters.py"))
    command = [sys.executable, "-W", "ignore", probe, *layouts.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    for (recipe, *built), name in zip(json.loads(done.stdout.splitlines()[-1]), layouts.values(), strict=True):
        cheap = replace(
            catalogue.find(name),
            model=replace(catalogue.find(name).model, **recipe["model"]),
            parallel=replace(catalogue.find(name).parallel, **recipe["parallel"]),
        )
        for stage, count in zip((0, cheap.parallel.pipeline - 1), built, strict=True):
            here = parameters.of_stage(cheap, stage)
            shared_out = (
                here.split + here.split_float32
            ) / cheap.parallel.tensor + here.experts / cheap.parallel.expert
            assert count == shared_out + here.whole + here.whole_float32, (name, stage)


# --- activations ---


def test_layers_save_what_the_tables_say() -> None:
    tokens, documents, layouts = 8192, 4, [(1, 1), (2, 1), (1, 2)]  # whole, tensor and sequence, context parallel
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("saved_bytes.py")), str(tokens)]
    command += [str(documents), *(f"{tensor}x{context}" for tensor, context in layouts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    model = MODELS["qwen3_5_0_8b"]
    for (tensor, context), saved in zip(layouts, json.loads(done.stdout.splitlines()[-1]), strict=True):
        n = memory.Tokens(tokens / context, tokens / context / tensor, documents / context)
        mlp = total(memory.dense_mlp(model, n, tensor))
        gdn = total(memory.gdn_mixer(model, n, tensor)) + mlp
        attention = total(memory.attention_mixer(model, n, tensor, context=context)) + mlp
        assert gdn == pytest.approx(saved["gdn"], rel=TOLERANCE), (tensor, context)
        assert attention == pytest.approx(saved["attention"], rel=TOLERANCE), (tensor, context)


def total(named: object) -> float:
    return sum(size for _, size in named)  # type: ignore[attr-defined]


def bytes_saved_by_experts(name: str, tokens: int) -> int:
    """Bytes that one mixture of experts saves on the CPU, its norm aside, which takes another way there."""
    import contextlib
    import io
    import os

    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    from qla_megatron.recipes import build

    recipe = overrides.apply(catalogue.find(name), ["parallel.gpus=1", "parallel.tensor=1", "parallel.sequence=false"])
    os.environ["WORLD_SIZE"] = "1"
    sys.argv[1:] = [*build.megatron_flags(recipe, "test"), "--use-cpu-initialization", "--bf16"]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args, {})
    model = GPTModelBuilder(build.model_config(recipe, args)).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hidden = torch.randn(tokens, 1, recipe.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = model.decoder.layers[0].mlp(hidden)
    assert kept is not None
    return sum(storage.nbytes() for place, storage in storages.items() if place not in weights)


def test_experts_save_what_the_table_says() -> None:
    name, tokens = "tiny_moe_pretrain_2k_2xcpu", 1024
    [saved] = run_ranks(bytes_saved_by_experts, 1, name, tokens)
    model, n = catalogue.find(name).model, memory.Tokens(tokens, tokens, 1)
    named = dict(memory.mixture_of_experts(model, n, 1))
    del named["norm: float32 copy and root"]
    assert sum(named.values()) == pytest.approx(saved, rel=TOLERANCE)


def test_recompute_keeps_less() -> None:
    peaks = [
        planner.plan(changed(NINE, f"train.recompute={kind}")).peak_gib for kind in ("none", "norms", "mlp", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    recipe = changed(NINE, "train.recompute=full")
    [stage] = memory.of_stages(recipe)
    assert stage.activations["layer inputs"] == 32 * 2 * 4096 * 4096  # layers, bf16, hidden size, tokens


def test_logits_are_whole_without_the_chunked_loss() -> None:
    whole = memory.of_stages(changed(NINE, "train.chunked_loss=false", "model.prediction_layers=0"))[0].loss
    assert whole == 4096 * 248_320 * (2 + 4)  # bf16 logits and their float32 softmax
    long = [f"data.sequence_length={2**18}", "train.recompute=full"]
    chunked = memory.of_stages(changed(NINE, *long))[0].loss
    assert chunked < 0.1 * memory.of_stages(changed(NINE, *long, "train.chunked_loss=false"))[0].loss


def test_optimizer_is_shared_out_where_it_is_distributed() -> None:
    alone = memory.of_stages(changed(NINE, "optimizer.distributed=false", "optimizer.overlap=false"))[0]
    shared = memory.of_stages(changed(NINE))[0]
    count = PUBLISHED["qwen3_5_9b"][0] + PUBLISHED["qwen3_5_9b"][1]
    assert alone.optimizer == pytest.approx(12 * count, rel=1e-4)  # the few float32 parameters have no second copy
    assert shared.optimizer == pytest.approx(alone.optimizer / 8)
    assert shared.weights == pytest.approx(2 * count, rel=1e-4)
    assert shared.gradients == 4 * count
    assert memory.of_stages(changed(NINE, "precision.reduce_gradients_in_fp32=false"))[0].gradients == pytest.approx(
        2 * count, rel=1e-4
    )


def test_experts_are_shared_out_over_their_own_groups() -> None:
    recipe = changed(BIG)  # 256 GPUs: eight stages of 32, which are four groups of eight expert parallel processes
    assert memory.optimizer_shards(recipe) == (16, 4)


def test_pipeline_stages_hold_micro_batches_in_flight() -> None:
    recipe = changed(BIG)
    assert [memory.in_flight(recipe, stage) for stage in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    one = replace(recipe, train=replace(recipe.train, global_batch=16))
    assert {memory.in_flight(one, stage) for stage in range(8)} == {1}
    waves = changed("qwen3_5_122b_a10b_pretrain_8k_256xh100")  # four stages of three chunks, 32 micro-batches
    assert memory.in_flight(waves, 0) == (2 * 3 + 2 * 4 + 1) / 3
    assert memory.in_flight(waves, 3) == (2 * 4 + 1) / 3


# --- messages and time ---


def test_messages_by_hand() -> None:
    alone = step_time.sent_bytes(changed("qwen3_5_0_8b_pretrain_4k_1xh200"))
    assert not any(alone.values())
    sent = step_time.sent_bytes(changed(NINE))
    count = PUBLISHED["qwen3_5_9b"][0] + PUBLISHED["qwen3_5_9b"][1]
    assert sent == {
        "gradients": 4 * count * 7 / 8, "parameters": 2 * count * 7 / 8, "tensor": 0, "context": 0, "pipeline": 0,
        "expert": 0,
    }  # fmt: skip
    sent = step_time.sent_bytes(changed(MOE))
    tokens = 64 * 4096  # 64 micro-batches a GPU
    assert sent["pipeline"] == 2 * 2 * 2048 * tokens
    layers, ways = 20 + 1, 2 * 3  # a stage and its prediction block; there and back, in three passes (one again)
    assert sent["expert"] == layers * ways * 8 * 2 * 2048 * tokens * 7 / 8


def test_time_grows_as_it_must() -> None:
    base = planner.plan(changed(NINE))
    assert base.time.total == pytest.approx(sum(vars(base.time).values()))
    assert 0.3 < base.mfu < 0.75  # type: ignore[operator]
    twice = planner.plan(changed(NINE, "train.global_batch=512"))
    assert twice.time.products == 2 * base.time.products
    assert planner.plan(changed(NINE, "train.recompute=full")).time.products > 1.2 * base.time.products
    assert planner.plan(changed(NINE, "model.prediction_layers=0")).time.products < base.time.products
    long = changed("qwen3_5_9b_extend_256k_32xh200")
    whole, packed = planner.plan(long, 2**18), planner.plan(long, 2**13)
    assert whole.time.attention / packed.time.attention == pytest.approx(32, rel=1e-3)
    assert whole.flops_per_token.attention / packed.flops_per_token.attention == pytest.approx(32, rel=1e-3)


def test_layer_takes_what_was_measured() -> None:
    # Megatron's GDN mixer, hidden size 2048, 16 and 32 heads, 32,768 tokens on an H200: its products took 8.4 ms.
    model = replace(MODELS["qwen3_5_35b_a3b"], num_layers=4)
    flops_of_mixer = flops.gdn_flops(model).projections
    assert 3 * 32_768 * flops_of_mixer / step_time.RATES["gemm"].value == pytest.approx(8.4e-3, rel=0.05)
    # torch's varlen_attn, 16 heads of 256, one document of 32,768 tokens: 28.4 ms forward, 113 ms with backward.
    scores = flops.attention_flops(model, 32_769 / 2).attention * 32_768
    forward, backward = (step_time.RATES[f"attention_{way}"].value for way in ("forward", "backward"))
    assert scores / forward == pytest.approx(28.4e-3, rel=0.02)
    assert scores / forward + 2 * scores / backward == pytest.approx(113e-3, rel=0.02)


# --- fitting ---


@pytest.mark.parametrize("name", HOPPER)
def test_every_recipe_fits_with_room_to_spare(name: str) -> None:
    planned = planner.plan(catalogue.find(name))
    assert planned.fits
    assert planned.room_gib is not None
    assert planned.peak_gib <= 0.95 * planned.room_gib
    p = planned.recipe.parallel
    assert max(p.tensor * p.context, p.expert) <= p.gpus_per_node


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(NINE, ["data.sequence_length=65536"], id="long"),
        pytest.param(NINE, ["train.chunked_loss=false", "data.sequence_length=16384"], id="whole-logits"),
        pytest.param(MOE, ["train.recompute=none", "parallel.expert=1"], id="experts-not-spread"),
    ],
)
def test_changes_are_proposed_that_do_fit(name: str, changes: list[str]) -> None:
    recipe = changed(name, *changes)
    assert not planner.plan(recipe).fits
    proposed = planner.alternatives(recipe)
    assert proposed
    for assignments, promised in proposed:
        better = overrides.apply(recipe, assignments)
        checks.check(better)
        assert better == promised.recipe
        assert planner.plan(better).fits
        for left_out in set(assignments) - {"parallel.sequence=true"}:  # each is needed; that one comes with tensor
            rest = [assignment for assignment in assignments if assignment != left_out]
            partly = overrides.apply(recipe, rest)
            with_rest = not planner._is_refused(partly) and planner.has_room(partly)
            assert not with_rest or not rest, assignments


def test_nothing_is_proposed_where_nothing_helps() -> None:
    recipe = changed("qwen3_5_0_8b_pretrain_4k_1xh200")
    huge = replace(
        recipe, model=replace(MODELS["qwen3_5_27b"], num_layers=640), parallel=replace(recipe.parallel, device="h100")
    )
    checks.check(huge)
    assert planner.alternatives(huge) == []


def test_tables_of_the_documentation_are_current() -> None:
    tool = Path(__file__).parents[2] / "tools" / "write_recipe_table.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
