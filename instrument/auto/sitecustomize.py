"""Run by every Python that starts under `spanmill run`, before its program: makes it record itself.

In a Python that spanmill is not installed for it does nothing, whatever its version. The `sitecustomize` that Python
would have run without this one runs too.
"""

import os
import sys


def _start():
    here = os.path.dirname(os.path.abspath(__file__))
    path, sys.path = sys.path, [entry for entry in sys.path if os.path.abspath(entry) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        _record()
        import sitecustomize  # noqa: F401  # pyright: ignore  the next one on the path
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)
        sys.path = path


def _record():
    try:
        from spanmill.instrument.startup import begin
    except (ImportError, SyntaxError):  # not installed for this Python, or a Python too old for it
        return
    except Exception as error:
        sys.stderr.write("spanmill: this process is not recorded: %r\n" % error)  # noqa: UP031  any Python reads it
        return
    begin()


_start()
