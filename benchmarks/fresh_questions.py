"""The bundle's drafters on questions of which nobody looked at the results while their recipe was chosen.

The recipe was chosen with the held-out questions of `drafter` in view, so its values may be favourable to that choice. These
questions are about modules of Python's library of which neither the target nor a drafter saw any text. Target and drafters are
those of the bundle, one training each. Acceptance is exact (`aerie_drafter.evaluate.exact`), K = 3.

| key                          | what is measured                                                             |
|------------------------------|------------------------------------------------------------------------------|
| questions                    | number of questions                                                          |
| al_k3_*_t0, _t1, _t1_drawn   | acceptance length at temperature 0, at 1 with greedy, at 1 with drawn drafts |
| reachable_share_t1           | EAGLE 3.1's acceptance length over that of an exact copy, greedy drafts      |
| gain_*_pct, gain_low_*_pct   | EAGLE 3.1's paired gain, and its lower bound (95 %)                          |
| categories_behind            | categories of all conditions in which EAGLE 3.1 is behind, by paired intervals |
| norm_ratio_k8_*              | norm of the fed-back state in step 8 over that in step 1                     |
"""

from __future__ import annotations

import torch

from aerie_drafter import bundle
from aerie_drafter.checkpoint import load_drafter
from aerie_drafter.drift import measure_drift
from aerie_drafter.evaluate.exact import COPY_NAME, measure_exact_acceptance
from aerie_drafter.evaluate.expected import acceptance_length, paired_gain
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts
from aerie_drafter.evaluate.prompts import Prompt
from benchmarks._drafter_acceptance import CONDITIONS, KINDS, STEPS
from bundle import corpus

MODULES = """
abc ast asyncio.base_events asyncio.protocols asyncio.subprocess base64 bz2 cgi code codecs codeop compileall
concurrent.futures.process concurrent.futures.thread datetime dis doctest email.charset email.header email.policy email.utils
filecmp ftplib http.cookiejar imaplib imghdr imp importlib.abc importlib.util io keyword locale lzma mailbox mimetypes
modulefinder multiprocessing.connection multiprocessing.managers netrc nntplib ntpath nturl2path opcode operator pathlib pdb
pickletools pipes pkgutil platform plistlib poplib posixpath profile pstats pty py_compile pyclbr pydoc quopri re rlcompleter
runpy site smtpd sndhdr ssl stat stringprep sunau symtable sysconfig tabnanny telnetlib trace tty turtle typing unittest.loader
unittest.runner unittest.suite urllib.robotparser uu webbrowser wsgiref.handlers wsgiref.util xdrlib xmlrpc.client xmlrpc.server
zipapp zipfile zipimport
"""
"""Modules of Python 3.11 with documentation, without those of the corpus."""
EVERY = 4
"""One in EVERY questions, so that the run takes minutes."""
MAX_TOKENS = 96


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    items = corpus.items_of(MODULES.split(), {})[::EVERY]
    prompts = [Prompt(item.category, messages=({"role": "user", "content": item.question},)) for item in items]
    target = bundle.find_bundle_path("target")
    drafters = {kind: load_drafter(bundle.find_bundle_path(kind), target=target) for kind in KINDS}
    pair = ModelPair.load(target, bundle.find_bundle_path(KINDS[0]))
    options = EvaluationOptions(num_speculative_tokens=3, max_tokens=MAX_TOKENS, seed=0)
    exact = measure_exact_acceptance(pair, drafters, prompts, options, temperatures=(0.0, 1.0))
    figures: dict[str, float] = {"questions": len(prompts)}
    lengths = {}
    for name, condition in CONDITIONS.items():
        lengths[name] = {
            drafter: float(acceptance_length(exact.counts[condition][drafter].sum(0))) for drafter in (*KINDS, COPY_NAME)
        }
        gain = paired_gain(exact.counts[condition][KINDS[0]], exact.counts[condition][KINDS[1]])
        figures |= {f"al_k3_{kind}_{name}": round(lengths[name][kind], 3) for kind in KINDS}
        figures |= {f"gain_{name}_pct": round(100 * gain.estimate, 2), f"gain_low_{name}_pct": round(100 * gain.low, 2)}
    figures["reachable_share_t1"] = round(lengths["t1"][KINDS[1]] / lengths["t1"][COPY_NAME], 3)
    figures["categories_behind"] = sum(
        paired_gain(*(exact.of_category(condition, kind, category) for kind in KINDS)).high < 0
        for condition in CONDITIONS.values()
        for category in exact.category_names
    )
    drift_options = EvaluationOptions(num_speculative_tokens=STEPS, max_tokens=MAX_TOKENS)
    for kind in KINDS:
        kind_pair = ModelPair.load(target, bundle.find_bundle_path(kind))
        texts = answer_prompts(kind_pair, [prompt.encode(kind_pair.tokenizer) for prompt in prompts], drift_options)
        figures[f"norm_ratio_k8_{kind}"] = round(measure_drift(kind_pair, texts, STEPS).state_norm_ratio, 3)
    return figures
