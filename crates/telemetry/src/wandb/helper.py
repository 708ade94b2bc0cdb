"""Gives what Lockstep writes to its standard input, a JSON object per line, to the client of Weights & Biases."""

import json
import os
import signal
import sys

# Answers go where the standard output went; what the client prints goes to the log.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# Whoever started us says when to stop.
signal.signal(signal.SIGINT, signal.SIG_IGN)


def answer(what):
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def numbers(line, before=""):
    """The numbers of a line, with the keys of the run's other files: rank_busy_s/3."""
    for key, value in line.items() if isinstance(line, dict) else enumerate(line):
        if isinstance(value, (dict, list)):
            yield from numbers(value, f"{before}{key}/")
        elif value is None:
            yield f"{before}{key}", float("nan")
        elif isinstance(value, (int, float)):
            yield f"{before}{key}", value


def main():
    import wandb

    init, run, step = {}, None, 0
    for text in sys.stdin:
        record = json.loads(text)
        if "init" in record:
            init = record["init"]
            continue
        if "ack" in record:
            answer(record)
            continue
        if run is None:
            run = wandb.init(**init, resume="allow")
            # Steps may come again: a run that goes back repeats some.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
        if "metrics" in record:
            values = dict(numbers(record["metrics"]))
            step = values.get("step", step)
            run.log(values)
        elif "start" in record:
            # What the config of the run does not have: versions, hosts, device.
            run.config.update({"lockstep": record["start"]}, allow_val_change=True)
        elif "event" in record:
            event = record["event"]
            kind = event.get("event", "event")
            run.log({"step": event.get("step", step), f"events/{kind}": 1})
            run.summary[f"event/{kind}"] = json.dumps(event)
        elif "end" in record:
            run.summary["ended"] = record["end"]
            run.finish(exit_code={"finished": 0, "continues": 0, "interrupted": 75}.get(record["end"], 1))
            run = None
    if run is not None:
        # Lockstep is gone.
        run.finish(exit_code=1)


main()
