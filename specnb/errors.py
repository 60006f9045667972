"""Errors that a user can act on.

Every error carries one line that names the place and the fix; the command line
prints that line and exits with code 2. Lowest layer: imports nothing of specnb.
Separate so that any layer may raise without importing another.
"""


class SpecnbError(Exception):
    """Base of all errors caused by input, environment or a failed measurement.

    The message is one line for a person: where, what, and what to do.
    """


class PlanError(SpecnbError):
    """A plan is malformed, contradicts itself, or asks for what can't be done."""


class WorkloadError(SpecnbError):
    """A workload file is missing, empty or has a bad line (``file:line: ...``)."""


class RecordError(SpecnbError):
    """A run directory is incomplete or breaks an invariant (file, column, first bad row)."""


class EngineError(SpecnbError):
    """An engine can't load or serve the model of the plan."""


class UnsupportedModelError(EngineError):
    """The in-process engine can't roll back this model's state; the message names another engine."""


class UnsupportedDraftError(SpecnbError):
    """A draft is not a chain (tree drafts have no per-position survival)."""


class DownloadError(SpecnbError):
    """A file could not be fetched or does not match its pinned sha256."""


class StorageError(SpecnbError):
    """A target can't be written, or the disk is full; what was finished before is kept."""


class NotebookError(SpecnbError):
    """A notebook's structure or parameters are wrong, or its execution failed."""
