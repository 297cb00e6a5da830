"""The steps of a refresh. Each has a result of its own in the work folder, and is left out if that exists.

    select.json     new.jsonl: prompts to answer; old.jsonl, old_prompts.jsonl: old conversations with and without answers;
                    held_out.jsonl: the prompts of both domains that are held back
    answer.json     *.answers.jsonl: the target's answers
    train.json      training/: `last` to resume from, and `best`
    evaluate.json   acceptance of both drafters on the prompts held back
    report.json     the outcome, with the seconds of each step

Guarantees: after a kill, the same call continues in the step that was not complete. It keeps the prompts that were chosen,
although there may be more captured ones by then. A result has the inputs of its step (drafter, target, settings, old data), and
a call with others is rejected; what only later steps use may change. The exported folder is replaced as a whole. Not guaranteed:
the seconds of a step that was killed are those of its last attempt.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie_drafter import checkpoint, files
from aerie_drafter.chat_template import TemplateArguments, read_template_arguments
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.evaluate.exact import measure_exact_acceptance, to_json
from aerie_drafter.evaluate.expected import Interval
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair
from aerie_drafter.evaluate.prompts import Prompt, read_prompts
from aerie_drafter.export import export_checkpoint
from aerie_drafter.refresh.decision import decide, recovered_share
from aerie_drafter.refresh.selection import (
    Split,
    count_old,
    mix_recorded_temperatures,
    most_frequent_temperature,
    remove_prompts,
    split_conversations,
    strip_answer,
)
from aerie_drafter.refresh.settings import RefreshSettings
from aerie_drafter.refresh.sources import (
    find_training_data,
    read_captured_prompts,
    read_chosen_conversations,
    read_old_conversations,
)
from aerie_drafter.train.answers import GenerationParameters, TemperatureMix
from aerie_drafter.train.conversations import Conversation, compute_sources_digest
from aerie_drafter.train.data import count_conversations
from aerie_drafter.train.endpoint import EndpointOptions, generate_from_endpoint
from aerie_drafter.train.generate import generate_answers
from aerie_drafter.train.identity import identify_target
from aerie_drafter.train.settings import TrainingSettings, parse_settings
from aerie_drafter.train.setup import build_trainer, check_tokenizer_of_answers
from aerie_drafter.train.states import load_model, load_tokenizer
from aerie_drafter.train.trainer import TrainingReporter

NEW, OLD = "new", "old"
SERVED, REFRESHED = "served", "refreshed"


@dataclass(frozen=True)
class RefreshInputs:
    """What a refresh starts from."""

    drafter: Path
    """Folder of the served drafter."""
    target: Path
    """Folder of its target."""
    prompts: Path
    """Captured prompts."""
    old: tuple[Path, ...] = ()
    """Old conversations. Default: the drafter's training data, if it lies beside the drafter or in the current folder."""
    old_held_out: Path | None = None
    """Old prompts that neither training saw. Default: a share of `old`."""
    endpoint: str = ""
    """Address of a vLLM that answers; default: the target answers in this process."""
    model: str = ""
    """Served model name at that address."""


@dataclass(frozen=True)
class Refresh:
    """A refresh with its folders."""

    inputs: RefreshInputs
    settings: RefreshSettings
    work: Path
    output: Path
    device: torch.device
    log: Callable[[str], None]
    reporter: TrainingReporter

    def run(self) -> dict[str, Any]:
        """Run what is not complete yet, and return the report. Raises DrafterError."""
        self.work.mkdir(parents=True, exist_ok=True)
        old = self._find_old()
        inputs = self._identify_inputs(old)
        results = {"select": self._complete_step("select", lambda: self._select(old), inputs["select"])}
        self._choose_temperature()  # its error would otherwise end the last step
        for name, step in {"answer": self._answer, "train": self._train, "evaluate": self._evaluate}.items():
            results[name] = self._complete_step(name, step, inputs[name])
        report = build_report(results, self.settings)
        if report["accepted"]:
            self._export(report)
        files.replace_file(self.work / "report.json", json.dumps(report, indent=1) + "\n")
        return report

    def _find_old(self) -> tuple[Path, ...]:
        if self.inputs.old:
            return self.inputs.old
        folder = self.inputs.drafter.resolve()
        training_data = find_training_data(checkpoint.read_provenance(folder), [folder, folder.parent, Path.cwd()])
        if training_data:
            self.log(f"old conversations: {', '.join(map(str, training_data))}, which the served drafter was trained on")
        else:
            self.log("warning: no old conversations, so the drafter may forget the old domain; name them with --old")
        return tuple(training_data)

    def _identify_inputs(self, old: Sequence[Path]) -> dict[str, dict[str, Any]]:
        """Return what each step uses, by its name in messages. Limits of the decision and of memory are not among it."""
        inputs, settings = self.inputs, self.settings.model_dump(mode="json")
        answers, evaluation = settings["answers"], settings["evaluation"]
        held_out = [inputs.old_held_out] if inputs.old_held_out is not None else []
        models = {
            "the served drafter": checkpoint.compute_model_digest(inputs.drafter),
            "the target": identify_target(str(inputs.target), None),
        }
        common = {"the target": models["the target"], "the settings of template": settings["template"]}
        seed = {"the settings of optimizer": settings["optimizer"]["seed"]}
        return {
            "select": {
                "the old conversations": compute_sources_digest([*old, *held_out]),
                "the settings of prompts": settings["prompts"],
                "the settings of answers": [answers["temperature"], answers["default_temperature"]],
            },
            "answer": {
                **common,
                **seed,
                "the server that answers": [inputs.endpoint, inputs.model],
                "the settings of answers": answers["max_tokens"],
            },
            "train": {
                **common,
                **models,
                **{f"the settings of {group}": settings[group] for group in ("data", "loss", "optimizer")},
                "the settings of evaluation": [evaluation["num_speculative_tokens"], evaluation["checkpoint_every"]],
            },
            "evaluate": {
                **common,
                **models,
                **seed,
                "the settings of evaluation": [
                    evaluation[name] for name in ("num_speculative_tokens", "temperature", "max_tokens")
                ],
            },
        }

    def _complete_step(self, name: str, step: Callable[[], dict[str, Any]], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a step, and run it if there is none. Raises ConfigError if its inputs were others."""
        path = self.work / f"{name}.json"
        if not path.exists():
            began = time.monotonic()
            result = step()
            seconds = round(time.monotonic() - began, 1)
            files.replace_file(path, json.dumps(result | {"seconds": seconds, "inputs": inputs}, indent=1) + "\n")
        result = _read_json(path)
        for what, value in inputs.items():
            if result.get("inputs", {}).get(what) != value:
                raise ConfigError(
                    f"{path}: this step is complete, and used something else for {what}; set the earlier value, or another "
                    "--work folder."
                )
        self.log(f"{name}: {result['seconds']:.0f} s")
        return result

    def _select(self, old: Sequence[Path]) -> dict[str, Any]:
        chosen, answers = self.settings.prompts, self.settings.answers
        tokenizer = load_tokenizer(str(self.inputs.target), None)
        for source in old:
            check_tokenizer_of_answers(source, tokenizer)
        captured = read_captured_prompts(self.inputs.prompts)
        new = split_conversations(captured.conversations, chosen.held_out_share, chosen.max_trained, chosen.max_held_out)
        if not new.trained or not new.held_out:
            raise DataError(
                f"{self.inputs.prompts}: {len(new.trained)} different prompts to train on, {len(new.held_out)} to hold back: "
                "wait until more are captured, or change prompts.held_out_share."
            )
        self._check_room(sum(self._has_room(each, tokenizer) for each in new.trained), len(new.trained))
        old_split = self._split_old(old)
        # A prompt of the new traffic that is an old one too may not be on both sides.
        old_trained = remove_prompts(old_split.trained, new.held_out)
        old_trained = old_trained[: count_old(len(new.trained), len(old_trained), chosen.old_share)]
        held_out = {NEW: new.held_out, OLD: remove_prompts(old_split.held_out, new.trained)}
        _write_lines(self.work / "new.jsonl", map(_prompt_record, new.trained))
        answered = [each.location for each in old_trained if _is_answered(each)]
        whole = read_chosen_conversations(old, answered)
        _write_lines(self.work / "old.jsonl", (_record(whole[location]) for location in answered))
        _write_lines(self.work / "old_prompts.jsonl", (_prompt_record(each) for each in old_trained if not _is_answered(each)))
        _write_lines(
            self.work / "held_out.jsonl",
            ({"category": name} | _prompt_record(each) for name, side in held_out.items() for each in side),
        )
        if answers.temperature is None:
            temperatures = mix_recorded_temperatures(captured.sampling, answers.default_temperature)
        else:
            temperatures = TemperatureMix.parse(answers.temperature)
        return {
            "captured": len(captured.conversations),
            "trained": {NEW: len(new.trained), OLD: len(old_trained)},
            "held_out": {name: len(side) for name, side in held_out.items()},
            "temperatures": temperatures.shares,
        }

    def _split_old(self, old: Sequence[Path]) -> Split:
        chosen, held_out_file = self.settings.prompts, self.inputs.old_held_out
        conversations = read_old_conversations(old)
        if held_out_file is None:
            return split_conversations(conversations, chosen.held_out_share, None, chosen.max_held_out)
        held_out = split_conversations(read_old_conversations([held_out_file]), 1.0, None, chosen.max_held_out).held_out
        return Split(remove_prompts(split_conversations(conversations, 0.0, None, 0).trained, held_out), held_out)

    def _has_room(self, conversation: Conversation, tokenizer: Any) -> bool:
        """Return whether data.max_length leaves room for an answer; the first of several, which all are generated again."""
        messages = strip_answer(conversation)
        first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        template = conversation.template.with_defaults(self._template)
        try:
            length = len(Prompt("", messages[:first], template=template).encode(tokenizer))
        except DataError:
            return True  # reported when it is answered
        return length < self.settings.data.max_length

    def _check_room(self, used: int, count: int) -> None:
        """Raise DataError if most new prompts are too long for the training."""
        if used < count / 2:
            raise DataError(
                f"{self.inputs.prompts}: {count - used} of {count} prompts have no room for an answer in data.max_length, "
                f"which is {self.settings.data.max_length}: increase it."
            )

    def _read_temperatures(self) -> TemperatureMix:
        shares = _read_json(self.work / "select.json")["temperatures"]
        return TemperatureMix(tuple((temperature, share) for temperature, share in shares))

    def _choose_temperature(self) -> float:
        """Return the temperature of the evaluation. Raises ConfigError if drafts are to be drawn at 0."""
        settings = self.settings.evaluation
        if settings.temperature is not None:
            return settings.temperature
        temperature = most_frequent_temperature(self._read_temperatures())
        if temperature == 0 and settings.draft_sampling == "drawn":
            raise ConfigError(
                "evaluation.draft_sampling is drawn, and the most frequent temperature of the answers is 0: nothing is drawn at "
                "0; set greedy, or evaluation.temperature."
            )
        return temperature

    def _answer(self) -> dict[str, Any]:
        """Let the target answer the new prompts, and old ones without an answer."""
        names = {NEW: "new", OLD: "old_prompts"}
        has_prompts = {domain: (self.work / f"{name}.jsonl").stat().st_size > 0 for domain, name in names.items()}
        return {"rejected": {domain: self._generate(name) if has_prompts[domain] else 0 for domain, name in names.items()}}

    def _generate(self, name: str) -> int:
        """Write the answers to the prompts of a file, and return how many prompts the server rejected."""
        prompts, output = self.work / f"{name}.jsonl", self.work / f"{name}.answers.jsonl"
        inputs, settings = self.inputs, self.settings.answers
        parameters = GenerationParameters(settings.max_tokens, self._read_temperatures(), seed=self.settings.optimizer.seed)
        if inputs.endpoint:
            options = EndpointOptions(settings.concurrency, max_rejected_share=settings.max_rejected_share)
            request = generate_from_endpoint(
                inputs.endpoint,
                inputs.model,
                prompts,
                output,
                parameters=parameters,
                template=self._template,
                options=options,
            )
            rejected = asyncio.run(request).rejected
            if rejected:
                reason = f"{rejected[0].location}: {rejected[0].reason}"
                self.log(f"the server rejects {len(rejected)} prompts, which are omitted; the first is {reason}")
            return len(rejected)
        target = str(inputs.target)
        generate_answers(
            load_model(target, None, self._dtype, self.device).eval(),
            load_tokenizer(target, None),
            prompts,
            output,
            parameters=parameters,
            target_id=identify_target(target, None),
            template=self._template,
            batch_size=settings.batch_size,
        )
        return 0

    def _train(self) -> dict[str, Any]:
        used, omitted = self._count_trained()
        self._check_room(used[NEW], used[NEW] + omitted[NEW])
        trainer = build_trainer(self.build_training_settings(), reporter=self.reporter, log_progress=self.log)
        if trainer.resume():
            self.log(f"resuming after step {trainer.progress.step} of {trainer.total_steps}")
        steps = trainer.run().step
        covered = trainer.drafter.t2d.cpu()[trainer.corpus.tokens[trainer.corpus.loss_mask].long()]
        coverage = round(float(covered.float().mean()), 4)
        return {"steps": steps, "trained": used, "omitted": omitted, "draft_vocabulary_coverage": coverage}

    def _count_trained(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the conversations with and without a token to learn, by domain."""
        tokenizer = load_tokenizer(str(self.inputs.target), None)
        used, omitted = {NEW: 0, OLD: 0}, {NEW: 0, OLD: 0}
        for domain, source in self._training_sources():
            with_answer, count = count_conversations(
                source, tokenizer, max_length=self.settings.data.max_length, template=self._template
            )
            used[domain] += with_answer
            omitted[domain] += count - with_answer
        return used, omitted

    def _training_sources(self) -> list[tuple[str, Path]]:
        """Return the files of the training with their domains, without empty ones."""
        files_of = {"new.answers.jsonl": NEW, "old.jsonl": OLD, "old_prompts.answers.jsonl": OLD}
        sources = [(domain, self.work / name) for name, domain in files_of.items()]
        return [(domain, source) for domain, source in sources if source.exists() and source.stat().st_size]

    def build_training_settings(self) -> TrainingSettings:
        """Return the settings of the training, which starts from the served drafter."""
        settings = self.settings
        raw = {
            "target": {"model": str(self.inputs.target)},
            "drafter": {"initial_checkpoint": self.inputs.drafter},
            "data": {
                "train": [source for _, source in self._training_sources()],
                **settings.data.model_dump(),
            },
            "template": settings.template.model_dump(),
            "loss": settings.loss.model_dump(),
            "optimizer": settings.optimizer.model_dump(),
            "output": {
                "folder": self.work / "training",
                "num_speculative_tokens": settings.evaluation.num_speculative_tokens,
                "evaluate_every": settings.evaluation.checkpoint_every,
            },
        }
        return parse_settings(raw, "the settings of the refresh")

    def _evaluate(self) -> dict[str, Any]:
        settings, temperature = self.settings.evaluation, self._choose_temperature()
        pair = ModelPair.load(self.inputs.target, self.inputs.drafter, device=str(self.device), dtype=self._dtype)
        best = checkpoint.load_drafter(self.work / "training" / "best", target=self.inputs.target)
        drafters = {SERVED: pair.drafter, REFRESHED: best.to(self.device, self._dtype).requires_grad_(False)}
        options = EvaluationOptions(
            settings.num_speculative_tokens,
            settings.max_tokens,
            seed=self.settings.optimizer.seed,
            batch_size=settings.batch_size,
        )
        prompts = read_prompts(self.work / "held_out.jsonl", self._template)
        return to_json(measure_exact_acceptance(pair, drafters, prompts, options, temperatures=[temperature]))

    def _export(self, report: dict[str, Any]) -> None:
        served = checkpoint.read_checkpoint(self.inputs.drafter)
        export_checkpoint(
            self.work / "training" / "best",
            self.output,
            target=served.provenance.target,
            num_speculative_tokens=self.settings.evaluation.num_speculative_tokens,
            acceptance_length=report[NEW][REFRESHED],
            measured_on=f"{report[NEW]['prompts']} captured prompts held back, temperature {report['temperature']:g}",
            include_embedding=checkpoint.EMBEDDING_TENSOR in served.tensors,
            dtype=served.tensors["fc.weight"].dtype,
        )

    @property
    def _template(self) -> TemplateArguments:
        return read_template_arguments(self.settings.template.tools, self.settings.template.kwargs)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def build_report(results: dict[str, dict[str, Any]], settings: RefreshSettings) -> dict[str, Any]:
    """Return the report of complete steps: the decision, acceptance by domain, and times. Pure."""
    evaluation, held_out = results["evaluate"], results["select"]["held_out"]
    sampling = settings.evaluation.draft_sampling
    domains = {name: _describe_domain(evaluation, name, sampling, count) for name, count in held_out.items() if count}
    new, old = domains[NEW], domains.get(OLD)
    decision = decide(_interval(new), None if old is None else _interval(old), **settings.limits.model_dump())
    recovered = None
    if old is not None and None not in (old[SERVED], new[SERVED], new[REFRESHED]):
        recovered = recovered_share(old[SERVED], new[SERVED], new[REFRESHED])
    return {
        "accepted": decision.is_accepted,
        "reasons": list(decision.reasons),
        "temperature": evaluation["acceptance"][0]["temperature"],
        "draft_sampling": sampling,
        "num_speculative_tokens": settings.evaluation.num_speculative_tokens,
        NEW: new,
        OLD: old,
        "recovered_share": recovered,
        "captured": results["select"]["captured"],
        "trained": results["train"]["trained"],
        "omitted": results["train"]["omitted"],
        "rejected": results["answer"]["rejected"],
        "steps": results["train"]["steps"],
        "draft_vocabulary_coverage": results["train"]["draft_vocabulary_coverage"],
        "seconds": {name: result["seconds"] for name, result in results.items()},
    }


def _describe_domain(evaluation: dict[str, Any], domain: str, sampling: str, prompts: int) -> dict[str, Any]:
    def select(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if (row["category"], row["draft_sampling"]) == (domain, sampling)]

    lengths = {row["drafter"]: row["acceptance_length"] for row in select(evaluation["acceptance"])}
    (gain,) = select(evaluation["gains"])
    return {
        "prompts": prompts,
        **{name: lengths[name] for name in (SERVED, REFRESHED)},
        **{name: gain[name] for name in ("gain", "low", "high")},
    }


def _interval(domain: dict[str, Any]) -> Interval:
    return Interval(*(math.nan if domain[name] is None else domain[name] for name in ("gain", "low", "high")))


def _is_answered(conversation: Conversation) -> bool:
    return bool(conversation.messages[-1]["role"] == "assistant")


def _prompt_record(conversation: Conversation) -> dict[str, Any]:
    return {"messages": list(strip_answer(conversation)), **conversation.template.to_json()}


def _record(conversation: Conversation) -> dict[str, Any]:
    sequences = [sequence.to_json() for sequence in conversation.sequences]
    return {"messages": list(conversation.messages), **conversation.template.to_json(), "sequences": sequences}


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    files.replace_file(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); set another --work folder.") from error
    return dict(content)
