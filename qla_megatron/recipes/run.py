"""Train by a recipe's name.

torchrun --nproc-per-node N -m qla_megatron.recipes.run NAME [path.to.field=value ...]
"""

import argparse
import json
import os
import shlex
import socket
import sys
import traceback

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from qla_megatron.recipes import build, catalogue, checks, launch, overrides, plan_table, planner
from qla_megatron.recipes.launch import torchrun_command
from qla_megatron.recipes.recipe import Recipe

EXAMPLES = """
examples:
  what there is:
      python -m qla_megatron.recipes.run --list

  one recipe in full, and the Megatron arguments that it becomes; starts nothing:
      python -m qla_megatron.recipes.run qwen3_5_9b_pretrain_4k_8xh200 --print

  what it needs: memory of a GPU, work, messages, expected time; and what to change where it does not fit:
      python -m qla_megatron.recipes.run qwen3_5_9b_pretrain_4k_8xh200 --plan data.sequence_length=65536

  a file that starts it on a cluster (torchrun, slurm or k8s):
      python -m qla_megatron.recipes.run qwen3_5_27b_pretrain_4k_16xh200 --write-launch slurm > train.sbatch

  the demo's model on two CPU processes (`make demo` makes the data first); --launch calls torchrun for you:
      python -m qla_megatron.recipes.run tiny_pretrain_2k_2xcpu --launch

  your data, a shorter run, another folder; any field that --print shows can be set, values are YAML:
      torchrun --nproc-per-node 8 -m qla_megatron.recipes.run qwen3_5_9b_pretrain_4k_8xh200 \\
          data.paths=[data/crawl] train.steps=20000 checkpoint.folder=runs/crawl

  go on: the same command again. The run folder's latest checkpoint is loaded, and losses continue as if never
  interrupted.

  start from another run's checkpoint, at step 10000:
      ... checkpoint.load=runs/crawl/checkpoints checkpoint.load_step=10000 checkpoint.folder=runs/branch

A recipe that cannot work (sizes that do not divide, too few processes, no data) is refused before anything starts,
with the reason; exit code 2.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m qla_megatron.recipes.run",
        description="Train by a recipe's name, on Megatron's own training loop.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe of --list")
    parser.add_argument("assignments", nargs="*", metavar="path.to.field=value", help="fields to change")
    parser.add_argument("--list", action="store_true", help="show all recipes")
    parser.add_argument(
        "--print", action="store_true", help="show the full recipe and its Megatron arguments, and stop"
    )
    parser.add_argument("--launch", action="store_true", help="start the processes of one machine with torchrun")
    parser.add_argument(
        "--plan", action="store_true", help="show memory, work, messages and expected time, and what to change; stop"
    )
    parser.add_argument("--document-length", type=int, metavar="TOKENS", help="--plan: tokens of a document in a pack")
    parser.add_argument("--rates", action="store_true", help="--plan: show the rates that times rest on, too")
    parser.add_argument("--json", action="store_true", help="--plan: all figures as JSON")
    parser.add_argument("--write-launch", choices=launch.KINDS, help="write a file that starts the recipe on a cluster")
    parser.add_argument("--image", default=launch.Place.image, help="--write-launch: container image")
    parser.add_argument(
        "--mount", action="append", default=[], metavar="OUTSIDE:INSIDE", help="--write-launch: a folder or claim"
    )
    parser.add_argument(
        "--kernels", default=launch.Place.kernels, metavar="FOLDER", help="--write-launch: compiled kernels, inside"
    )
    options = parser.parse_intermixed_args(arguments)
    if not options.list and options.name is None:
        parser.error("which recipe? NAME is missing; --list shows them all")
    return options


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit code: 0, or 2 where it refuses."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.list:
        print_list()
        return 0
    try:
        recipe = overrides.apply(catalogue.find(options.name), options.assignments)
        checks.check(recipe)
        if options.print:
            print_recipe(recipe, options.name, options.assignments)
            return 0
        if options.plan:
            show_plan(recipe, options)
            return 0
        if options.write_launch:
            place = launch.Place(options.image, tuple(options.mount), options.kernels)
            print(launch.write(options.write_launch, recipe, options.name, options.assignments, place), end="")
            planned = planner.plan(recipe)
            if not planned.fits:
                print(f"warning: {plan_table.verdict(planned)} --plan says what to change.", file=sys.stderr)
            return 0
        prepare(recipe, options, arguments)
    except ValueError as refusal:
        return refuse(refusal)
    from qla_megatron.recipes.train import train

    try:
        train(recipe, options.name, rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]))
    except checks.RecipeError as refusal:  # nothing else: an error inside a run keeps its traceback, on its own rank
        return refuse(refusal)
    return 0


def refuse(refusal: ValueError) -> int:
    """Say why, once, where every process knows the same."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {refusal}", file=sys.stderr)
    return 2


def prepare(recipe: Recipe, options: argparse.Namespace, arguments: list[str]) -> None:
    """Return if this is one process of the right number, ready to train; else launch, or say how."""
    import torch

    inside_torchrun = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    environment = os.environ if inside_torchrun else {"WORLD_SIZE": str(recipe.parallel.gpus)}
    checks.check_machine(recipe, environment, cuda_devices=torch.cuda.device_count())
    checks.check_folder(recipe, build.run_folder(recipe, options.name))
    if not inside_torchrun and (options.launch or recipe.parallel.gpus > 1):
        command = torchrun_command(recipe, [argument for argument in arguments if argument != "--launch"])
        one_machine = recipe.parallel.gpus <= recipe.parallel.gpus_per_node
        if not options.launch or not one_machine:
            end = "or add --launch." if one_machine else "on each of the machines; --launch serves one alone."
            start = f"this recipe needs {recipe.parallel.gpus} processes. Start them with"
            raise ValueError(f"{start}\n    {shlex.join(command)}\n{end}")
        if recipe.parallel.device == "cpu":
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for one another are slow on busy cores
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command[1:]])
    if not inside_torchrun:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    # Megatron asks for it on Hopper with tensor or context parallel: kernels are then issued in order, so that
    # communication overlaps.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def print_list() -> None:
    """A table of all recipes, by model, with parameters, sequence and what the planner says."""
    table = Table(*plan_table.SUMMARY, box=None, pad_edge=False)
    for column in (table.columns[2], *table.columns[5:]):
        column.justify = "right"
    for model, names in catalogue.by_model().items():
        plans = {name: planner.plan(catalogue.find(name)) for name in names}
        table.add_row(f"{model}: {plan_table.size_of(plans[names[0]])}", style="bold")
        for name, planned in plans.items():
            table.add_row("  " + name, *plan_table.summary_row(planned))
    _console().print(table)


def show_plan(recipe: Recipe, options: argparse.Namespace) -> None:
    """The recipe's plan, as tables or as JSON."""
    planned = planner.plan(recipe, options.document_length)
    if options.json:
        print(json.dumps(planned.as_dict(), indent=2))
        return
    plan_table.print_plan(options.name, planned, _console())
    if options.rates:
        plan_table.print_rates(_console())


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def print_recipe(recipe: Recipe, name: str, assignments: list[str]) -> None:
    """The recipe as YAML, the command that starts it and Megatron's arguments."""
    print(f"# {name}\n{OmegaConf.to_yaml(OmegaConf.structured(recipe))}")
    print("# started by\n" + shlex.join(torchrun_command(recipe, [name, *assignments])))
    print("\n# Megatron's arguments")
    line = ""
    for flag in build.megatron_flags(recipe, name):
        if flag.startswith("--") and line:
            print(line)
            line = ""
        line += (" " if line else "") + shlex.quote(flag)
    print(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run() -> None:
    """`main`, and out of the process at once after an error: a rank that still waits at its exit for communicators or
    loader processes keeps all others waiting, and torchrun from stopping them."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    run()
