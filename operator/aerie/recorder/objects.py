"""Complete files in an object store with the API of Amazon S3.

    a folder of the pod ─► upload of each complete file ─► OBJECT below the prefix

Guarantees: a file is deleted from the pod after the store has confirmed the object. It is one request, so an upload that is
interrupted leaves nothing in the bucket. An upload that fails is repeated with the next maintenance. Only objects whose names are
those of the recorder's files are ever deleted; several recorders may delete the same ones. No error has content of a file. Not
guaranteed: files of a pod that is deleted while the store cannot be reached.

All functions block; one thread calls them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from aerie.recorder.files import PromptFolder
from aerie.recorder.retention import StorageReport, StoredFile, parse_name, separate_expired

if TYPE_CHECKING:
    from obstore.store import S3Config  # the package has it for type checkers alone

_TIMEOUT = timedelta(seconds=60)
"""Limit of a request, in which a whole file has to arrive: 16 MiB in it are 2.2 Mbit/s."""
_RETRIES = 2
_DURATION = re.compile(r" in [0-9.]+(?:ns|µs|ms|s)\b")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and the prefix of the objects in it. The key is in the variables that SDKs of AWS read."""

    name: str
    prefix: str
    region: str
    endpoint: str | None = None
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)


class PromptObjects:
    """The objects below the prefix of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        config: S3Config = {
            "region": bucket.region,
            "access_key_id": bucket.access_key_id,
            "secret_access_key": bucket.secret_access_key,
        }
        if bucket.endpoint is not None:
            config["endpoint"] = bucket.endpoint
        self._store = S3Store(
            bucket.name,
            prefix=bucket.prefix,
            config=config,
            client_options={"timeout": _TIMEOUT, "allow_http": (bucket.endpoint or "").startswith("http://")},
            retry_config={"max_retries": _RETRIES, "retry_timeout": _TIMEOUT},
        )

    def upload(self, spool: PromptFolder) -> None:
        """Upload the complete files of a folder, and delete them there. Raises OSError."""
        for file in sorted(spool.list_files(), key=lambda file: file.name):
            path = spool.folder / file.name
            with _described_errors():
                obstore.put(self._store, file.name, path, use_multipart=False)
            path.unlink()

    def list_files(self) -> list[StoredFile]:
        """Return the recorder's objects. Raises OSError."""
        with _described_errors():
            batches = obstore.list(self._store)
            return [StoredFile(item["path"], item["size"]) for batch in batches for item in batch if parse_name(item["path"])]

    def delete_expired(self, now: datetime, max_age: timedelta, max_bytes: int) -> StorageReport:
        """Delete what exceeds the retention. Raises OSError."""
        retained, expired = separate_expired(self.list_files(), now, max_age, max_bytes)
        if expired:
            with _described_errors():  # an object that another recorder has deleted is none
                obstore.delete(self._store, [file.name for file in expired])
        return StorageReport(retained, len(expired))


@contextlib.contextmanager
def _described_errors() -> Iterator[None]:
    """Replace an error by its kind and first line, without times: an error is the same as before if its text is.

    The rest of the text may have addresses with signatures.
    """
    try:
        yield
    except BaseError as error:
        first_line = _DURATION.sub("", (str(error).splitlines() or [""])[0])
        raise OSError(f"{type(error).__name__}: {first_line[:300]}") from None
