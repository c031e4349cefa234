"""The page of a job that does not exist: the real files, and answers that a test gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from paramserver.web.guard import HEADERS
from paramserver.web.page.files import contents


@contextmanager
def page_of(answers: Mapping[str, str]) -> Iterator[str]:
    """The address of the page. ``answers``: by path below `/api/v1`, JSON; `/stream` says its answer once."""
    files, ended = contents(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/api/v1")
            name = self.path.removeprefix("/static/").removeprefix("/") or "index.html"
            if path == "/stream":
                self._answer("text/event-stream", f"data: {answers[path]}\n\n".encode(), whole=False)
                ended.wait(60.0)
            elif path in answers:
                self._answer("application/json", answers[path].encode())
            elif name in files:
                content, kind = files[name]
                self._answer(kind, content)
            else:
                self.send_error(404)

        def _answer(self, kind: str, content: bytes, whole: bool = True) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            for header, value in HEADERS.items():
                self.send_header(header, value)
            if whole:
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10.0)
