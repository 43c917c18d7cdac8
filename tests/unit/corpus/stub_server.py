"""A local stand-in for an OpenAI-compatible server: it records what it is asked, waits, fails, and cuts answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Body of a request, number of requests so far → HTTP status, and (content, finish reason) of the answer. Content in
# bytes is the whole reply as it is: what a proxy, or a server that is none, may send; None is a reply that never ends.
# Where the status is an error, the finish reason is its Retry-After header.
Behaviour = Callable[[dict[str, Any], int], tuple[int, str | bytes | None, str]]


def echo(body: dict[str, Any], count: int) -> tuple[int, str, str]:
    """Answers every question with its own words, always to the end."""
    return 200, f"About {body['messages'][-1]['content']}", "stop"


@dataclass
class Stub:
    """What the server saw. `most_at_once` is the largest number of requests in flight."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self, body: dict[str, Any]) -> int:
        with self._lock:
            self.bodies.append(body)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return len(self.bodies)

    def leave(self, question: str | None) -> None:
        with self._lock:
            self._now -= 1
            if question is not None:
                self.answered.append(question)


@contextmanager
def serve(behaviour: Behaviour = echo, *, delay_seconds: float = 0.0) -> Iterator[Stub]:
    """Run the stub while the block runs."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            count = stub.arrive(body)
            time.sleep(delay_seconds)
            status, content, reason = behaviour(body, count)
            if not isinstance(content, str):
                stub.leave(None)
                self._send(status, content) if content is not None else self._trickle()
                return
            choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": content}}
            usage = {"prompt_tokens": 1, "completion_tokens": len(content.split()), "total_tokens": 1}
            answer = {
                "id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage
            }  # fmt: skip
            data = json.dumps(answer if status == 200 else {"error": {"message": content}}).encode()
            stub.leave(body["messages"][-1]["content"] if status == 200 else None)
            self._send(status, data, retry_after="" if status == 200 else reason)

        def _trickle(self) -> None:
            with suppress(OSError):  # the client has gone
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.02)

        def _send(self, status: int, data: bytes, retry_after: str = "") -> None:
            self.send_response(status)
            if retry_after:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
