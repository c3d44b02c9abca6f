"""Time the backward pass of the gated delta rule, alone or with the forward pass, beside other libraries.

    python tools/bench_backward.py --set quick|equal|table|long|all --impl ours,fla,flash_qla --out op_backward.csv
    python tools/bench_backward.py --through autograd --one 16 64 4096x8 --out op_train.csv

Inputs, lengths, sets, gates and protocol are those of bench_op.py; the loss reaches the outputs and the final states.
Errors are relative L2 errors of every gradient against the float64 reference, over the value heads of the first and of
the last key head; dq and dk over these two key heads. The backward pass is taken by every library's low-level entry,
with what its forward pass saved; `--through autograd` times forward and backward together by the public functions, q,
k, v, g, beta and the initial state asking for gradients. Memory is the peak above inputs, saved tensors and results.
Peers are imported if they are there; nothing stands in for a missing one.
"""

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benchmarking import FACTS, SCALE, D, Inputs, append_rows, make_inputs, parse, surroundings, time_ms
from torch import Tensor

from qla_megatron.kernels.gated_delta_rule import chunked

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
ERRORS = tuple(f"rel_err_{name}" for name in GRADIENTS)
KEYS = ("h_qk", "h_v", "seqs", "impl")
BACKWARD_COLUMNS = (*KEYS, "bwd_ms", "peak_MiB", *ERRORS, *FACTS)
TRAIN_COLUMNS = (*KEYS, "fwdbwd_ms", *ERRORS, *FACTS)


@dataclass
class Given:
    """Inputs with the gradients of the outputs and of the final states."""

    x: Inputs
    do: Tensor
    dht: Tensor


# Prepares the backward pass by the forward pass, and returns it: dq, dk, dv, dg, dbeta, dh0.
Backward = Callable[[Given], Callable[[], tuple[Tensor, ...]]]
Train = Callable[..., tuple[Tensor, Tensor | None]]


def ours() -> tuple[Backward, Train]:
    from qla_megatron.kernels import chunk_gated_delta_rule
    from qla_megatron.kernels.gated_delta_rule import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    def prepare(given: Given) -> Callable[[], tuple[Tensor, ...]]:
        x = given.x
        _, _, saved = chunk_gated_delta_rule_fwd(
            x.q, x.k, x.v, x.g, x.beta, scale=SCALE, initial_state=x.h0, cu_seqlens=x.cu
        )

        def run() -> tuple[Tensor, ...]:
            r = chunk_gated_delta_rule_bwd(given.do, given.dht, saved)
            assert r.dinitial_state is not None
            return r.dq, r.dk, r.dv, r.dg, r.dbeta, r.dinitial_state

        return run

    return prepare, chunk_gated_delta_rule


def fla() -> tuple[Backward, Train]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    known = inspect.signature(chunk_gated_delta_rule_bwd).parameters

    def prepare(given: Given) -> Callable[[], tuple[Tensor, ...]]:
        x = given.x
        shared = {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta, "scale": SCALE, "initial_state": x.h0}
        shared["cu_seqlens"] = x.cu64
        sums, _, A, *_ = chunk_gated_delta_rule_fwd(**shared, g=x.g, output_final_state=True)
        arguments = shared | {"g": sums, "A": A, "do": given.do, "dht": given.dht}
        arguments = {name: value for name, value in arguments.items() if name in known}

        def run() -> tuple[Tensor, ...]:
            dq, dk, dv, dbeta, dg, dh0, *_ = chunk_gated_delta_rule_bwd(**arguments)
            return dq, dk, dv, dg, dbeta, dh0

        return run

    return prepare, chunk_gated_delta_rule


def flash_qla() -> tuple[Backward, Train]:
    from flash_qla import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    def prepare(given: Given) -> Callable[[], tuple[Tensor, ...]]:
        x = given.x
        shared = {"scale": SCALE, "initial_state": x.h0, "cu_seqlens": x.cu}
        saved = chunk_gated_delta_rule_fwd(
            x.q, x.k, x.v, x.g, x.beta, output_final_state=True, enable_fwd_cp_cache=True, **shared
        )

        def run() -> tuple[Tensor, ...]:
            dq, dk, dv, dbeta, dg, dh0 = chunk_gated_delta_rule_bwd(
                x.q, x.k, x.v, saved[0], x.beta, saved[1], given.do, dht=given.dht, cp_cache=saved[5], **shared
            )
            return dq, dk, dv, dg, dbeta, dh0

        return run

    return prepare, chunk_gated_delta_rule


IMPLEMENTATIONS = {"ours": ours, "fla": fla, "flash_qla": flash_qla}


def through_autograd(train: Train, given: Given, offsets: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward pass by a library's public function."""
    x = given.x
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta, x.h0)]

    def run() -> tuple[Tensor, ...]:
        q, k, v, g, beta, h0 = leaves
        o, state = train(
            q, k, v, g=g, beta=beta, scale=SCALE, initial_state=h0, output_final_state=True, cu_seqlens=offsets
        )
        return torch.autograd.grad((o, state), leaves, (given.do, given.dht))

    return run


def errors(given: Given, got: tuple[Tensor, ...]) -> dict[str, str]:
    x = given.x
    h, hv = x.q.shape[2], x.v.shape[2]
    group = hv // h
    keys = sorted({0, h - 1})
    heads = [key * group + n for key in keys for n in range(group)]
    parts = [t.double() for t in (x.q[:, :, keys], x.k[:, :, keys], x.v[:, :, heads], x.g[:, :, heads])]
    parts.append(x.beta[:, :, heads].double())
    *_, inverses, gates, states = chunked.forward(*parts, x.h0[:, heads].double(), x.cu, None, SCALE, "reference", True)
    want = chunked.backward(
        given.do[:, :, heads].double(),
        given.dht[:, heads].double(),
        *parts,
        inverses,
        gates,
        states,
        x.cu,
        None,
        SCALE,
        "reference",
    )
    found = {}
    for name, a, b in zip(GRADIENTS, got, want, strict=True):
        part = a[:, heads] if name == "dh0" else a[:, :, keys if name in ("dq", "dk") else heads]
        found[f"rel_err_{name}"] = f"{((part.double() - b).norm() / b.norm()).item():.3e}"
    return found


def peak_mib(run: Callable[[], Any]) -> int:
    """The peak of memory above what was there and what stays."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) >> 20
    del results
    return peak


def measure(name: str, backward: Backward, train: Train, given: Given, is_through_autograd: bool) -> dict[str, str]:
    if is_through_autograd:
        run = through_autograd(train, given, given.x.cu64 if name == "fla" else given.x.cu)
    else:
        run = backward(given)
    row = {"impl": name} | errors(given, run())
    if not is_through_autograd:
        row["peak_MiB"] = str(peak_mib(run))
    time, row["mode"], n = time_ms([run])
    return row | {"fwdbwd_ms" if is_through_autograd else "bwd_ms": f"{time:.4f}", "n": str(n)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", choices=("backward", "autograd"), default="backward")
    args = parse(parser, IMPLEMENTATIONS)
    is_through_autograd = args.through == "autograd"
    columns = TRAIN_COLUMNS if is_through_autograd else BACKWARD_COLUMNS
    facts = surroundings(args.commit, args.dirty)
    for case in args.cases:
        h, hv, seqs = case.h, case.hv, case.seqs
        x = make_inputs(h, hv, case.lengths, args.gate, 0)
        generator = torch.Generator("cuda").manual_seed(1)
        do = torch.randn(x.v.shape, device="cuda", dtype=x.v.dtype, generator=generator)
        given = Given(x, do, torch.randn(len(x.cu) - 1, hv, D, D, device="cuda", generator=generator) / 8)
        line = [f"{h}/{hv} {seqs}:"]
        for name, (backward, train) in args.implementations.items():
            try:
                row = measure(name, backward, train, given, is_through_autograd)
            except Exception as error:
                print(f"{name} at {h}/{hv} {seqs}: {error!r}"[:400], file=sys.stderr)
                continue
            row |= facts | {"h_qk": str(h), "h_v": str(hv), "seqs": seqs, "gate": args.gate}
            line.append(f"{name} {row.get('bwd_ms') or row['fwdbwd_ms']} ms,")
            line.append("errors " + " ".join(row[column] for column in ERRORS) + ";")
            if args.out:
                append_rows(args.out, [row], facts["commit"], columns)
        print(" ".join(line), flush=True)
        del x, given
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
