"""Checkpoints of the layer: saved at one tensor parallel size, loaded at another, with Adam's moments."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layer_cases import (
    COLUMNS,
    HIDDEN,
    PARTS,
    load,
    make_config,
    make_layer,
    make_megatrons_layer,
    random_weights,
    share,
    split_groups,
)
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from torch import Tensor

from qla_megatron.layers.projections import HeadSizes, join_from_ranks, split_over_ranks
from qla_megatron.recipes import upstream
from qla_megatron.testing.distributed import run_ranks

FLOAT32 = {"A_log", "dt_bias", "out_norm.weight"}
LAYERS = ("ours", "megatron")
KINDS = ("float32", "bfloat16", "distributed")
MOMENTS = ("exp_avg", "exp_avg_sq")
TOKENS, PREFIX = 64, "decoder.layers.0.self_attention."


class Training:
    """The layer under Megatron's data parallel wrapper and Adam.

    Kinds: float32, bfloat16, and bfloat16 with the distributed optimizer.
    """

    def __init__(self, which: str, kind: str, seed: int) -> None:
        upstream.apply()  # without it, the distributed optimizer cannot load where Transformer Engine is missing
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        bf16, self.distributed = kind != "float32", kind == "distributed"
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        config = make_config(tensor_model_parallel_size=self.ranks, bf16=bf16, deterministic_mode=True)
        make = make_layer if which == "ours" else make_megatrons_layer
        self.layer = make(config, split_groups(), conv_bias=True)
        load(self.layer, random_weights(seed), self.rank, self.ranks)
        if bf16:
            self.layer.bfloat16()
        settings = {"use_distributed_optimizer": self.distributed}
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=bf16, **settings)
        self.model = DistributedDataParallel(config, reduction, self.layer)
        adam = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=bf16, clip_grad=1.0, **settings)
        self.optimizer = get_megatron_optimizer(adam, [self.model])

    def step(self) -> None:
        """One step on fixed data, so that every parameter has moments."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        self.model(x, None)[0].float().square().mean().backward()
        finalize_model_grads([self.model])
        if type(self.layer) is MegatronGatedDeltaNet:  # which Megatron does not do without sequence parallelism
            dist.all_reduce(self.layer.out_norm.weight.main_grad)
        succeeded, _, _ = self.optimizer.step()
        assert succeeded

    def sharded(self, is_loading: bool) -> dict[str, object]:
        """Model and optimizer as Megatron saves them."""
        model = self.layer.sharded_state_dict(prefix=PREFIX)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"} if self.distributed else None
        optimizer = self.optimizer.sharded_state_dict(dict(model), is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def state(self) -> dict[str, Tensor]:
        """Every master parameter and moment of this rank, by name."""
        states = {}
        [adam] = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for name, parameter in self.layer.named_parameters():
            if self.distributed:
                found = adam._get_main_param_and_optimizer_states(parameter)
                found = {key: found[key].view(parameter.shape) for key in ("param", *MOMENTS)}
            else:
                main = getattr(parameter, "main_param", parameter)
                found = {"param": main, **{moment: adam.optimizer.state[main][moment] for moment in MOMENTS}}
            states |= {f"{name}:{key}": tensor.detach().clone() for key, tensor in found.items()}
        return states


def gathered(name: str, piece: Tensor) -> Tensor:
    """The whole of a parameter or moment from the pieces of all tensor parallel ranks."""
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece.contiguous())
    name = name.split(":")[0]
    if name in COLUMNS:
        return torch.cat(pieces, dim=1)
    if name not in PARTS:
        assert all(torch.equal(piece, other) for other in pieces), f"{name} differs between ranks"
        return piece
    local = [part // len(pieces) for part in PARTS[name]]
    return torch.cat([torch.cat(shares) for shares in zip(*(p.split(local) for p in pieces), strict=True)])


def _save(folder: Path) -> None:
    for which, kind in itertools.product(LAYERS, KINDS):
        training, name = Training(which, kind, seed=0), f"{which} {kind}"
        for _ in range(2):
            training.step()
        whole = {name: gathered(name, piece) for name, piece in training.state().items()}
        if dist.get_rank() == 0:
            (folder / name).mkdir()
            torch.save(whole, folder / f"{name}.pt")
        dist.barrier()
        dist_checkpointing.save(training.sharded(is_loading=False), str(folder / name))


def _load(folder: Path, writer: str, reader: str) -> None:
    for kind in KINDS:
        training, where = Training(reader, kind, seed=7), f"{kind}, from {writer} to {reader}"
        loaded = dist_checkpointing.load(training.sharded(is_loading=True), str(folder / f"{writer} {kind}"))
        training.layer.load_state_dict({name.removeprefix(PREFIX): t for name, t in loaded["model"].items()})
        training.optimizer.load_state_dict(loaded["optimizer"])
        whole, state = torch.load(folder / f"{writer} {kind}.pt"), training.state()
        assert set(state) == set(whole)
        for key, piece in state.items():
            name, what = key.split(":")
            expected = share(name, whole[key], training.rank, training.ranks)
            if kind == "bfloat16" and reader == "ours" != writer and name in FLOAT32 and what == "param":
                expected = expected.bfloat16().float()  # the model's copy; the distributed optimizer loads its own
            assert torch.equal(piece, expected), f"{key}, {where}, tensor parallel size {training.ranks}"
            assert piece.dtype == torch.float32
        for name, parameter in training.layer.named_parameters():
            is_full = reader == "ours" and name in FLOAT32
            assert parameter.dtype == (torch.float32 if is_full else training.dtype), f"{name}, {where}"
            assert torch.equal(parameter, state[f"{name}:param"].to(parameter.dtype)), f"{name}, {where}"
        training.step()  # and it goes on


def test_parameters_and_moments_reshard(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path)
    for ranks in (4, 1):
        run_ranks(_load, ranks, tmp_path, "ours", "ours")
    run_ranks(_load, 1, tmp_path, "megatron", "ours")
    run_ranks(_load, 1, tmp_path, "ours", "megatron")


def _save_with_biases(folder: Path) -> None:
    layer = make_layer(make_config(tensor_model_parallel_size=dist.get_world_size()), split_groups(), bias=True)
    load(layer, random_weights(), dist.get_rank(), dist.get_world_size())
    dist_checkpointing.save(layer.sharded_state_dict(prefix=PREFIX), str(folder))


def _load_with_biases(folder: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = make_layer(make_config(tensor_model_parallel_size=ranks), split_groups(), bias=True)
    loaded = dist_checkpointing.load(layer.sharded_state_dict(prefix=PREFIX), str(folder))
    for name, whole in random_weights().items():
        if name != "conv1d.bias":
            assert torch.equal(loaded[PREFIX + name], share(name, whole, rank, ranks)), name


def test_biases_reshard(tmp_path: Path) -> None:
    run_ranks(_save_with_biases, 2, tmp_path)
    run_ranks(_load_with_biases, 4, tmp_path)


class NormAndLayer(torch.nn.Module):
    """As in a model, a half-precision parameter comes first, and shares the group without weight decay with A_log."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.layer = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16)), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.weight, None)[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_distributed_optimizer_saves_each_parameter_as_itself(ranks: int) -> None:
    run_ranks(_save_each_as_itself, ranks, tensor_parallel=1)


def _save_each_as_itself() -> None:
    config = make_config(bf16=True, deterministic_mode=True)
    layer = make_layer(config, split_groups())
    load(layer, random_weights(0), 0, 1)
    settings = {"use_distributed_optimizer": True}
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    model = DistributedDataParallel(config, reduction, NormAndLayer(layer).bfloat16())
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=True, **settings)
    [optimizer] = get_megatron_optimizer(adam, [model]).chained_optimizers
    model(torch.randn(TOKENS, 1, HIDDEN).bfloat16()).float().square().mean().backward()
    finalize_model_grads([model])
    assert optimizer.step()[0]

    state = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    names = {id(p): name for name, p in model.named_parameters()}
    for number, buffer in enumerate(optimizer.buffers):
        [saved] = state[number].values()
        for parameter, (start, end, _) in buffer.param_index_map.items():
            own = saved["param"][start:end].view(parameter.shape).to(parameter.dtype)
            assert torch.equal(own, parameter), names[id(parameter)]


def test_no_weight_decay_for_gates_and_norms() -> None:
    run_ranks(_check_weight_decay, 1)


def _check_weight_decay() -> None:
    training = Training("ours", "float32", seed=0)
    names = {id(p): name for name, p in training.layer.named_parameters()}
    decayed = {
        names[id(p)] for group in training.optimizer.param_groups if group["wd_mult"] > 0 for p in group["params"]
    }
    assert decayed == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}


def test_rows_split_and_join() -> None:
    sizes = HeadSizes(key_heads=4, value_heads=8, key_dim=3, value_dim=5)
    rows = torch.randn(sum(sizes.projection), 2)
    for ranks in (1, 2, 4):
        shards = split_over_ranks(rows, sizes.projection, ranks)
        assert all(torch.equal(s, share_of_rows(rows, sizes, r, ranks)) for r, s in enumerate(shards))
        assert torch.equal(join_from_ranks(shards, sizes.projection), rows)
    with pytest.raises(ValueError, match=r"parts must be multiples of ranks = 8, got \(12, 12"):
        split_over_ranks(rows, sizes.projection, 8)
    with pytest.raises(ValueError, match="parts must add up to the rows, 120, got"):
        split_over_ranks(rows, sizes.convolution, 2)
    with pytest.raises(
        ValueError, match="linear_num_key_heads must be a multiple of the tensor parallel size = 3, got 4"
    ):
        sizes.share(3, "the tensor parallel size")


def share_of_rows(rows: Tensor, sizes: HeadSizes, rank: int, ranks: int) -> Tensor:
    """Written head by head, to check the block-wise code."""
    starts, taken = 0, []
    for heads, width in (
        (sizes.key_heads, sizes.key_dim),
        (sizes.key_heads, sizes.key_dim),
        (sizes.value_heads, sizes.value_dim),
        (sizes.value_heads, sizes.value_dim),
        (sizes.value_heads, 1),
        (sizes.value_heads, 1),
    ):
        for head in range(heads):
            if head * ranks // heads == rank:
                taken.append(rows[starts + head * width : starts + (head + 1) * width])
        starts += heads * width
    return torch.cat(taken)
