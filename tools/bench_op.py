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
import csv
import datetime
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from qla_megatron.kernels.gated_delta_rule import chunked

D = 128
SCALE = D**-0.5
L2_BYTES = 60 << 20
MODELS = ((16, 64), (16, 32), (16, 48), (16, 16), (2, 8), (2, 4))
SETS = {
    "quick": [(16, 64, "32768x1"), (16, 64, "4096x8"), (16, 32, "32768x1"), (16, 32, "4096x8"), (2, 8, "32768x1")],
    "table": [
        (h, hv, lengths)
        for h, hv in MODELS
        for lengths in ("32768x1", "8192x1", "2048x1", "16384x2", "4096x8", "24576+8192", "32768/8seq")
    ],
    "equal": [
        (h, hv, lengths)
        for h, hv in ((16, 64), (16, 48), (32, 32), (16, 32), (8, 32), (8, 24))
        for lengths in ("16384x2", "8192x4", "4096x8", "4096x2", "2048x4", "1024x8")
    ],
    "long": [(2, 8, "262144x1"), (16, 32, "262144x1"), (16, 16, "262144x1"), (16, 32, "262144/64seq")],
}
SETS["all"] = list(dict.fromkeys(case for cases in SETS.values() for case in cases))
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
    "gate",
    "mode",
    "n",
    "gpu",
    "driver",
    "torch",
    "tilelang",
    "fla",
    "flash_qla",
    "flashinfer",
    "date",
    "commit",
    "dirty",
    "newest",
    "command",
)


def parse_lengths(text: str) -> list[int]:
    if "/" in text:
        total, count = text.removesuffix("seq").split("/")
        return split_randomly(int(total), int(count))
    if "x" in text:
        length, count = text.split("x")
        return [int(length)] * int(count)
    return [int(part) for part in text.split("+")]


def split_randomly(total: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(42)
    cuts = torch.sort(torch.randperm(total - 1, generator=generator)[: count - 1]).values + 1
    bounds = [0, *cuts.tolist(), total]
    return [end - start for start, end in pairwise(bounds)]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor
    cu: Tensor
    cu64: Tensor


def make_inputs(h: int, hv: int, lengths: list[int], gate: str, seed: int) -> Inputs:
    T, N = sum(lengths), len(lengths)
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    q, k = (normalize(normal(1, T, h, D).float(), dim=-1).bfloat16() for _ in range(2))
    v = normal(1, T, hv, D)
    noise = normal(1, T, hv, dtype=torch.float32)
    if gate == "published":
        g = logsigmoid(noise) / 16
        g[:, :, torch.randperm(hv, device="cuda", generator=generator)[: hv - math.ceil(0.75 * hv)]] = 0
    elif gate == "zero":
        g = torch.zeros_like(noise)
    else:
        g = -torch.linspace(0.01, 16, hv, device="cuda") * softplus(noise - 2)
    beta, h0 = normal(1, T, hv, dtype=torch.float32).sigmoid(), normal(N, hv, D, D, dtype=torch.float32)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return Inputs(q, k, v, g, beta, h0, cu.int(), cu)


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


def time_ms(calls: list[Callable[[], Any]], budget_ms: float = 120) -> tuple[float, str, int]:
    """Median time of one call of several made in turn, how it was taken, and from how many replays."""

    def all_calls() -> None:
        for call in calls:
            call()

    for _ in range(3):
        all_calls()
    torch.cuda.synchronize()
    mode, run = "graph", all_calls
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_calls()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        run = graph.replay
    except Exception as error:
        mode = "event"
        print(f"no graph: {error!r}"[:200], file=sys.stderr)
        torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    n = max(5, min(200, int(budget_ms / max(_elapsed(run), 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) / len(calls), mode, n


def _elapsed(run: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


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


def surroundings(commit: str | None, is_dirty: bool) -> dict[str, str]:
    """What the results depend on. Where there is no git history, `commit` and `is_dirty` stand in for it."""

    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def release(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    if commit is None:
        commit = output("git", "rev-parse", "--short", "HEAD")
        is_dirty = bool(output("git", "status", "--porcelain", "--untracked-files=no"))
    if not commit:
        raise SystemExit("--commit must be given where there is no git history, got none")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "tilelang": release("tilelang"),
        "fla": release("flash-linear-attention"),
        "flash_qla": release("flash-qla"),
        "flashinfer": release("flashinfer-python"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "dirty": "yes" if is_dirty else "no",
        "command": " ".join(["tools/bench_op.py", *sys.argv[1:]]),
    }


def append_rows(path: Path, rows: list[dict[str, str]], commit: str, columns: Sequence[str] = COLUMNS) -> None:
    """Add rows to a results file; `newest` says which rows are of the newest commit."""
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in old + rows:
            writer.writerow(row | {"newest": "yes" if row["commit"] == commit else "no"})


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
    parser.add_argument("--set", choices=SETS, default="quick")
    parser.add_argument("--one", nargs=3, metavar=("H", "HV", "LENGTHS"))
    parser.add_argument("--impl", default="ours,fla,flash_qla,flashinfer")
    parser.add_argument("--gate", choices=("published", "zero", "trained"), default="published")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the code, where there is no git history")
    parser.add_argument("--dirty", action="store_true", help="the code differs from --commit")
    args = parser.parse_args()
    cases = [(int(args.one[0]), int(args.one[1]), args.one[2])] if args.one else SETS[args.set]
    implementations: dict[str, Implementation] = {}
    for name in args.impl.split(","):
        try:
            implementations[name] = IMPLEMENTATIONS[name]()
        except ImportError as error:
            print(f"{name} is not there: {error}", file=sys.stderr)
    facts = surroundings(args.commit, args.dirty)
    for h, hv, seqs in cases:
        lengths = parse_lengths(seqs)
        size = sum(lengths) * (h + hv) * D * 4
        inputs = [make_inputs(h, hv, lengths, args.gate, s) for s in range(max(2, min(8, 1 + 4 * L2_BYTES // size)))]
        line = [f"{h}/{hv} {seqs}:"]
        for name, implementation in implementations.items():
            try:
                row = measure(name, implementation, inputs)
            except Exception as error:
                print(f"{name} at {h}/{hv} {seqs}: {error!r}"[:400], file=sys.stderr)
                continue
            row |= facts | {"h_qk": str(h), "h_v": str(hv), "seqs": seqs, "gate": args.gate}
            times = f"{row['fwd_ms']} ({row['fwd_ms_rotated']}, {row['infer_ms']}) ms"
            line.append(f"{name} {times}, error {row['rel_err_o']} {row['rel_err_state']};")
            if args.out:
                append_rows(args.out, [row], facts["commit"])
        print(" ".join(line), flush=True)
        del inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
