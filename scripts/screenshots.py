#!/usr/bin/env python3
"""Take screenshots of the documentation site in a headless Chromium.

The site is shown at 400 and 1400 pixels in both themes: look at the pictures before a release.

  scripts/docs.sh && python3 scripts/screenshots.py             # writes build/docs/screenshots/*.png
  python3 scripts/screenshots.py cpp results#training-speed     # these pages alone

Chromium is Debian's package `chromium`. Its windows are at least 500 pixels wide, so each page is
shown in a frame of the wanted width.
"""

import argparse
import functools
import http.server
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE, OUT = ROOT / "build" / "docs" / "html", ROOT / "build" / "docs" / "screenshots"
PAGES = ("index", "pytorch", "results", "api/python", "api/c")
# Pages in a state that a reader brings about: the name of the file, the page, a script in it.
STATES = {
    "search": ("search.html?q=router", ""),
    "navigation": ("pytorch.html", "document.getElementById('__navigation').checked = true"),
}
SIZES = {400: 1600, 1400: 1200}  # width and height
FRAME = """<!doctype html><title>frame</title><style>
body {{ margin: 0; background: #888 }} iframe {{ border: 0; width: {width}px; height: {height}px }}
</style><iframe></iframe><script>
localStorage.setItem("theme", "{theme}");
const frame = document.querySelector("iframe");
frame.onload = () => frame.contentWindow.eval({script});
frame.src = {page};
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve the site, and the frames around its pages."""

    frame = ""

    def do_GET(self):
        if not self.path.startswith("/frame"):
            return super().do_GET()
        body = self.server.frame.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def shoot(server, chromium, file, page, script, theme, width):
    height = SIZES[width]
    server.frame = FRAME.format(width=width, height=height, theme=theme, page=repr(page),
                                script=repr(script))  # fmt: skip
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={max(width, 500)},{height}",
            "--virtual-time-budget=8000", f"--screenshot={file}",
            f"http://localhost:{server.server_port}/frame.html",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    print(file)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("pages", nargs="*", help=f"instead of {', '.join(PAGES)}")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("screenshots.py: error: chromium is not installed: apt-get install chromium")
    if not (SITE / "index.html").exists():
        sys.exit("screenshots.py: error: the site is not built: scripts/docs.sh")
    shots = {} if args.pages else dict(STATES)
    for page in args.pages or PAGES:
        path, _, anchor = page.partition("#")
        name = urllib.parse.quote(page.replace("/", "-").replace("#", "-"))
        script = "document.documentElement.style.scrollBehavior = 'auto';"
        shots[name] = (f"{path}.html", script + f"location.hash = '{anchor}'" if anchor else "")
    args.out.mkdir(parents=True, exist_ok=True)
    handler = functools.partial(Handler, directory=SITE)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, (page, script) in shots.items():
            for width in SIZES:
                for theme in ("light", "dark"):
                    file = args.out.resolve() / f"{name}-{width}-{theme}.png"
                    shoot(server, chromium, file, page, script, theme, width)
        server.shutdown()


if __name__ == "__main__":
    main()
