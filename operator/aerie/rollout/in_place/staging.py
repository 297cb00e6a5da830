"""The start of a rollout in place: pods fetch, hash and check the drafter's files beside their running engines.

Guarantees: pure. Nothing of an engine changes. The start is complete only when all selected pods have the same files and the same
own drafter, and count their requests. A failure of an earlier attempt is not taken for one of this: it is repeated once.
Not guaranteed: that pods which join later accept the drafter; one that does not is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterSource, PrepareDrafter
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.engine.drafter_endpoint.state import LoadedDrafter, PreparedDrafter
from aerie.rollout.facts.drafters import MAX_FAILED_READS
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.trial import is_being_measured

REJECTION_STATUSES = frozenset({400, 403, 404, 422})
"""HTTP statuses of a call that would be rejected again: for what it is, or because the pod has no such path."""


MAX_MEASUREMENT_WAIT = timedelta(seconds=30)
"""Maximum for which a start waits for a pod's rate of requests, which the first windows follow from; from the first report on in
which the pod is prepared."""


@dataclass(frozen=True)
class PodPreparation:
    """How far one pod is."""

    pod: EnginePod
    drafter: PreparedDrafter | None = None
    """The prepared drafter; None until then."""
    call: DrafterCall | None = None
    """The call that it needs now."""
    problem: str = ""
    """Why it can never be on trial; a clause. Empty if it can."""
    waiting: str = ""
    """What it waits for; a clause."""


@dataclass(frozen=True)
class StagingProgress:
    """How far the start is."""

    preparations: tuple[PodPreparation, ...]
    problem: str = ""
    """Why the rollout cannot be in place; sentences. Empty if it can."""
    measured_pods: tuple[str, ...] = ()
    """Names of the pods that are prepared, and whose rate of requests is being measured."""

    @property
    def pods(self) -> tuple[EnginePod, ...]:
        """The selected pods."""
        return tuple(preparation.pod for preparation in self.preparations)

    @property
    def is_measuring(self) -> bool:
        """Whether it only waits for the rate of requests."""
        return bool(self.measured_pods) and all(item.drafter is not None for item in self.preparations)

    @property
    def is_complete(self) -> bool:
        """Whether the trial can begin."""
        is_prepared = bool(self.preparations) and all(item.drafter is not None for item in self.preparations)
        return is_prepared and not self.problem and not self.is_measuring

    @property
    def prepared(self) -> PreparedDrafter:
        """The drafter that all selected pods have prepared, once complete."""
        drafter = self.preparations[0].drafter
        assert drafter is not None
        return drafter

    @property
    def own(self) -> LoadedDrafter:
        """The drafter that all selected pods serve with, once complete."""
        state = self.preparations[0].pod.state
        assert state is not None
        assert state.own is not None
        return state.own


def check_staging(
    pods: Sequence[EnginePod],
    desired_count: int,
    source: DrafterSource,
    served_digest: str | None,
    started_at: datetime,
    now: datetime,
) -> StagingProgress:
    """Return the progress of the first `desired_count` pods that are ready. `served_digest`: the drafter promoted in place."""
    selected = [pod for pod in order_for_trial(pods, served_digest) if pod.is_ready][:desired_count]
    preparations = tuple(check_preparation(pod, source, served_digest, started_at) for pod in selected)
    problems = [f"Pod {item.pod.name} {item.problem}" for item in preparations if item.problem]
    prepared = {item.drafter.drafter.digest for item in preparations if item.drafter and item.drafter.drafter}
    own = {item.pod.own_digest for item in preparations if item.drafter}
    names = ", ".join(pod.name for pod in selected)
    if len(prepared) > 1:
        problems.append(f"Pods {names} read different files from {_describe(source)}: mount the same files in all of them.")
    if len(own) > 1:
        problems.append(
            f"Pods {names} have different files of the stable drafter: renew them with the annotation aerie.dev/renew."
        )
    measured = [item for item in preparations if _is_measured(item, started_at, now)]
    message = "is prepared: its requests are being measured"
    preparations = tuple(replace(item, waiting=message) if item in measured else item for item in preparations)
    return StagingProgress(preparations, " ".join(problems), tuple(item.pod.name for item in measured))


def _is_measured(item: PodPreparation, started_at: datetime, now: datetime) -> bool:
    """Return whether a pod is prepared, and its rate of requests is waited for."""
    waits_since = max(started_at, item.pod.observation.prepared_at or started_at)
    return item.drafter is not None and is_being_measured(item.pod) and now < waits_since + MAX_MEASUREMENT_WAIT


def order_for_trial(pods: Sequence[EnginePod], served_digest: str | None) -> list[EnginePod]:
    """Return the pods in the order in which they come on trial: those that answer and have the stable drafter, then the others.

    Within both, the order stays. A pod that has not been read yet is among the first.
    """

    def is_held_up(pod: EnginePod) -> bool:
        state = pod.state
        if state is None or pod.observation.failed_reads > 0:
            return pod.observation.failed_reads > 0
        return state.problem is not None or state.own is None or served_digest not in (None, pod.own_digest)

    return sorted(pods, key=is_held_up)


def check_preparation(pod: EnginePod, source: DrafterSource, served_digest: str | None, started_at: datetime) -> PodPreparation:
    """Return how far a pod is since the phase began. `served_digest`: the drafter that it has to serve with; None for any."""
    state, observation = pod.state, pod.observation
    if state is None:
        reason = observation.problem.message if observation.problem is not None else "it has not been read yet."
        if observation.failed_reads >= MAX_FAILED_READS and _is_never_called(observation.problem):
            return PodPreparation(pod, problem=f"cannot be called: {reason}")
        return PodPreparation(pod, waiting=f"has not answered: {reason}")
    if state.unfit is not None:
        return PodPreparation(pod, problem=f"cannot change its drafter: {state.unfit.message}")
    if state.own is None or state.problem is not None:
        return PodPreparation(pod, waiting=f"is not ready: {state.problem.message if state.problem else 'wait some seconds.'}")
    if not state.is_counting:
        message = "counts no requests (--disable-log-stats), so drafters cannot be compared: remove it from spec.engine.args."
        return PodPreparation(pod, problem=message)
    if served_digest is not None and pod.own_digest != served_digest:
        return PodPreparation(pod, waiting="does not have the stable drafter yet")
    prepared, call, result = pod.read_preparation(source), PrepareDrafter(source), observation.result
    is_answered = result is not None and result.call == call and result.ended_at >= started_at
    if prepared is not None and prepared.phase == "Ready":
        return PodPreparation(pod, drafter=prepared)
    if prepared is not None and prepared.phase == "Running":
        return PodPreparation(pod, waiting="reads the drafter's files")
    if is_answered and prepared is not None and prepared.problem is not None:
        return PodPreparation(pod, problem=f"rejects the drafter: {prepared.problem.message}")
    rejection = result.problem if is_answered and result is not None else None
    if rejection is not None and rejection.status in REJECTION_STATUSES:
        return PodPreparation(pod, problem=f"rejects the call: {rejection.message}")
    return PodPreparation(pod, call=call, waiting="is about to read the drafter's files")


def _is_never_called(problem: EndpointProblem | None) -> bool:
    """Return whether time alone does not resolve a failed read: the pod has no endpoint, or the operator no token for it.

    A pod that rejects a token may only be a minute behind: the kubelet mounts a new one late.
    """
    return problem is not None and (problem.reason == "NoEndpoint" or (problem.reason == "NoToken" and problem.status is None))


def _describe(source: DrafterSource) -> str:
    return source.folder or f"{source.repository}@{source.revision}"
