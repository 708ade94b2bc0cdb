#!/usr/bin/env python3
"""What fp8-loss.sh needs of Python: the corpus, and the comparison of runs.

    fp8_loss.py manifest                            a Cargo.toml that depends on the crates of the corpus
    fp8_loss.py wheels                              the Python packages of the corpus, as pip's requirements
    fp8_loss.py corpus METADATA WHEELS OUT          train.jsonl, validation.jsonl, tokenizer.json and run.toml from what was downloaded
    fp8_loss.py check                               the output of `lockstep data inspect --format json`: are there tokens enough?
    fp8_loss.py report RUNS RECORDS NAME:SEED...    the comparison with the runs named bf16; fp8-loss.csv and fp8-loss.svg in RECORDS

`corpus` needs the Python package tokenizers, the others nothing. The versions are exact and published files do not change, so everyone gets the
same text. A package is in training or in validation as a whole.
"""

import csv
import hashlib
import json
import os
import pathlib
import statistics
import sys
import zipfile

TRAIN_CRATES = {
    "arrow-array": "60.1.0", "bevy_ecs": "0.20.1", "chrono": "0.4.45", "clap_builder": "4.6.7", "diesel": "2.3.14", "futures-util": "0.3.34",
    "image": "0.25.10", "indexmap": "2.14.2", "jiff": "0.2.39", "memchr": "2.8.3", "naga": "30.0.1", "nalgebra": "0.35.0", "ndarray": "0.17.2",
    "object": "0.40.0", "petgraph": "0.8.3", "proptest": "1.12.0", "quinn-proto": "0.11.19", "rayon": "1.12.0", "regex-automata": "0.4.18",
    "rustix": "1.1.6", "sea-query": "1.0.2", "serde_json": "1.0.154", "time": "0.3.55", "tokio": "1.54.1", "wasmparser": "0.263.0",
}
VALIDATION_CRATES = {"itertools": "0.15.0", "rustls": "0.23.46"}
TRAIN_WHEELS = {
    "celery": "5.4.0", "django": "5.1.4", "docutils": "0.21.2", "hypothesis": "6.123.2", "ipython": "8.31.0", "networkx": "3.4.2",
    "sphinx": "8.1.3", "sqlalchemy": "2.0.36",
}
VALIDATION_WHEELS = {"pytest": "8.3.4", "werkzeug": "3.1.3"}

SUFFIXES = (".rs", ".md", ".py")
MAX_FILE_BYTES = 200_000  # Longer files are mostly generated tables.
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 8192
SEQ, BATCH, STEPS = 256, 32, 2000
VALIDATION_SEQUENCES = 1952
# A sequence has one more token than it predicts.
TRAIN_TOKENS = STEPS * BATCH * SEQ + 1
VALIDATION_TOKENS = VALIDATION_SEQUENCES * SEQ + 1

RUN_TOML = """\
# Made by bench/scripts/fp8-loss.sh. The last documents, those of validation.idx, are for validation.
[model]
preset = "llama-124m"
vocab_size = {vocabulary}
[data]
paths = ["train.idx", "validation.idx"]
tokenizer = "tokenizer.json"
validation_fraction = {fraction!r}
[train]
steps = {steps}
seq = {seq}
global_batch = {batch}
micro_batch = {batch}
validate_every = 200
validation_sequences = {sequences}
device = "cuda"
[optimizer]
name = "adamw"
lr = 3e-4
schedule = "cosine"
warmup_steps = 100
[checkpoint]
every = 0
keep = 1
"""


def print_manifest():
    print('[package]\nname = "corpus"\nversion = "0.0.0"\nedition = "2021"\n\n[dependencies]')
    for name, version in sorted({**TRAIN_CRATES, **VALIDATION_CRATES}.items()):
        print(f'{name} = {{ version = "={version}", default-features = false }}')


def print_wheels():
    for name, version in sorted({**TRAIN_WHEELS, **VALIDATION_WHEELS}.items()):
        print(f"{name}=={version}")


def files_of_crates(metadata, wanted):
    """(name of the file, bytes) of the crates in `wanted`, from the output of `cargo metadata`."""
    folders = {(p["name"], p["version"]): pathlib.Path(p["manifest_path"]).parent for p in metadata["packages"]}
    for name, version in sorted(wanted.items()):
        folder = folders[name, version]
        for path in sorted(folder.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def files_of_wheels(folder, wanted):
    """(name of the file, bytes) of the wheels in `wanted`."""
    wheels = {tuple(path.name.lower().split("-")[:2]): path for path in folder.glob("*.whl")}
    for name, version in sorted(wanted.items()):
        with zipfile.ZipFile(wheels[name.replace("-", "_"), version]) as wheel:
            for file in sorted(wheel.namelist()):
                if file.endswith(SUFFIXES):
                    yield f"{name}/{file}", wheel.read(file)


def documents(files, seen):
    """Files of UTF-8 that are neither long nor in `seen`, shuffled by the hashes of their names, so that any prefix is a mixture."""
    kept = []
    for name, data in files:
        digest = hashlib.sha256(data).digest()
        if not data.strip() or len(data) > MAX_FILE_BYTES or digest in seen:
            continue
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        kept.append((hashlib.sha256(name.encode()).digest(), name, text))
    return [(name, text) for _, name, text in sorted(kept)]


def size(texts):
    return sum(len(text.encode()) for _, text in texts)


def train_tokenizer(texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text for _, text in texts), trainer)
    # Text that spells the special token is ordinary text, as Lockstep has it.
    tokenizer.encode_special_tokens = True
    return tokenizer


def first_documents(texts, tokenizer, wanted):
    """The first documents that have `wanted` tokens together, with an EOS token each; and how many tokens they have."""
    total = 0
    for count, (_, text) in enumerate(texts, 1):
        total += len(tokenizer.encode(text).ids) + 1
        if total >= wanted:
            return texts[:count], total
    sys.exit(f"the text has {total:,} tokens, and {wanted:,} are needed: add packages to fp8_loss.py")


def make_corpus(metadata, wheels, out):
    metadata, wheels, out = json.loads(pathlib.Path(metadata).read_text()), pathlib.Path(wheels), pathlib.Path(out)
    seen = set()
    train = documents([*files_of_crates(metadata, TRAIN_CRATES), *files_of_wheels(wheels, TRAIN_WHEELS)], seen)
    # A file of a validation package that is in a training package too is left out.
    validation = documents([*files_of_crates(metadata, VALIDATION_CRATES), *files_of_wheels(wheels, VALIDATION_WHEELS)], seen)
    sizes = size(train), size(validation)
    print(f"{len(train):,} files, {sizes[0] / 1e6:.1f} MB, of {len(TRAIN_CRATES) + len(TRAIN_WHEELS)} packages to train on; {len(validation):,} files, "
          f"{sizes[1] / 1e6:.1f} MB, {100 * sizes[1] / sum(sizes):.1f}%, of {len(VALIDATION_CRATES) + len(VALIDATION_WHEELS)} others to validate on")
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(out / "tokenizer.json"))
    counts = {}
    for split, texts, wanted in [("train", train, TRAIN_TOKENS), ("validation", validation, VALIDATION_TOKENS)]:
        texts, tokens = first_documents(texts, tokenizer, wanted)
        counts[split] = len(texts)
        print(f"{split}: {len(texts):,} files, {size(texts) / 1e6:.1f} MB, {tokens:,} tokens, {size(texts) / tokens:.2f} bytes per token")
        with open(out / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for _, text in texts:
                print(json.dumps({"text": text}), file=file)
    fraction = counts["validation"] / sum(counts.values())
    toml = RUN_TOML.format(vocabulary=VOCABULARY, fraction=fraction, steps=STEPS, seq=SEQ, batch=BATCH, sequences=VALIDATION_SEQUENCES)
    (out / "run.toml").write_text(toml)


def check_inspected():
    (corpus,) = json.load(sys.stdin)["corpora"]
    train, validation = corpus["train"], corpus["validation"]
    print(f"{train['documents']:,} documents of {train['tokens']:,} tokens, {validation['documents']:,} of {validation['tokens']:,} for validation")
    if train["tokens"] < TRAIN_TOKENS or not VALIDATION_TOKENS <= validation["tokens"] < VALIDATION_TOKENS + MAX_FILE_BYTES:
        sys.exit(f"FAILED: {TRAIN_TOKENS:,} and {VALIDATION_TOKENS:,} are needed")


class Run:
    """One run: its validation curve, speed and build."""

    def __init__(self, folder, name, seed):
        self.name, self.seed = name, seed
        place = folder / f"{name}-{seed}"
        steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        self.curve = [(m["step"], m["val_loss"]) for m in steps if m.get("val_loss") is not None]
        if not self.curve or self.curve[-1][0] != steps[-1]["step"]:
            sys.exit(f"FAILED: {place} has no finite validation loss after its last step")
        self.steps, self.tokens = steps[-1]["step"], steps[-1]["tokens"]
        # The first steps are slower: kernels are compiled and chosen.
        self.step_s = statistics.median(m["step_s"] for m in steps[len(steps) // 10:])
        self.start = json.loads((place / "starts.jsonl").read_text().splitlines()[-1])

    @property
    def final(self):
        return self.curve[-1][1]

    def step_at(self, loss):
        """The step at which the validation loss first is `loss`, interpolated between validations; None if it never is."""
        before = None
        for step, here in self.curve:
            if here <= loss:
                if before is None or before[1] == here:
                    return step
                return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - here)
            before = step, here
        return None


def percent(value, base):
    return 100 * (value / base - 1)


def median_step_s(runs):
    return statistics.median(run.step_s for run in runs)


def print_comparison(name, pairs, step_s):
    """The runs of one name beside those in bf16 with the same seeds; `step_s` are the seconds of a step of either."""
    print(f"\n{name} beside bf16: final validation loss, nats per token; steps and seconds of training until both have the worse of the two")
    width = max(9, len(name))
    print(f"{'seed':>4}  {'bf16':>7}  {name:>{width}}  {'difference':>10}  {'at loss':>7}  {'bf16':>16}  {name:>16}  {'time':>7}")
    differences, times = [], []
    for bf16, other in pairs:
        common = max(bf16.final, other.final)
        steps = [run.step_at(common) for run in (bf16, other)]
        seconds = [count * each for count, each in zip(steps, step_s)]
        differences.append(percent(other.final, bf16.final))
        times.append(percent(seconds[1], seconds[0]))
        print(f"{bf16.seed:>4}  {bf16.final:7.4f}  {other.final:{width}.4f}  {differences[-1]:+9.3f}%  {common:7.4f}  "
              f"{steps[0]:6.0f}, {seconds[0]:6.2f} s  {steps[1]:6.0f}, {seconds[1]:6.2f} s  {times[-1]:+6.1f}%")
    if len(pairs) > 1:
        means = [statistics.mean(run.final for run in side) for side in zip(*pairs)]
        print(f"mean  {means[0]:7.4f}  {means[1]:{width}.4f}  {statistics.mean(differences):+9.3f}%  {'':7}  {'':16}  {'':16}  {statistics.mean(times):+6.1f}%")


def report(folder, records, *names):
    folder, records = pathlib.Path(folder), pathlib.Path(records)
    runs = {}
    for name, seed in (each.rsplit(":", 1) for each in names):
        runs.setdefault(name, {})[seed] = Run(folder, name, seed)
    bf16, step_s = runs["bf16"], {name: median_step_s(of.values()) for name, of in runs.items()}
    first = next(iter(bf16.values()))
    build = first.start["build"]
    print(f"({first.start['device']}, {build['profile'].split()[0]} build of {build['commit'][:7]}{', with changes' if build['dirty'] else ''})")
    last = [run.final for run in bf16.values()]
    print(f"{first.steps:,} steps of {first.tokens // first.steps:,} tokens; the final losses in bf16 differ by {percent(max(last), min(last)):.2f}% "
          f"from seed to seed ({', '.join(bf16)})")
    for name in runs:
        if name != "bf16":
            pairs = [(bf16[seed], run) for seed, run in runs[name].items()]
            print_comparison(name, pairs, [step_s["bf16"], step_s[name]])
    print("\nspeed: the median step of a run, the median over seeds")
    for name, each in step_s.items():
        tokens, width = first.tokens / first.steps, max(map(len, runs))
        print(f"{name:>{width}}  {tokens / each:9,.0f} tokens/s  {1e3 * each:8.2f} ms per step  {percent(step_s['bf16'], each):+6.1f}%")
    records.mkdir(parents=True, exist_ok=True)
    name_of_files = os.environ.get("NAME", "fp8-loss")
    with open(records / f"{name_of_files}.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["name", "seed", "step", "train_seconds", "val_loss_nats_per_token"])
        for run in (run for of in runs.values() for run in of.values()):
            table.writerows([run.name, run.seed, step, f"{step * step_s[run.name]:.3f}", f"{loss:.6f}"] for step, loss in run.curve)
    (records / f"{name_of_files}.svg").write_text(draw(runs))


def ticks(low, high, count=5):
    """About `count` round numbers from `low` to `high`, and the digits that they need."""
    exact = (high - low) / count
    power = 0
    while 10.0 ** power > exact:
        power -= 1
    while 10.0 ** (power + 1) <= exact:
        power += 1
    unit = next(factor for factor in (1, 2, 5, 10) if factor * 10.0 ** power >= exact * 0.99) * 10.0 ** power
    first = int(low // unit) + (low % unit > unit * 1e-6)
    digits = max(0, -power)
    return [k * unit for k in range(first, int(high / unit + 1e-6) + 1)], digits


class Panel:
    """A chart with axes at a place of the drawing."""

    def __init__(self, left, top, width, height, x_range, y_range):
        self.left, self.top, self.width, self.height = left, top, width, height
        self.x_range, self.y_range = x_range, y_range
        self.parts = []

    def x(self, value):
        return self.left + self.width * (value - self.x_range[0]) / (self.x_range[1] - self.x_range[0])

    def y(self, value):
        return self.top + self.height * (1 - (value - self.y_range[0]) / (self.y_range[1] - self.y_range[0]))

    def axes(self, title, x_label, y_label, sign=""):
        right, bottom = self.left + self.width, self.top + self.height
        values, digits = ticks(*self.y_range)
        for value in values:
            at = f"{self.y(value):.1f}"
            self.parts.append(f'<line x1="{self.left}" x2="{right}" y1="{at}" y2="{at}" stroke="#ddd"/>')
            self.parts.append(f'<text x="{self.left - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{value:{sign if value else ""}.{digits}f}</text>')
        values, digits = ticks(*self.x_range)
        for value in values:
            self.parts.append(f'<line x1="{self.x(value):.1f}" x2="{self.x(value):.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="#555"/>')
            self.parts.append(f'<text x="{self.x(value):.1f}" y="{bottom + 19}" text-anchor="middle">{value:,.{digits}f}</text>')
        middle = self.top + self.height / 2
        self.parts += [
            f'<polyline points="{self.left},{self.top} {self.left},{bottom} {right},{bottom}" fill="none" stroke="#555"/>',
            f'<text x="{self.left + self.width / 2}" y="{bottom + 40}" text-anchor="middle">{x_label}</text>',
            f'<text x="{self.left - 52}" y="{middle}" text-anchor="middle" transform="rotate(-90 {self.left - 52} {middle})">{y_label}</text>',
            f'<text x="{self.left}" y="{self.top - 14}" font-size="14">{title}</text>',
        ]

    def line(self, points, style):
        places = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        self.parts.append(f'<polyline points="{places}" fill="none" {style}/>')


def draw(runs):
    """Validation losses over steps, and beside them how far each run is from the one in bf16 with its seed."""
    # Curves lie on each other: bf16 is broad and below, fp8 thin, variants are dashed above both.
    others = ["#1e8449", "#8e44ad", "#d68910", "#555555"]
    styles = {name: f'stroke="{others[i % 4]}" stroke-width="2" stroke-dasharray="6 4"' for i, name in enumerate(n for n in runs if n not in ("bf16", "fp8"))}
    styles.update(bf16='stroke="#5dade2" stroke-width="5"', fp8='stroke="#c0392b" stroke-width="1.5"')
    width, height, top = 1000, 420, 70
    every = [run for of in runs.values() for run in of.values()]
    last = max(run.steps for run in every)
    # The loss before the first step is that of chance, and would flatten the rest.
    shown = {run: [(step, loss) for step, loss in run.curve if step > 0] for run in every}
    apart = {}
    for run in every:
        base = dict(shown[runs["bf16"][run.seed]])
        if run.name != "bf16":
            apart[run] = [(step, percent(loss, base[step])) for step, loss in shown[run] if step in base]

    def span(points):
        values = [value for _, value in points]
        margin = 0.06 * (max(values) - min(values)) or 0.06
        return min(values) - margin, max(values) + margin

    losses = Panel(80, top, 380, height - top - 60, (0, last), span([p for points in shown.values() for p in points]))
    tokens = every[0].tokens // every[0].steps
    losses.axes("Validation loss", f"step ({tokens:,} tokens each)", "validation loss (nats per token)")
    for name in runs:
        for run in runs[name].values():
            losses.line(shown[run], styles[name])
    difference = Panel(590, top, 380, height - top - 60, (0, last), span([(0, 0.0), *(p for points in apart.values() for p in points)]))
    difference.axes("Difference from bf16 with the same seed", f"step ({tokens:,} tokens each)", "difference in validation loss (%)", "+")
    difference.line([(0, 0), (last, 0)], styles["bf16"])
    for run, points in apart.items():
        difference.line(points, styles[run.name])
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    at = 80
    for name, of in runs.items():
        label = f"{name} ({len(of)} seed{'s' if len(of) > 1 else ''})"
        svg.append(f'<line x1="{at}" x2="{at + 22}" y1="20" y2="20" {styles[name]}/>')
        svg.append(f'<text x="{at + 28}" y="24">{label}</text>')
        at += 50 + 7 * len(label)
    return "\n".join([*svg, *losses.parts, *difference.parts, "</svg>"]) + "\n"


def main():
    commands = {"manifest": print_manifest, "wheels": print_wheels, "corpus": make_corpus, "check": check_inspected, "report": report}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
