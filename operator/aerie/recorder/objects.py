"""Complete files in an object store with the API of Amazon S3.

    a folder of the pod ─► upload of each complete file ─► OBJECT below the prefix

Guarantees: a file is deleted from the pod after the store has confirmed the object. An upload that fails is repeated with the
next maintenance. Only objects whose names are those of the recorder's files are ever deleted. No error has content of a file. Not
guaranteed: files of a pod that is deleted while the store cannot be reached.

All functions block; one thread calls them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from aerie.recorder.files import PromptFolder
from aerie.recorder.retention import StoredFile, select_expired

_TIMEOUT = timedelta(seconds=20)
_RETRIES = 2


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
        endpoint = {} if bucket.endpoint is None else {"endpoint": bucket.endpoint}
        self._store = S3Store(
            bucket.name,
            prefix=bucket.prefix,
            region=bucket.region,
            access_key_id=bucket.access_key_id,
            secret_access_key=bucket.secret_access_key,
            client_options={"timeout": _TIMEOUT, "allow_http": (bucket.endpoint or "").startswith("http://")},
            retry_config={"max_retries": _RETRIES, "retry_timeout": _TIMEOUT},
            **endpoint,
        )

    def upload(self, spool: PromptFolder) -> None:
        """Upload the complete files of a folder, and delete them there. Raises OSError."""
        for file in sorted(spool.list_files(), key=lambda file: file.name):
            path = spool.folder / file.name
            try:
                obstore.put(self._store, file.name, path)
            except BaseError as error:
                raise _describe(error) from None
            path.unlink()

    def list_files(self) -> list[StoredFile]:
        """Return the objects. Raises OSError."""
        try:
            return [StoredFile(item["path"], item["size"]) for batch in obstore.list(self._store) for item in batch]
        except BaseError as error:
            raise _describe(error) from None

    def delete_expired(self, now: datetime, max_age: timedelta, max_bytes: int) -> int:
        """Delete what exceeds the retention, and return the number of objects. Raises OSError."""
        expired = select_expired(self.list_files(), now, max_age, max_bytes)
        try:
            for name in expired:
                obstore.delete(self._store, name)
        except BaseError as error:
            raise _describe(error) from None
        return len(expired)


def _describe(error: BaseError) -> OSError:
    """Return the error by its kind and first line: the rest may have addresses with signatures."""
    first_line = (str(error).splitlines() or [""])[0][:200]
    return OSError(f"{type(error).__name__}: {first_line}")
