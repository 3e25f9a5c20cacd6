"""A web server that keeps the messages that it gets, and the user's file of recipients."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SECRET = "hunter2secret"


@dataclass
class Inbox:
    """What has arrived."""

    address: str = ""
    """For apprise, with a secret."""
    titles: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@contextmanager
def inbox(host: str = "127.0.0.1") -> Iterator[Inbox]:
    """A service at an address of this machine."""
    found = Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.titles.append(message["title"])
            found.texts.append(message["message"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer((host, 0), Handler) as server:
        found.address = f"json://user:{SECRET}@{host}:{server.server_port}/{SECRET}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def write_recipients(directory: Path, **addresses: str) -> Path:
    """The user's file, below a directory for XDG_CONFIG_HOME."""
    directory.mkdir(exist_ok=True)
    path = directory / "torchrelay-notify.yaml"
    path.touch(0o600)
    path.write_text("".join(f"{name}: {address}\n" for name, address in addresses.items()))
    return path
