"""Build every kernel ahead of time, on a machine with or without a GPU.

    python tools/warm_kernels.py                                   # into the store that runs use
    python tools/warm_kernels.py --store /image/kernels --jobs 16  # for a container, with TILELANG_CACHE_DIR set to it
    python tools/warm_kernels.py --list

A store may be shared by processes and by machines, and may be read-only once it is full. Head counts, lengths and batch
are values at run time: a dtype has the same kernels for every model and every tensor-parallel degree.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ARCHITECTURE = "sm_90a"  # the only one that the kernels are written for
DTYPES = ("bfloat16", "float16")


def build(index: int, dtypes: tuple[str, ...]) -> float:
    """Build one kernel of the list in this process; seconds."""
    from qla_megatron.kernels.catalogue import kernels
    from qla_megatron.kernels.compiled import compiled

    start = time.monotonic()
    kernel = kernels(dtypes)[index]
    compiled(ARCHITECTURE, kernel.factory, *kernel.choices)
    return time.monotonic() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--store", type=Path, help="folder of the kernels, else $TILELANG_CACHE_DIR or ~/.tilelang/cache"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"], help="bfloat16 alone if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; one a core if not given")
    parser.add_argument("--only", metavar="TEXT", help="kernels whose name holds this text")
    parser.add_argument("--list", action="store_true", help="show the kernels, build nothing")
    args = parser.parse_args(arguments)
    if args.store is not None:
        os.environ["TILELANG_CACHE_DIR"] = str(args.store.resolve())
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")

    from qla_megatron.kernels.catalogue import kernels

    dtypes = tuple(args.dtypes)
    names = [kernel.name for kernel in kernels(dtypes)]
    wanted = [n for n, name in enumerate(names) if args.only is None or args.only in name]
    if not wanted:
        parser.error(f"--only: no kernel's name holds {args.only!r}; --list shows them")
    if args.list:
        print("\n".join(names[n] for n in wanted))
        return 0

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = []
    context = get_context("spawn")
    with Progress(*columns) as progress, ProcessPoolExecutor(min(args.jobs, len(wanted)), mp_context=context) as pool:
        task = progress.add_task("building", total=len(wanted))
        futures = {pool.submit(build, n, dtypes): n for n in wanted}
        for future in as_completed(futures):
            name = names[futures[future]]
            try:
                progress.console.print(f"{future.result():6.1f} s  {name}")
            except Exception as error:
                failed.append(name)
                progress.console.print(f"failed    {name}: {error!r}"[:400])
            progress.advance(task)
    from tilelang import env

    print(f"{len(wanted) - len(failed)} kernels in {env.TILELANG_CACHE_DIR}, {time.monotonic() - start:.0f} s")
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
