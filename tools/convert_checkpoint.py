"""Convert Qwen3.5 and Qwen3.6 checkpoints between Hugging Face and Megatron. `convert_checkpoint.py --help` teaches."""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qla_megatron.recipes.models import MODELS
from qla_megatron.recipes.overrides import nearest
from qla_megatron.recipes.upstream import quiet_imports

EXAMPLES = """
examples:
  released weights -> a checkpoint that any recipe of the model loads, in any parallel layout:
      python tools/convert_checkpoint.py import --hf models/Qwen3.5-9B --megatron checkpoints/qwen3_5_9b
      torchrun ... -m qla_megatron.recipes.run qwen3_5_9b_pretrain_4k_8xh200 checkpoint.load=checkpoints/qwen3_5_9b ...

  do both models compute the same? (needs transformers, and 4 bytes a parameter of memory):
      python tools/convert_checkpoint.py check --hf models/Qwen3.5-9B --megatron checkpoints/qwen3_5_9b

  a run's latest checkpoint -> Hugging Face; names, dtypes, tokenizer and vision tower are the reference's:
      python tools/convert_checkpoint.py export --megatron runs/crawl/checkpoints --reference models/Qwen3.5-9B \\
          --hf out/Qwen3.5-9B-crawl

  a model trained from scratch has no vision tower: config.json and a tokenizer are enough as the reference:
      python tools/convert_checkpoint.py export --megatron runs/scratch/checkpoints --reference configs/Qwen3.5-0.8B \\
          --hf out/scratch --text-only

One process, no GPU; memory for one tensor group (import) or one shard (export). Nothing is overwritten, and a target
appears only when it is complete. Exit code 0: done, every tensor is accounted for in the table; 1: the check found a
difference; 2: something is missing, truncated, of another shape or unexplained, and the message names it.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split(". ")[0] + ".", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export|check")
    form = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    one = commands.add_parser("import", help="Hugging Face -> Megatron", **form)
    two = commands.add_parser("export", help="Megatron -> Hugging Face", **form)
    three = commands.add_parser("check", help="compare the logits of both", **form)
    for command, text in ((one, "directory to read"), (two, "directory to write"), (three, "directory to compare")):
        command.add_argument("--hf", required=True, type=Path, metavar="DIR", help=f"Hugging Face {text}")
    one.add_argument("--megatron", required=True, type=Path, metavar="DIR", help="folder of checkpoints to write")
    for command in (two, three):
        command.add_argument(
            "--megatron", required=True, type=Path, metavar="DIR", help="folder of checkpoints, or one checkpoint"
        )
        command.add_argument("--step", type=int, help="the checkpoint of that step (default: the latest)")
    one.add_argument("--model", help=f"refuse another model than this one: {', '.join(MODELS)}")
    one.add_argument("--mtp", choices=["keep", "drop"], default="keep", help="the multi-token prediction layer")
    one.add_argument(
        "--stack", choices=["gpt", "hybrid"], default="gpt", help="Megatron's model class, the recipe's model.stack"
    )
    one.add_argument(
        "--padded-vocab-size", type=int, metavar="ROWS", help="of the recipe, where it is not the model's vocabulary"
    )
    two.add_argument(
        "--reference", required=True, type=Path, metavar="DIR", help="Hugging Face directory of the original model"
    )
    two.add_argument(
        "--mtp",
        choices=["keep", "reference", "drop"],
        default="keep",
        help="the multi-token prediction layer: the checkpoint's (default), the reference's, or none",
    )
    two.add_argument("--text-only", action="store_true", help="write the language model alone, without vision")
    two.add_argument("--shard-gib", type=float, default=5.0, help="size of a safetensors file (default: 5)")
    three.add_argument("--tokens", type=int, default=96, help="tokens of each of two sequences (default: 96)")
    three.add_argument("--tolerance", type=float, default=1e-4, help="largest relative error (default: 1e-4)")
    options = parser.parse_args(arguments)
    if options.command == "import" and options.model not in (None, *MODELS):
        one.error(f"no model {options.model!r}.{nearest(options.model, list(MODELS))} There are {', '.join(MODELS)}")
    for name, lowest in (("padded_vocab_size", 1), ("shard_gib", 0.0), ("tokens", 1), ("tolerance", 0.0)):
        if (value := getattr(options, name, None)) is not None and not value >= lowest:
            parser.error(f"--{name.replace('_', '-')} must be at least {lowest}, got {value}")
    return options


def convert(options: argparse.Namespace, console: Console) -> int:
    # Megatron takes seconds to import; --help should not.
    from qla_megatron.recipes.hugging_face.to_hf import export_checkpoint
    from qla_megatron.recipes.hugging_face.to_megatron import import_checkpoint

    if options.command == "import":
        report = import_checkpoint(
            options.hf,
            options.megatron,
            console,
            name=options.model,
            mtp=options.mtp,
            stack=options.stack,
            padded_vocab_size=options.padded_vocab_size,
        )
        where = options.megatron
    else:
        report = export_checkpoint(
            options.megatron,
            options.reference,
            options.hf,
            console,
            step=options.step,
            mtp=options.mtp,
            text_only=options.text_only,
            shard_bytes=int(options.shard_gib * 2**30),
        )
        where = options.hf
    table = Table("what", "tensors", "GiB", "", title=str(where), title_justify="left", box=None)
    for part in report:
        table.add_row(part.what, f"{part.tensors:,}", f"{part.nbytes / 2**30:.3f}", part.fate)
    console.print(table)
    return 0


def check(options: argparse.Namespace, console: Console) -> int:
    from qla_megatron.recipes.hugging_face.check import compare

    found = compare(
        options.hf,
        options.megatron,
        console,
        step=options.step,
        length=options.tokens,
        tolerance=options.tolerance,
    )
    table = Table("what", "relative error", "allowed", "", box=None)
    for line in found:
        table.add_row(line.what, f"{line.error:.2e}", f"{line.tolerance:.0e}", "ok" if line.passes else "DIFFERENT")
    console.print(table)
    return 0 if all(line.passes for line in found) else 1


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    options = parse(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: memory for whole models is the host's
    quiet_imports()
    warnings.filterwarnings("ignore", module="megatron")  # of training: what is slower without which package
    logging.getLogger("megatron").setLevel(logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        return (check if options.command == "check" else convert)(options, console)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
