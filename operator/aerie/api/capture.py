"""Capture of users' prompts, from which a drafter can be trained for the requests that are served.

It is off unless the resource has it. Whoever writes it confirms that users have consented, and names the basis. The model checks
the confirmation itself, although the schema does too: a capture that cannot be read counts as none (rollout/facts).

Patterns are RE2. The API server compiles them when a resource is applied, by Go's package, which has nearly the same syntax. RE2
needs time that grows linearly with the text, so no prompt can block the recorder. Not guaranteed: that the recorder accepts each
pattern that the API server accepts. RE2 limits the memory of a pattern, so long repetitions of large classes fail there.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from aerie.api.engine import EnvVar, ResourceRequirements
from aerie.api.types.base import DurationRange, ExactlyOneRule, ObjectName, ResourceModel, ValidationRule, schema_extra

RECORDER_PORT = 8000
"""Port of the recorder in its pod, which a redaction hook cannot have."""
_NOT_CONFIRMED = (
    "prompts are recorded only with the consent of those who write them: write confirmed: true if you have it, or remove capture"
)
_ONE_STORAGE = ExactlyOneRule(("persistentVolumeClaim", "objectStore"))
_HAS_GO_NAME = (
    r"self.matches('(^|[^\\\\])([\\\\][\\\\])*[\\\\][pP][{]\\^?([^A-Z^]|([A-Z][a-z]+_)?(Letter|Mark|Number|Punctuation|Symbol|Separator"
    r"|Other|Control|Format|Unassigned|Use|Surrogate)[}])')"
)
"""Whether there are names of classes, such as Letter or lu, that the API server's regular expressions have and RE2 does not."""
_SIZE_UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class CaptureConsent(ResourceModel):
    """Confirmation that the users whose prompts are recorded have consented to it."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(ValidationRule("self.confirmed", _NOT_CONFIRMED, field_path=".confirmed"))
    )

    confirmed: bool
    """Whether the users have consented. Only true is accepted. Aerie cannot check it."""
    basis: Annotated[str, Field(min_length=10, max_length=512)]
    """What the consent rests on, for those who audit it, such as the section of the terms of service that users have accepted."""

    @model_validator(mode="after")
    def _check_confirmed(self) -> Self:
        if not self.confirmed:
            raise ValueError(_NOT_CONFIRMED)
        return self


class CaptureSampling(ResourceModel):
    """The requests that are recorded: a random share, up to a number per minute. Others are answered before they are read."""

    rate: Annotated[
        float,
        Field(
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self >= 0.0001 && self <= 1.0",
                    "write the share of the requests as a fraction from 0.0001 to 1: 0.01 is 1 %",
                ),
                **{"x-bounds": "0.0001 to 1"},
            )
        ),
    ] = 0.01
    """Share of the requests that are recorded, as a fraction: 0.01 is 1 %. Each request is drawn independently."""
    max_per_minute: Annotated[int, Field(ge=1, le=6000)] = 60
    """Maximum number of requests that are recorded in a minute."""


class CaptureRetention(ResourceModel):
    """How much is kept. The oldest files are deleted first. Nothing is deleted while no recorder runs."""

    duration: Annotated[timedelta, DurationRange("1h", "8760h")] = timedelta(days=7)
    """Time after which a prompt is deleted, counted from the beginning of its file."""
    max_size: Annotated[
        str,
        Field(
            max_length=8,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.matches('^(6[4-9]|[7-9][0-9]|[1-9][0-9]{2,5})Mi$|^[1-9][0-9]{0,5}(Gi|Ti)$')",
                    "write a size of at least 64Mi as a whole number with Mi, Gi or Ti, such as 500Mi or 10Gi",
                ),
                **{"x-bounds": "64Mi to 999999Ti"},
            ),
        ),
    ] = "5Gi"
    """Maximum size of all files, such as 500Mi or 10Gi."""

    @property
    def max_bytes(self) -> int:
        """The maximum size in bytes. Raises ValueError for a size that the schema rejects."""
        return int(self.max_size[:-2]) * _SIZE_UNITS.get(self.max_size[-2:], 1)


class RedactionPattern(ResourceModel):
    """A text that is replaced wherever it occurs in a prompt."""

    pattern: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            json_schema_extra=schema_extra(
                # An error on both sides is an error of the whole: the API server rejects the pattern and says what is wrong.
                ValidationRule(
                    f"{_HAS_GO_NAME} || !''.matches(self)",
                    "the regular expression has to be RE2 and may not match an empty text, which is everywhere: write one that "
                    "matches one character at least",
                ),
                ValidationRule(
                    f"!{_HAS_GO_NAME}",
                    "the regular expression names a class of characters that RE2 does not have: write a short category such as "
                    r"\pL or \p{Lu}, or a script such as \p{Greek}",
                ),
            ),
        ),
    ]
    """Regular expression in the syntax of RE2, without lookaround and backreferences."""
    replacement: Annotated[str, Field(max_length=128)] = "[redacted]"
    """Text that replaces each match, literally."""


class RedactionHook(ResourceModel):
    """A container beside the recorder that redacts prompts. It gets each prompt by POST as JSON with `messages` and, where the
    request has them, `tools` and `chat_template_kwargs`. It returns the same form with status 200. On any other answer nothing is
    stored."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                f"self.port != {RECORDER_PORT}", "the recorder listens on port 8000: write another port", field_path=".port"
            )
        )
    )

    image: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    r"self.matches('^[^\\s]+$')", "write an image reference without white space, such as registry/name:tag"
                )
            ),
        ),
    ]
    """Image of the container. It runs without root and without capabilities."""
    args: Annotated[
        list[Annotated[str, Field(max_length=4096)]],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = Field(default_factory=list)
    """Arguments of the container."""
    env: Annotated[
        list[EnvVar],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list)
    """Environment variables of the container."""
    resources: ResourceRequirements | None = None
    """Compute resources of the container."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8080
    """Port on which the container answers, at the address 127.0.0.1 of the pod."""
    path: Annotated[
        str,
        Field(
            max_length=256,
            json_schema_extra=schema_extra(
                ValidationRule("self.matches('^/[-A-Za-z0-9._~/]*$')", "write a path that begins with /, such as /redact")
            ),
        ),
    ] = "/redact"
    """Path of the request."""
    timeout: Annotated[timedelta, DurationRange("100ms", "1m")] = timedelta(seconds=5)
    """Time within which the hook has to answer."""


class CaptureRedaction(ResourceModel):
    """What is replaced in a prompt before it is stored: first by patterns, then by the hook."""

    patterns: Annotated[list[RedactionPattern], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = (
        Field(default_factory=list)
    )
    """Patterns, which are applied in this order to every text of a prompt."""
    hook: RedactionHook | None = None


class CaptureVolumeClaim(ResourceModel):
    """A folder of a persistent volume claim."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim, in the namespace of the resource."""
    path: Annotated[
        str,
        Field(
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
                    "write the folder relative to the root of the claim, without .., such as prompts",
                )
            ),
        ),
    ] = ""
    """Folder relative to the root of the claim; empty for the root itself. The files are in a folder below it that has the name
    of the resource."""


class CredentialsSecret(ResourceModel):
    """A Secret with credentials of an object store."""

    name: ObjectName
    """Name of the Secret, in the namespace of the resource. Its keys are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""


class ObjectStore(ResourceModel):
    """A bucket of an object store with the API of Amazon S3."""

    bucket: Annotated[
        str,
        Field(
            max_length=63,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.matches('^[a-z0-9][-.a-z0-9]{1,61}[a-z0-9]$')",
                    "write the name of a bucket: 3 to 63 characters of a-z, 0-9, - and .",
                )
            ),
        ),
    ]
    """Name of the bucket, which has to exist."""
    prefix: Annotated[
        str,
        Field(
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.matches('^([-A-Za-z0-9._~]+(/[-A-Za-z0-9._~]+)*)?$')",
                    "write the prefix without / at either end, such as prompts/chat",
                ),
                ValidationRule(
                    "!self.matches('(^|/)[.]{1,2}(/|$)')",
                    "the prefix has a part . or .., which no object can have: write names alone, such as prompts/chat",
                    "'the prefix %s has a part . or .., which no object can have: write names alone, such as "
                    "prompts/chat'.format([self])",
                ),
            ),
        ),
    ] = ""
    """Beginning of the objects' names. Namespace and name of the resource follow it."""
    endpoint: (
        Annotated[
            str,
            Field(
                max_length=512,
                json_schema_extra=schema_extra(
                    ValidationRule(
                        "self.matches('^https?://[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]{1,5})?$')",
                        "write the URL of the store as https://host or http://host:port, without path",
                    )
                ),
            ),
        ]
        | None
    ) = None
    """URL of the object store. Default: that of Amazon S3. With http, prompts cross the network unencrypted."""
    region: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9-]+$")] = "us-east-1"
    """Region of the bucket."""
    credentials_secret_ref: CredentialsSecret


class CaptureStorage(ResourceModel):
    """Where prompts are stored: exactly one of two. Aerie deletes what retention says, and nothing else."""

    model_config = ConfigDict(json_schema_extra=schema_extra(_ONE_STORAGE.to_validation_rule()))

    persistent_volume_claim: CaptureVolumeClaim | None = None
    """A folder of a persistent volume claim in the same namespace."""
    object_store: ObjectStore | None = None
    """A bucket of an object store. A file is uploaded when it is complete."""

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        _ONE_STORAGE.check(self)
        return self


class CaptureSpec(ResourceModel):
    """Recording of users' prompts, so that a drafter can be trained on what is served. The gateway sends copies of the requests
    to a recorder; answers are never recorded. It requires traffic mode Gateway."""

    consent: CaptureConsent
    sampling: CaptureSampling = CaptureSampling()
    retention: CaptureRetention = CaptureRetention()
    redaction: CaptureRedaction = CaptureRedaction()
    storage: CaptureStorage
