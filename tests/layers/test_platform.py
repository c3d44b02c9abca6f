"""Ranks on the CPU: what stands in for CUDA, the parallel groups, failures and hangs. All of it in processes apart."""

import time

import pytest
import torch
import torch.distributed as dist

from qla_megatron.testing.distributed import RankError, launch_torchrun, run_ranks
from qla_megatron.testing.platform import available_platform, use_cpu


def sizes_and_sum(offset: int) -> tuple[int, int, int, float]:
    from megatron.core import parallel_state as ps

    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_context_parallel_world_size(),
        ps.get_data_parallel_world_size(),
        total.item(),
    )


def test_ranks_have_groups_and_return_values() -> None:
    assert run_ranks(sizes_and_sum, 4, 10, context_parallel=2) == [(2, 2, 1, 46.0)] * 4
    assert run_ranks(sizes_and_sum, 4, 10, tensor_parallel=2) == [(2, 1, 2, 46.0)] * 4


@pytest.mark.slow
def test_torchrun_gives_the_same() -> None:
    assert launch_torchrun(sizes_and_sum, 2, 10, context=2) == run_ranks(sizes_and_sum, 2, 10, context_parallel=2)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_first_failure_and_hang_are_named() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed.*fail_on_rank_1.*KeyError: 'the reason'"):
        run_ranks(fail_on_rank_1, 2)
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[1\] took longer.*hang_on_rank_1"):
        run_ranks(hang_on_rank_1, 2, timeout=8)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        run_ranks(lambda: None, 2)
    with pytest.raises(ValueError, match=r"multiple of tensor .* = 4, got 6"):
        run_ranks(fail_on_rank_1, 6, tensor_parallel=2, context_parallel=2)


def cuda_stand_ins() -> list[float]:
    import megatron.core.fusions.fused_bias_swiglu as fused
    from megatron.core import tensor_parallel

    use_cpu()  # again: without effect
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    x = torch.zeros(2)
    assert x.cuda() is x
    assert x.type() == "torch.cuda.FloatTensor"
    assert not hasattr(fused.swiglu, "_torchdynamo_orig_callable")
    before = torch.get_rng_state()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        drawn = torch.rand(3).tolist()
    assert torch.equal(torch.get_rng_state(), before)
    return drawn


def test_stand_ins_for_cuda() -> None:
    if available_platform() == "cuda":
        with pytest.raises(RuntimeError, match="a CUDA device is available"):
            use_cpu()
        pytest.skip("stand-ins for CUDA need a machine without a GPU")
    first, second = run_ranks(cuda_stand_ins, 2)
    assert first != second  # tensor parallel ranks draw their own numbers
    assert torch.cuda.device_count() == 0  # nothing is left here
