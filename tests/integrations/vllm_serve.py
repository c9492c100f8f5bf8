"""Runs vLLM's API server on a free port, which it prints first: bound here, and handed on as the server's own socket."""

from __future__ import annotations

import runpy
import socket
import sys


def main() -> None:
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # vLLM sets one of them, or both, and binds it, too
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    print(port, flush=True)
    sys.argv = ["api_server", *sys.argv[1:], "--port", str(port)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
