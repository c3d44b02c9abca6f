"""Time the forward pass of the gated delta rule beside other libraries, on the same tensors in one process.

    python tools/bench_op.py --set quick|equal|table|long|all --impl ours,fla,flash_qla,flashinfer --out op_forward.csv
    python tools/bench_op.py --one 16 64 4096x8

Lengths: `4096x8` are eight documents of 4096 tokens, `24576+8192` two, `32768/8seq` eight ragged ones. Inputs: head
dimension 128, bfloat16, unit queries and keys, initial and final state, and by default a gate that decays by
logsigmoid(randn) / 16 on 75 % of the heads and not at all on the others. Times are medians of CUDA-graph replays (mode
`graph`; `event` where capture fails): of the forward pass that keeps what its backward pass wants, on one set of inputs
(fwd_ms) and on several in turn, so that none is found in the L2 cache (fwd_ms_rotated), and of the forward pass without
gradients (infer_ms), which is the same call for libraries that make no difference. Errors are relative L2 errors
against the float64 reference, over the value heads of the first and of the last key head, the larger of both calls'.
Peers are imported if they are there; nothing stands in for a missing one.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from benchmarking import FACTS, L2_BYTES, SCALE, D, Inputs, append_rows, make_inputs, parse, surroundings, time_ms
from torch import Tensor

from qla_megatron.kernels.gated_delta_rule import chunked

COLUMNS = (
    "h_qk",
    "h_v",
    "seqs",
    "impl",
    "fwd_ms",
    "fwd_ms_rotated",
    "infer_ms",
    "rel_err_o",
    "rel_err_state",
    *FACTS,
)


Forward = Callable[[Inputs], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Implementation:
    """Both calls give o and the final states; `forward` keeps what the backward pass wants."""

    forward: Forward
    infer: Forward


def ours() -> Implementation:
    from qla_megatron.kernels.gated_delta_rule.fused_forward import fused_forward

    def run(x: Inputs, save: bool) -> tuple[Tensor, Tensor]:
        o, state, _ = fused_forward(x.q, x.k, x.v, x.g, x.beta, SCALE, x.h0, True, x.cu, save=save)
        assert state is not None
        return o, state

    return Implementation(partial(run, save=True), partial(run, save=False))


def fla() -> Implementation:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        result = chunk_gated_delta_rule_fwd(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            scale=SCALE,
            initial_state=x.h0,
            output_final_state=True,
            cu_seqlens=x.cu64,
        )
        return result[1], result[3]

    return Implementation(run, run)


def flash_qla() -> Implementation:
    from flash_qla import chunk_gated_delta_rule_fwd

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        result = chunk_gated_delta_rule_fwd(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            scale=SCALE,
            initial_state=x.h0,
            cu_seqlens=x.cu,
            output_final_state=True,
        )
        return result[2], result[4]

    return Implementation(run, run)


def flashinfer() -> Implementation:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    ready: dict[int, tuple[Tensor, Tensor, int]] = {}

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        if id(x) not in ready:  # it takes the decay itself, states V-first, and the longest document on the host
            longest = int((x.cu[1:] - x.cu[:-1]).max())
            ready[id(x)] = (x.g[0].exp(), x.h0.mT.contiguous(), longest)
        alpha, h0, longest = ready[id(x)]
        o, state = chunk_gated_delta_rule(
            x.q[0],
            x.k[0],
            x.v[0],
            alpha,
            x.beta[0],
            scale=SCALE,
            initial_state=h0,
            output_final_state=True,
            cu_seqlens=x.cu,
            max_seqlen=longest,
        )
        return o[None], state.mT

    return Implementation(run, run)


IMPLEMENTATIONS = {"ours": ours, "fla": fla, "flash_qla": flash_qla, "flashinfer": flashinfer}


def reference_errors(x: Inputs, o: Tensor, state: Tensor) -> tuple[float, float]:
    h, hv = x.q.shape[2], x.v.shape[2]
    group = hv // h
    keys = sorted({0, h - 1})
    heads = [key * group + n for key in keys for n in range(group)]
    parts = [x.q[:, :, keys], x.k[:, :, keys], x.v[:, :, heads], x.g[:, :, heads], x.beta[:, :, heads]]
    want_o, want_state, *_ = chunked.forward(
        *(p.double() for p in parts), x.h0[:, heads].double(), x.cu, None, SCALE, "reference", False
    )
    return _relative(o[:, :, heads], want_o), _relative(state[:, heads], want_state)


def _relative(result: Tensor, reference: Tensor) -> float:
    return ((result.double() - reference).norm() / reference.norm()).item()


def measure(name: str, implementation: Implementation, inputs: list[Inputs]) -> dict[str, str]:
    """A row of results; nothing is timed that raises or whose errors are not finite."""
    x, forward, infer = inputs[0], implementation.forward, implementation.infer
    errors = [reference_errors(x, *call(x)) for call in ((forward,) if infer is forward else (forward, infer))]
    if not all(math.isfinite(o + state) for o, state in errors):
        raise ValueError(f"o and the states must be finite, got errors {errors}")
    for other in inputs[1:]:
        forward(other)
    once, mode, n = time_ms([lambda: forward(x)])
    rotated, _, _ = time_ms([lambda y=y: forward(y) for y in inputs])
    inferred = once if infer is forward else time_ms([lambda: infer(x)])[0]
    return {
        "impl": name,
        "fwd_ms": f"{once:.4f}",
        "fwd_ms_rotated": f"{rotated:.4f}",
        "infer_ms": f"{inferred:.4f}",
        "rel_err_o": f"{max(o for o, _ in errors):.3e}",
        "rel_err_state": f"{max(state for _, state in errors):.3e}",
        "mode": mode,
        "n": str(n),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = parse(parser, IMPLEMENTATIONS)
    facts = surroundings(args.commit, args.dirty)
    for case in args.cases:
        h, hv, seqs, lengths = case.h, case.hv, case.seqs, case.lengths
        size = sum(lengths) * (h + hv) * D * 4
        inputs = [make_inputs(h, hv, lengths, args.gate, s) for s in range(max(2, min(8, 1 + 4 * L2_BYTES // size)))]
        line = [f"{h}/{hv} {seqs}:"]
        for name, implementation in args.implementations.items():
            try:
                row = measure(name, implementation, inputs)
            except Exception as error:
                print(f"{name} at {h}/{hv} {seqs}: {error!r}"[:400], file=sys.stderr)
                continue
            row |= facts | {"h_qk": str(h), "h_v": str(hv), "seqs": seqs, "gate": args.gate}
            times = f"{row['fwd_ms']} ({row['fwd_ms_rotated']}, {row['infer_ms']}) ms"
            line.append(f"{name} {times}, error {row['rel_err_o']} {row['rel_err_state']};")
            if args.out:
                append_rows(args.out, [row], facts["commit"], COLUMNS)
        print(" ".join(line), flush=True)
        del inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
