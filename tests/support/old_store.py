"""Makes a data directory with the program of the revision it runs in, for the tests of later ones.

Usage, in a work tree of the old revision: python old_store.py DIRECTORY ARCHIVE.tar.gz

Requests that wait (in a batch and alone), requests that have ended, idempotency keys and, where the revision has a
gateway with files, an uploaded file. The queue is killed, so that what it wrote last is in RocksDB's log only.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BATCH = "b"
WAITING, CANCELLED, ALONE = 30, 10, 5
FILE_NAME, FILE_TEXT = "lines.jsonl", '{"custom_id":"a"}\n'


def key(number: int) -> str:
    """Return the idempotency key of a request."""
    return f"key-{number}"


async def fill(address: str) -> None:
    """Submit, and cancel some."""
    import penstock

    async with penstock.Client(address) as client:
        names = []
        for number in range(WAITING + CANCELLED):
            name = await client.submit(
                prompt=f"prompt {number}", batch=BATCH, idempotency_key=key(number), max_tokens=4
            )
            names.append(name)
        for number in range(ALONE):
            await client.submit(prompt=f"alone {number}", idempotency_key=key(1000 + number))
        await client.cancel(*names[:CANCELLED])


def upload(base: str) -> None:
    """Upload one file as OpenAI's clients do."""
    parts = {"purpose": ("", "batch"), "file": (f'; filename="{FILE_NAME}"', FILE_TEXT)}
    body = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n'
        for name, (more, text) in parts.items()
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(f"{base}/v1/files", f"{body}--x--\r\n".encode(), headers)
    for attempt in range(100):
        try:
            print(json.load(urllib.request.urlopen(request)))
            return
        except urllib.error.URLError:
            if attempt == 99:
                raise
            time.sleep(0.2)


def main() -> None:
    """Make the directory and pack it."""
    directory, archive = Path(sys.argv[1]), Path(sys.argv[2])
    command = [sys.executable, "-m", "services.queue", "--listen", "127.0.0.1:0", "--data-dir", str(directory)]
    queue = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert queue.stdout is not None
    address = queue.stdout.readline().rpartition(" ")[2].strip()
    asyncio.run(fill(address))
    if Path("services/gateway/files.py").exists():
        port = 17990
        flags = ["--listen", f"127.0.0.1:{port}", "--queue-address", address]
        gateway = subprocess.Popen([sys.executable, "-m", "services.gateway", *flags])
        upload(f"http://127.0.0.1:{port}")
        gateway.terminate()
        gateway.wait()
    queue.kill()
    queue.wait()
    with tarfile.open(archive, "w:gz") as packed:
        for path in sorted(directory.iterdir()):
            if path.is_file() and not re.match(r"LOG|LOCK|OPTIONS", path.name):
                packed.add(path, path.name)


if __name__ == "__main__":
    main()
