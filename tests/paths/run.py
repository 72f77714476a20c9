"""Print the paths that each program of the corpus is compiled to: `python -m tests.paths.run`.

The exit status says whether any was wrong. `tests.properties.run --paths 5000` runs generated programs.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import torch

from tests.paths.compared import beside_eager
from tests.paths.corpus import HOST, PROGRAMS
from tests.paths.test_corpus import BY_THE_ORIGINAL, CALLS


def corpus(table: dict) -> int:
    """Prints the paths of each program. Returns how many programs are wrong."""
    wrong = 0
    for name, (make, arguments) in table.items():
        g = torch.Generator().manual_seed(0)
        try:
            calls = [arguments(g) for _ in range(CALLS)]
            compiled = beside_eager(make, calls, fallback="eager" if name in BY_THE_ORIGINAL else "error")
            print(f"{name}: {len(compiled.programs)} paths in {CALLS} calls")
        except AssertionError as error:
            wrong += 1
            print(f"{name}: WRONG {error}")
    print(f"{len(table)} programs, wrong {wrong}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", action="store_true", help="programs without host code; by default both")
    parser.add_argument("--host", action="store_true", help="programs with host code")
    options = parser.parse_args()
    everything = not (options.corpus or options.host)
    warnings.simplefilter("ignore")
    wrong = corpus(PROGRAMS) if options.corpus or everything else 0
    wrong += corpus(HOST) if options.host or everything else 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
