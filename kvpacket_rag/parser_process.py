"""The parsers of HTML and PDF in a process of their own, whose memory and time are bounded.

A file of a few kilobytes can unfold to any size or keep a parser busy for ever, and no check of the file alone tells.
Here the system ends what goes too far, the file is left out with the reason, and the next one is read.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Self
from weakref import finalize

from kvpacket_rag.errors import DocumentError
from kvpacket_rag.readers import Content

SUFFIXES = (".html", ".htm", ".pdf")
_MAX_BYTES = 2 << 30  # of memory for the process; 100 MB of plain HTML need less
_SECONDS = 600  # that a file may take; of honest ones, a page takes a tenth of a second
_READY = b"ready\n"
# The path comes first, before anything is imported: nothing is taken from the folder where this happens to run.
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from kvpacket_rag.parser_process import serve; serve()"


class ParserProcess:
    """Parses files one after another in a process that is started when it is first needed.

    Each file is sent as a line of JSON, which says its suffix and its size, and its bytes; what comes back is a line
    of JSON, which says kind, title and size, and the text. Nothing of it is unpickled or run. Memory and time are
    bounded on Unix; other systems only keep the parser apart.

    Args:
        max_bytes: of memory; a file that needs more is refused.
        seconds: that a file may take.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, seconds: int = _SECONDS) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: finalize[..., ParserProcess] | None = None  # also where nobody closed it
        self._lock = Lock()

    def parse(self, suffix: str, data: bytes) -> Content:
        """The text of a file; threads take turns.

        Args:
            suffix: one of ``SUFFIXES``.
            data: of the file.

        Raises:
            DocumentError: it cannot be read, or not within the bounds; completes the sentence "the file …".
        """
        with self._lock:
            return self._parse(suffix, data)

    def close(self) -> None:
        """End the process, which keeps nothing."""
        if self._ending is not None:
            self._ending()
        self._process = self._ending = None

    def _parse(self, suffix: str, data: bytes) -> Content:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # then the answer tells
            process.stdin.write(_line(suffix=suffix, size=len(data), seconds=self._seconds) + data)
            process.stdin.flush()
        line = process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"size": 1}
        text = process.stdout.read(found["size"])
        if len(text) < found["size"]:
            raise DocumentError(self._why_it_ended())
        if found.get("ended"):
            self.close()
        if "error" in found:
            raise DocumentError(found["error"])
        return Content(found["kind"], text.decode("utf-8", "surrogatepass"), found["title"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [*filter(None, sys.path), str(Path(__file__).resolve().parent.parent)]
        command = [sys.executable, "-c", _CODE, str(self._max_bytes), *paths]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet)
            self._ending = finalize(self, _kill, self._process)
        except OSError as error:
            raise DocumentError(f"needs a process of its own to parse it, which cannot be started ({error})") from error
        if self._process.stdout is None or self._process.stdout.readline() != _READY:
            raise DocumentError(f"needs a process of its own to parse it, which ended with {self._end()} at its start")
        return self._process

    def _end(self) -> int:
        """The exit status of the process, which has ended, or closed its output and is about to."""
        assert self._process is not None
        status = self._process.wait()
        self.close()
        return status

    def _why_it_ended(self) -> str:
        if (status := self._end()) == -getattr(signal, "SIGALRM", 0):
            return f"takes longer than {self._seconds} seconds to be parsed; split it, unless it is made to harm"
        return f"makes its parser end with exit status {status}; it is damaged, or made to harm"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def serve() -> None:
    """What the process does: parse what comes in until nothing does."""
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    _bound_memory(int(sys.argv[1]))
    from kvpacket_rag.parsers import PARSERS

    answers.write(_READY)
    answers.flush()
    for line in asked:
        about = json.loads(line)
        _bound_time(about["seconds"])
        answer, text = _answer(PARSERS[about["suffix"]], asked.read(about["size"]))
        _bound_time(0)
        answers.write(_line(**answer, size=len(text)) + text)
        answers.flush()
        if "ended" in answer:
            break


def _answer(parse: Callable[[bytes], Content], data: bytes) -> tuple[dict[str, Any], bytes]:
    """What to tell of a file, and its text."""
    try:
        content = parse(data)
        return {"kind": content.kind, "title": content.title}, content.text.encode("utf-8", "surrogatepass")
    except DocumentError as error:
        return {"error": str(error)}, b""
    except MemoryError:  # after it, little works as it did
        needed = f"needs more than {int(sys.argv[1]) >> 20:,} MB of memory to be parsed; split it"
        return {"error": needed, "ended": True}, b""
    except Exception as error:  # parsers stumble over damaged files in any way there is
        return {"error": f"cannot be parsed ({type(error).__name__}: {error})"}, b""


def _bound_memory(max_bytes: int) -> None:
    with suppress(ImportError, OSError, ValueError):  # not everywhere
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _bound_time(seconds: int) -> None:
    """The system ends this process after so many seconds, whatever it is at; 0 for no more bound."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _line(**about: object) -> bytes:
    return json.dumps(about).encode() + b"\n"
