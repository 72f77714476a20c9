"""Is what the Triton fuser computes as near to the program in float64 as eager's and torch.compile's results?

    python benchmarks/fuser_correctness.py [--systems eager,compile,fuser] [--sizes small|large] [--count N] [--first
    SEED] [--smooth] [--shard i/n] [--json FILE] python benchmarks/fuser_correctness.py --join FILE ...

Random regions (`random_regions.py`) on the GPU, or, with TRITON_INTERPRET=1, on the CPU. fuser fuses single operations
as well. The deviation of a system is the largest distance of a result from the reference, as a share of the largest
number in it; integers and bools have to be equal. --smooth: results and gradients of float32 programs.

Printed: for each system, how many results it has wrong (no rounding explains them), how many are further off than
torch.compile's, than 1.5 times and twice that (beyond half a rounding of the region's coarsest type, and what a
rounding of the inputs does to the result), and the mean of its deviation over torch.compile's; then every program that
the fuser has wrong, or is further off in.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable

import torch
from random_regions import LARGE, SMALL, RandomRegion, judge, random_region

import thunder
from thunder.executors.triton_fuser import TritonFuser

SYSTEMS = ("eager", "compile", "fuser")


class Single(TritonFuser):
    """Fuses single operations as well: what PyTorch would run is no test of the fuser."""

    def should_fuse(self, region) -> bool:
        return bool(region.outputs)


def compiled(system: str, function: Callable) -> Callable:
    if system == "eager":
        return function
    if system == "compile":
        torch._dynamo.reset()
        return torch.compile(function, dynamic=False)
    return thunder.jit(function, executors=[Single("single_fuser")])


def results(region: RandomRegion, run: Callable, inputs: list[torch.Tensor], smooth: bool) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(smooth) for x in inputs]
    outputs = run(leaves)
    return [x.detach().cpu() for x in (region.with_gradients(outputs, leaves) if smooth else outputs)]


def measured(seed: int, sizes, systems: list[str], smooth: bool, device: str) -> dict:
    """What becomes of a region: for each system and result [deviation, what is wrong]."""
    region = random_region(seed, sizes, smooth)
    inputs = region.placed(device)
    exact = results(region, region.exact, [x.double() if x.is_floating_point() else x for x in inputs], smooth)
    eager = results(region, region, inputs, smooth)
    noise = (
        [region.unit / 2 + moved for moved in region.sensitivity()] if not smooth else [region.unit / 2] * len(exact)
    )
    row: dict = {
        "seed": seed,
        "noise": noise,
        "text": region.text,
        "inputs": str([(x.dtype, tuple(x.shape), x.stride()) for x in region.inputs]),
        "systems": {},
    }
    for system in systems:
        try:
            call = compiled(system, region.function)
            got = results(region, lambda leaves, call=call: call(*leaves), inputs, smooth)
            row["systems"][system] = [[d.got, d.wrong] for d in judge(got, eager, exact)]
        except Exception as error:  # noqa: BLE001  a line of the table, not the end of it
            row["systems"][system] = [[math.inf, f"{type(error).__name__}: {str(error)[:300]}"]]
    return row


def table(rows: list[dict]) -> int:
    """Prints it; how many results of the fuser are wrong."""
    systems = list(rows[0]["systems"])
    print(
        f"{len(rows)} "
        f"regions\n{'':10}{'results':>9}{'wrong':>7}{'> compile':>11}{'> 1.5 x':>9}{'> 2 x':>7}{'mean ratio':>12}"
    )
    shown = []
    for system in systems:
        wrong = results = 0
        beyond = {1.0: 0, 1.5: 0, 2.0: 0}
        ratios = []
        for row in rows:
            others = row["systems"].get("compile") or row["systems"]["eager"]
            for i, (deviation, why) in enumerate(row["systems"][system]):
                results += 1
                other = others[i][0] if i < len(others) else math.inf
                wrong += bool(why)
                for factor in beyond:
                    beyond[factor] += deviation > factor * other + row["noise"][i]
                if 0 < deviation < math.inf and 0 < other < math.inf:
                    ratios.append(math.log(max(deviation, 2.0**-53) / max(other, 2.0**-53)))
                if system == "fuser" and (why or deviation > other + row["noise"][i]):
                    shown.append((row, i, deviation, other, why))
        mean = math.exp(sum(ratios) / len(ratios)) if ratios else math.nan
        print(f"{system:10}{results:>9}{wrong:>7}{beyond[1.0]:>11}{beyond[1.5]:>9}{beyond[2.0]:>7}{mean:>12.3f}")
    for row, i, deviation, other, why in shown:
        print(
            f"\nseed {row['seed']}, result {i}: {deviation:.3g}, torch.compile {other:.3g}, noise "
            f"{row['noise'][i]:.3g} {why}\ninputs {row['inputs']}\n{row['text']}"
        )
    return sum(bool(why) for *_, why in shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--sizes", choices=("small", "large"), default="small")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--smooth", action="store_true")
    parser.add_argument("--shard", default="1/1", help="i/n: each n-th region, beginning with the i-th")
    parser.add_argument("--json", help="write the rows there, and no table")
    parser.add_argument("--join", nargs="+", help="a table of the rows in these files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.join:
        return table([row for name in options.join for row in map(json.loads, open(name))]) > 0  # noqa: SIM115
    systems = options.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"{', '.join(sorted(unknown))}: systems are {', '.join(SYSTEMS)}")
    i, n = map(int, options.shard.split("/"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    out = open(options.json, "w") if options.json else None  # noqa: SIM115
    for seed in range(options.first + i - 1, options.first + options.count, n):
        rows.append(measured(seed, LARGE if options.sizes == "large" else SMALL, systems, options.smooth, device))
        if out is not None:
            print(json.dumps(rows[-1]), file=out, flush=True)
    return table(rows) > 0 if out is None else 0


if __name__ == "__main__":
    sys.exit(main())
