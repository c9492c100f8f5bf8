"""vLLM's own HTTP server as a child process, and its answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_models import NEW_TOKENS, PROMPTS

from fastsync.integrations.vllm import HttpClient

HERE = Path(__file__).parent
START_S = 400.0
CALL_S = 60.0
LENGTH = 1024


def environment() -> dict[str, str]:
    """For everything of vLLM's: on few cores, without a network, the probe at hand."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])),
    }


class Server:
    """A server of the model whose configuration is in `folder`, on a port of the system's choice."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "server.log"
        command = [
            sys.executable,
            "-u",
            str(HERE / "vllm_serve.py"),
            "--model",
            str(folder),
            "--served-model-name",
            "m",
        ]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
        command += ["--max-model-len", str(LENGTH), "--max-num-seqs", "4", "--host", "127.0.0.1"]
        command += ["--weight-transfer-config", '{"backend": "fastsync"}']
        command += ["--worker-extension-cls", "vllm_probe.Probe"]
        told, tells = os.pipe()
        command[3:3] = [str(tells)]
        with self._log.open("wb") as log, os.fdopen(told) as port_of:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment()},
                pass_fds=[tells],
                start_new_session=True,
            )
            os.close(tells)
            port = port_of.readline().strip()
        assert port, f"vLLM's process ended at once:\n{self.log()[-6000:]}"
        self.client = HttpClient(f"http://127.0.0.1:{port}", CALL_S)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.client.request("health", method="GET")
                break
            except Exception:
                gone = self._process.poll() is not None
                assert not gone and time.monotonic() < deadline, f"vLLM did not start:\n{self.log()[-6000:]}"
                time.sleep(0.5)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(20)
        except (subprocess.TimeoutExpired, ProcessLookupError):
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait(20)

    def answers(self) -> list[list[int]]:
        """As `vllm_models.answers`, the server's."""
        body = {"model": "m", "prompt": PROMPTS, "max_tokens": NEW_TOKENS, **_GREEDY}
        choices = self.client.request("v1/completions", body)["choices"]
        return [c["token_ids"] for c in sorted(choices, key=lambda c: c["index"])]

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[list[int]]:
        """The tokens of one request as they come."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "stream": True, **_GREEDY}
        request = urllib.request.Request(
            f"{self.client.base_url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            for line in answer:
                text = line.decode().strip()
                if text.startswith("data: {"):
                    for choice in json.loads(text[6:])["choices"]:
                        yield choice["token_ids"] or []

    def rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls a method of every worker."""
        answer = self.client.request("collective_rpc", {"method": method, "args": list(args), "timeout": timeout})
        found: list[Any] = answer["results"]
        return found


_GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
