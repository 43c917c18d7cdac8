"""A folder behind HTTP on this machine, as object storage is seen: whole files only, and as unreliable as asked."""

from __future__ import annotations

import functools
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Store:
    """What was asked for (`asked`), and what goes wrong: so many 503s, so many connections cut half-way, per file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, ""
        self.asked: list[str] = []
        self.refuse: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments: object, store: Store) -> None:
        self.store = store
        super().__init__(*arguments, directory=str(store.folder))  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name, store = self.path.lstrip("/"), self.store
        store.asked.append(name)
        if store.refuse[name]:
            store.refuse[name] -= 1
            self.send_error(503)
        elif store.cut[name]:
            store.cut[name] -= 1
            data = (store.folder / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
        else:
            super().do_GET()


@contextmanager
def serving(folder: Path) -> Iterator[Store]:
    """Serve a folder while the block runs; `store.url` is where."""
    store = Store(folder)
    handler = functools.partial(_Handler, store=store)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store.url = f"http://127.0.0.1:{server.server_port}"
        yield store
        server.shutdown()
