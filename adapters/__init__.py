"""Pure code from spans to rows: dialects, identity, checks, order, merge, rewards."""

from spanmill.adapters.adapt import Adapted, adapt
from spanmill.adapters.keys import keys, signal
from spanmill.adapters.options import Options

__all__ = ["Adapted", "Options", "adapt", "keys", "signal"]
