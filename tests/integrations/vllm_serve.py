"""Runs vLLM's API server on a free port, which this process holds and tells the descriptor of its first argument."""

from __future__ import annotations

import os
import runpy
import socket
import sys


def main() -> None:
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # vLLM sets one of them, or both, and binds it, too
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    with os.fdopen(int(sys.argv[1]), "w") as tells:
        tells.write(f"{port}\n")
    sys.argv = ["api_server", *sys.argv[2:], "--port", str(port)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
