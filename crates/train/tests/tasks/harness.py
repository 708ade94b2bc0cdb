"""Scores the tasks of this folder with lm-evaluation-harness and writes what it says of every item to harness.jsonl.

    pip install torch transformers lm_eval
    python harness.py

model/ is what `lockstep checkpoint export` made of a run of a few hundred steps; tokenizer.json is that of crates/data/tests/fixtures.
"""
import json
import os

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

here = os.path.dirname(os.path.abspath(__file__))
common = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "query",
    "num_fewshot": 0,
}


def metrics(*names):
    return [{"metric": name, "aggregation": "perplexity" if name == "perplexity" else "mean"} for name in names]


def task(name, **more):
    data = {"data_files": {"test": os.path.join(here, name + ".jsonl")}}
    return {"task": name, "dataset_kwargs": data, **common, **more}


tasks = [
    task(
        "choices",
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="gold",
        metric_list=metrics("acc", "acc_norm", "acc_bytes"),
    ),
    task("cloze", output_type="loglikelihood", doc_to_target="{{' ' + target}}", metric_list=metrics("perplexity", "acc")),
]
model = HFLM(pretrained=os.path.join(here, "model"), device="cpu", dtype="float32", batch_size=4, max_length=64)
results = lm_eval.simple_evaluate(model, tasks=tasks, bootstrap_iters=0, log_samples=True, task_manager=TaskManager())
with open(os.path.join(here, "harness.jsonl"), "w") as out:
    for name in ["choices", "cloze"]:
        for sample in sorted(results["samples"][name], key=lambda sample: sample["doc_id"]):
            line = {"task": name, "item": sample["doc_id"]}
            line["log_likelihoods"] = [response[0] for response in map(lambda r: r[0] if isinstance(r[0], (list, tuple)) else r, sample["resps"])]
            for metric in ["acc", "acc_norm", "acc_bytes"]:
                if metric in sample:
                    line[metric] = bool(sample[metric])
            out.write(json.dumps(line) + "\n")
        print(name, {key: value for key, value in results["results"][name].items()})
