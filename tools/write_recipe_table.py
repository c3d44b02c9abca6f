"""Write the tables of docs/recipes.md: all recipes with the planner's figures, and the rates that times rest on.

python tools/write_recipe_table.py            write them
python tools/write_recipe_table.py --check    say whether they are current (exit code 1: they are not)
"""

import argparse
import re
import sys
from pathlib import Path

from qla_megatron.recipes import catalogue, plan_table, planner, step_time

DOCUMENT = Path(__file__).parents[1] / "docs" / "recipes.md"


def tables() -> dict[str, str]:
    """The generated parts of the document, by name."""
    return {"recipes": _recipes(), "rates": _rates()}


def _recipes() -> str:
    parts = []
    for model, names in catalogue.by_model().items():
        plans = {name: planner.plan(catalogue.find(name)) for name in names}
        if plans[names[0]].room_gib is None:  # a CPU's: nothing to plan
            continue
        rows = [[f"`{name}`", *plan_table.summary_row(plan)] for name, plan in plans.items()]
        parts.append(f"**{model}**: {plan_table.size_of(plans[names[0]])}\n\n{_table(plan_table.SUMMARY, rows)}")
    return "\n\n".join(parts)


def _rates() -> str:
    rows = [(name, f"{rate.value:g}", rate.unit, rate.source) for name, rate in step_time.RATES.items()]
    return _table(("rate", "value", "unit", "source"), rows)


def _table(header: tuple[str, ...], rows: list) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_tables(text: str) -> str:
    """The document with its generated parts replaced.

    Raises:
        ValueError: a part has no place in the document.
    """
    for name, table in tables().items():
        begin, end = f"<!-- {name}: written by tools/write_recipe_table.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{DOCUMENT} has no place for the table {name}: {begin} ... {end}")
        block = f"{begin}\n\n{table}\n\n{end}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    before = DOCUMENT.read_text(encoding="utf-8")
    after = with_tables(before)
    if options.check:
        if after != before:
            print(f"{DOCUMENT} is not current: run python tools/write_recipe_table.py", file=sys.stderr)
        return int(after != before)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
