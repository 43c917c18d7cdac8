"""S28: what the profile stage measures and writes."""

from __future__ import annotations

import http.server
import json
import threading
import time

import pytest

from pipeline.artifact import read_json
from pipeline.chain import resolve
from pipeline.config import load
from pipeline.decoding.portions import grid, rows_of
from pipeline.decoding.sps import synthetic
from pipeline.speculative.scheduler import SpsTable
from pipeline.stages import profile
from tests.stages.prepared import context_of, prepare


def test_s28_full_grid_has_every_size_to_64_then_steps_of_a_tenth():
    sizes = grid("full", 512)
    assert sizes[:64] == list(range(1, 65)) and sizes[-1] == 512
    assert all(b <= a * 1.1 for a, b in zip(sizes[63:], sizes[64:], strict=False))
    assert grid("full", 5) == [1, 2, 3, 4, 5]
    assert grid("powers_of_two", 40) == [1, 2, 4, 8, 16, 32, 40]


def test_measured_table_is_served_and_says_how_it_was_made(tmp_path):
    config = prepare(tmp_path / "work", "profile.max_batch_tokens=12", "profile.grid=full", "profile.repeats=2")
    context = context_of(config, "profile")
    context.artifact.manifest_path.unlink()
    profile.run(context)
    found = read_json(context.artifact.path / "sps.json")
    assert found["sample_batch_tokens"] == list(range(1, 13)) and found["max_batch_tokens"] == 12
    assert min(found["sample_steps_per_sec"]) > 0
    assert found["source"].startswith("measured") and found["lookup"].startswith("floor")
    assert found["context_length"] == 64 and found["rows"] == [rows_of(size) for size in range(1, 13)]
    SpsTable.read(found)


@pytest.mark.parametrize("name", ["constant", "sqrt", "staircase"])
def test_synthetic_curves_say_that_they_are(tmp_path, name):
    config = prepare(tmp_path / "work", f"profile.synthetic={name}")
    context = context_of(config, "profile")
    profile.run(context)
    found = read_json(context.artifact.path / "sps.json")
    assert found["source"] == f"synthetic: {name}" == context.artifact.manifest()["source"]
    assert synthetic(name, [1, 16, 17])["sample_steps_per_sec"][0] == 100.0


class Streaming(http.server.BaseHTTPRequestHandler):
    """A server that streams one token every 5 ms and notes how many streams ran at once."""

    lock, running, peaks = threading.Lock(), 0, set()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and body["stream"] and body["ignore_eos"]
        with self.lock:
            type(self).running += 1
            self.peaks.add(self.running)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            time.sleep(0.005)
            piece = {"id": "x", "object": "text_completion", "created": 0, "model": "m",
                     "choices": [{"index": 0, "text": "on ", "finish_reason": None}]}  # fmt: skip
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        with self.lock:
            type(self).running -= 1

    def log_message(self, *args): ...


def test_a_running_server_is_profiled_by_load(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = prepare(
        tmp_path / "work", f"profile.endpoint={url}", "profile.max_batch_tokens=4", "profile.grid=powers_of_two",
        "profile.repeats=1",
    )  # fmt: skip
    context = context_of(config, "profile")
    profile.run(context)
    server.shutdown()
    found = read_json(context.artifact.path / "sps.json")
    assert found["sample_batch_tokens"] == [1, 2, 4] and url in found["source"]
    assert Streaming.peaks == {1, 2, 3, 4}, "as many streams at once as the largest batch has tokens, and no more"
    assert 0 < min(found["sample_steps_per_sec"]) <= max(found["sample_steps_per_sec"]) < 200


def test_a_server_and_this_process_have_tables_of_their_own(tmp_path):
    servers = ([], ["profile.endpoint=http://a/v1"], ["profile.endpoint=http://b/v1"])
    paths = {resolve(load("configs/debug.yaml", [f"work_dir={tmp_path}", *words]))["profile"].path for words in servers}
    assert len(paths) == 3
