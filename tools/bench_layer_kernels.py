"""Time the kernels around the gated delta rule: convolution with norms and gates, gated norm; forward and backward.

    python tools/bench_layer_kernels.py --out results/h200/layer_kernels.csv
    python tools/bench_layer_kernels.py --one 16 32 4096x8

A kernel's rate is the bytes that it must move, over its time: each 16-bit input read once, each result written once,
32-bit gates included. Its share is that rate over the rate of a device copy of 2 GiB in the same process, read and
written bytes counted. Times are medians of CUDA-graph replays of whole ops, the sums of weight gradients included. The
convolution reads and writes rows of in_proj's output, which holds z, beta and alpha too. Small cases fit into the L2
cache: their rates say nothing about memory. Errors are relative L2 errors against the float64 reference over the first
256 tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarking import append_rows, need_gpu, parse_lengths, surroundings, time_ms

from qla_megatron.kernels.causal_conv1d import reference as convolution_reference
from qla_megatron.kernels.causal_conv1d.convolve import convolve
from qla_megatron.kernels.causal_conv1d.convolve_backward import convolve_backward
from qla_megatron.kernels.causal_conv1d.problem import Problem
from qla_megatron.kernels.gated_norm import reference as norm_reference
from qla_megatron.kernels.gated_norm.normalise import normalise, normalise_backward

D = 128
EPS = 1e-6
CASES = [(16, 32, "32768x1"), (16, 32, "4096x8"), (16, 64, "32768x1"), (2, 8, "32768x1"), (2, 4, "32768x1")]
CASES += [(16, 32, "2048x1"), (2, 8, "2048x1"), (16, 32, "262144/64seq")]
ENVIRONMENT = ("gpu", "driver", "torch", "tilelang", "date", "commit", "dirty")
COLUMNS = ("h_qk", "h_v", "seqs", "kernel", "ms", "GB_per_s", "share_of_copy", "rel_err", "mode", "n")
COLUMNS += (*ENVIRONMENT, "newest", "command")


def copy_rate() -> float:
    """Bytes read and written a second by a device copy of 2 GiB: the best of the driver's copy and of a kernel's."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(20)]
    for start, end in events:
        start.record()
        target.copy_(source)
        end.record()
    torch.cuda.synchronize()
    driver = statistics.median(start.elapsed_time(end) for start, end in events)
    kernel, _, _ = time_ms([lambda: torch.neg(source, out=target)])
    return 2 * source.nbytes / min(driver, kernel) * 1e3


def kernels_of(h: int, hv: int, lengths: list[int]) -> dict[str, tuple[Callable[[], Any], int, Callable[[], float]]]:
    """By name: the call, the bytes that it must move, and its error."""
    tokens, channels = sum(lengths), D * (2 * h + hv)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    projected = normal(tokens, 1, channels + D * hv + 2 * hv)
    dprojected = torch.empty_like(projected)
    weight, A_log, dt_bias = normal(channels, 4) / 2, *(normal(hv, dtype=torch.float32) for _ in range(2))
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    p = Problem(projected, weight, None, A_log, dt_bias, None, offsets, h, hv, True, EPS)
    grads = [normal(*x.shape, dtype=x.dtype) for x in convolve(p)]
    columns = slice(channels, channels + D * hv)
    gate, dgate = (x.transpose(0, 1)[..., columns].unflatten(-1, (hv, D)) for x in (projected, dprojected))
    o, dy = normal(1, tokens, hv, D), normal(1, tokens, hv, D)
    y, do, norm_weight = torch.empty_like(o), torch.empty_like(o), normal(D, dtype=torch.float32)

    conv_bytes, gate_bytes, norm_bytes = 2 * tokens * channels, 2 * tokens * hv * 2, 2 * tokens * hv * D
    head = min(256, lengths[0])

    def forward_error() -> float:
        results = convolution_reference.convolve_projection(
            *(x.double() for x in (projected[:head], weight)),
            *(None, A_log.double(), dt_bias.double(), h, hv, D * hv, EPS, None, False, None),
        )
        return max(relative(a[:, :head], b) for a, b in zip(convolve(p), results[:5], strict=True))

    def backward_error() -> float:
        with torch.enable_grad():  # a gradient needs the three results after it: of 256 tokens 253 are compared
            leaf = projected[:head].double().requires_grad_()
            results = convolution_reference.convolve_projection(
                *(leaf, weight.double(), None, A_log.double(), dt_bias.double()),
                *(h, hv, D * hv, EPS, None, False, None),
            )
            want = torch.autograd.grad(results[:5], leaf, [x[:, :head].double() for x in grads])[0]
        convolve_backward(p, *grads, None, dprojected, False)
        inner = torch.ones(projected.shape[2], dtype=torch.bool, device="cuda")
        inner[columns] = False
        return relative(dprojected[: head - 3, :, inner], want[: head - 3, :, inner])

    def norm_error() -> float:
        normalise(o, gate, norm_weight, EPS, True, y)
        parts = (x[:, :head].double() for x in (o, gate))
        return relative(y[:, :head], norm_reference.gated_rms_norm(*parts, norm_weight.double(), EPS, True))

    def norm_backward_error() -> float:
        with torch.enable_grad():
            leaves = [x[:, :head].double().requires_grad_() for x in (o, gate)]
            result = norm_reference.gated_rms_norm(*leaves, norm_weight.double(), EPS, True)
            want = torch.autograd.grad(result, leaves, dy[:, :head].double())
        normalise_backward(dy, o, gate, norm_weight, EPS, True, do, dgate)
        return max(relative(a[:, :head], b) for a, b in zip((do, dgate), want, strict=True))

    return {
        "convolution forward": (lambda: convolve(p), 2 * conv_bytes + 3 * gate_bytes, forward_error),
        "convolution backward": (
            lambda: convolve_backward(p, *grads, None, dprojected, False),
            3 * conv_bytes + 4 * gate_bytes,
            backward_error,
        ),
        "norm forward": (lambda: normalise(o, gate, norm_weight, EPS, True, y), 3 * norm_bytes, norm_error),
        "norm backward": (
            lambda: normalise_backward(dy, o, gate, norm_weight, EPS, True, do, dgate),
            5 * norm_bytes,
            norm_backward_error,
        ),
    }


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    return ((result.double() - reference).norm() / reference.norm()).item()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("H", "HV", "LENGTHS"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the code, where there is no git history")
    parser.add_argument("--dirty", action="store_true", help="the code differs from --commit")
    args = parser.parse_args()
    need_gpu(parser)
    cases = [(int(args.one[0]), int(args.one[1]), args.one[2])] if args.one else CASES
    facts = surroundings(args.commit, args.dirty)
    facts = {name: facts[name] for name in (*ENVIRONMENT, "command")}
    rate = copy_rate()
    rows = [{"kernel": "copy", "GB_per_s": f"{rate / 1e9:.0f}", "share_of_copy": "1"} | facts]
    print(f"copy of 2 GiB: {rate / 1e9:.0f} GB/s", flush=True)
    for h, hv, seqs in cases:
        for name, (call, size, error_of) in kernels_of(h, hv, parse_lengths(seqs)).items():
            error = error_of()
            ms, mode, n = time_ms([call])
            share = size / ms * 1e3 / rate
            row = {"h_qk": str(h), "h_v": str(hv), "seqs": seqs, "kernel": name, "ms": f"{ms:.4f}"}
            row |= {"GB_per_s": f"{size / ms / 1e6:.0f}", "share_of_copy": f"{share:.3f}", "rel_err": f"{error:.2e}"}
            rows.append(row | {"mode": mode, "n": str(n)} | facts)
            print(f"{h}/{hv} {seqs} {name}: {ms:.4f} ms, {share:.1%} of the copy, error {error:.2e}", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        append_rows(args.out, rows, facts["commit"], COLUMNS)


if __name__ == "__main__":
    main()
