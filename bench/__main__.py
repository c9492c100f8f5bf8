"""Everything: the microbenchmarks, then the side-by-side run. Arguments go to the side-by-side run.

The microbenchmarks come first and quickly, so that a broken build shows before the long run starts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import side_by_side

HERE = Path(__file__).resolve().parent


def main() -> int:
    arguments = sys.argv[1:]
    side_by_side.parse(arguments)  # a wrong argument must not cost a minute
    out = HERE / "out"
    out.mkdir(exist_ok=True)
    micro = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(HERE / "micro"), "-q", "-p", "no:cacheprovider"),
            *(
                "--benchmark-sort=name",
                "--benchmark-columns=min,median,iqr,rounds",
                f"--benchmark-json={out / 'micro.json'}",
            ),
        ],
        check=False,
    ).returncode
    return side_by_side.main(arguments) or micro


if __name__ == "__main__":
    sys.exit(main())
