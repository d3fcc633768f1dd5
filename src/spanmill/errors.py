"""Every error spanmill raises.

    SpanmillError
    ├── ConfigError (ValueError)      an option or configuration key that cannot work; the start stops
    ├── DecodeError (ValueError)      bytes that are no OTLP request; a sender must not retry
    ├── ListenError (OSError)         an address that cannot be listened on; a busy port
    ├── JournalError (OSError)        the journal cannot be written or read
    ├── DatasetError (OSError)        the dataset cannot be written or read
    │   └── SchemaVersionError        the dataset was written by a newer spanmill
    ├── InputError (OSError)          an input of `spanmill build` that cannot be read
    ├── ExportError (ValueError)      what is selected cannot be exported in the way that is asked for
    └── CollectorError (ConnectionError)    a collector that does not answer, or refuses what it is sent
        └── UnknownRecordError (KeyError)   a rollout, call or drain that the collector does not know

Bad spans are no errors: they are counted and quarantined with a reason.
"""


class SpanmillError(Exception):
    """Base of every error that spanmill raises."""


class ConfigError(SpanmillError, ValueError):
    """An option or configuration key is unknown or impossible."""


class DecodeError(SpanmillError, ValueError):
    """Bytes that do not parse as the OTLP message they are said to be."""


class ListenError(SpanmillError, OSError):
    """An address cannot be listened on."""


class JournalError(SpanmillError, OSError):
    """The journal cannot be written or read."""


class DatasetError(SpanmillError, OSError):
    """The dataset cannot be written or read."""


class SchemaVersionError(DatasetError):
    """The dataset has a schema version that this spanmill does not understand."""


class InputError(SpanmillError, OSError):
    """An input of `spanmill build` cannot be read."""


class ExportError(SpanmillError, ValueError):
    """What is selected cannot be exported in the way that is asked for."""


class CollectorError(SpanmillError, ConnectionError):
    """A collector that does not answer, or refuses what it is sent."""


class UnknownRecordError(CollectorError, KeyError):
    """A rollout, call or drain that the collector does not know."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it
