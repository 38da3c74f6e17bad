"""`foresample demo`: a page to click, on this machine alone.

shows     what is shown: pictures drawn both ways, a pen that plans both ways; told as events while they run
server    the page and its events over HTTP, on the loopback only
page.*    the page
"""

from __future__ import annotations

import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from foresample.cli import options
from foresample.cli.console import echo, require_modules
from foresample.cli.targets import require_device


def demo_command(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of this machine; 0 takes any that is free.")
    ] = 8080,
    model: options.Model = None,
    device: options.Device = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open a local page: draw pictures sequentially and speculatively, and watch a pen plan. Ctrl-C ends it."""
    if device is not None:
        require_device(device)
    require_modules("diffusers", "safetensors", "PIL")
    from foresample import pretrained
    from foresample.cli.demo.server import serve
    from foresample.cli.demo.shows import Shows

    shows = Shows(pretrained.load(Path(model or pretrained.EMBEDDED), device or "cpu"))
    with serve(shows, port) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        echo(f"foresample demo: {address} (on this machine only; Ctrl-C ends it)")
        if browser:
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        with suppress(KeyboardInterrupt):  # the way it ends
            server.serve_forever()
