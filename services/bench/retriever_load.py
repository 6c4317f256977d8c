"""A retriever as a process of its own, and the plainest HTTP client that can load it."""

from __future__ import annotations

import asyncio
import json
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from leeway.replay.errors import LeewayError

START_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 30.0


@contextmanager
def retriever_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`leeway retriever serve` on a free port, and its address; ended at the end of the context."""
    command = [sys.executable, "-m", "leeway.services.cli", "retriever", "serve"]
    process = subprocess.Popen(
        [*command, str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        # The line comes when the server listens; the end of the pipe without one, when it failed.
        is_told, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if is_told else ""
        found = re.search(r"http://\S+(?=/retrieve)", line)
        if found is None:
            raise LeewayError(
                f"leeway retriever serve did not listen within {START_TIMEOUT_S:g} s; its message, "
                "if it left one, is above"
            )
        yield process, found[0]
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Connection:
    """HTTP as far as the bench needs it: a client library would take as long as the server."""

    def __init__(
        self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._host, self._reader, self._writer = host, reader, writer

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to http://host:port."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        return cls(parts.netloc, reader, writer)

    async def post(self, path: str, body: object) -> bytes:
        """The answer's body; LeewayError for another status than 200."""
        content = json.dumps(body).encode()
        return await self._send(
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )

    async def get(self, path: str) -> bytes:
        """The same for a GET."""
        return await self._send(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())

    async def _send(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = re.search(r"content-length: (\d+)", head)
        assert length is not None, head
        answer = await self._reader.readexactly(int(length[1]))
        if " 200 " not in head.partition("\r\n")[0]:
            raise LeewayError(f"the retriever answered {head.splitlines()[0]}: {answer[:200]!r}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
